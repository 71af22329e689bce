# SPDX-License-Identifier: Apache-2.0
"""Exchange tensors between the ranks of a replica, each a process with one device.

A solution makes a communicator: `call(rendezvous)` joins the other ranks and blocks until all are there. Tensors are on
the communicator's device and have rows first. Every rank of a group makes the same calls in the same order; a rank
without rows calls too. A peer that has gone, or that does not come within timeout_s, raises RankLostError and leaves
the communicator closed. Knows ranks; does not know meshes, layouts or what is computed.

The process of rank 0 calls `open_store` before it starts the others: they need the address, and may come before it
joins.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Store


class RankLostError(RuntimeError):
    """Another rank has gone or does not answer."""


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """How ranks find each other. address: "host:port" of the store that rank 0 opens, good for one communicator; None
    where a launcher has set the environment. device: with its index where there are several. store: what `open_store`
    gave, for rank 0 alone; without it rank 0 opens one at the address when it joins."""

    rank: int
    world_size: int
    address: str | None
    device: str
    timeout_s: float
    store: Store | None = None


def open_store(address: str) -> tuple[Store, str]:
    """Serve "host:port" for the other ranks, and the address to tell them; port 0 lets the system choose. The host must
    be one that they can reach, and nothing else is listened on. OSError when the port is taken."""
    host, port = split_address(address)
    listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    port = listener.getsockname()[1]
    store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    return store, f"{address.rpartition(':')[0]}:{port}"


def split_address(address: str) -> tuple[str, int]:
    """("::1", 80) of "[::1]:80"."""
    host, _, port = address.rpartition(":")
    assert port.isdecimal(), f"address {address!r} is not host:port"
    return host.strip("[]"), int(port)


class RankGroup(Protocol):
    """This rank's end of a group. counts: rows of each member, in the order of ranks; zero is legal."""

    members: tuple[int, ...]

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over the members, the same bits on all. x stays as it is."""
        ...

    def all_gather(self, x: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """The rows of all members, one after the other."""
        ...

    def reduce_scatter(self, x: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """This member's run of the rows of the sum; x has those of all members, one after the other."""
        ...

    def all_to_all(self, parts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Part i goes to member i; what member i sent comes back at i. Parts may have any number of rows, which the
        others need not know; dtype and further dimensions are alike everywhere."""
        ...

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """The first member's x, in place; all give one of the same shape and dtype."""
        ...


class Communicator(Protocol):
    """One process among the ranks. Not for use by two threads at once."""

    rank: int
    world_size: int

    def group(self, members: Sequence[Sequence[int]]) -> RankGroup:
        """This rank's group among these, which part the ranks; members ascend. All ranks call this alike and in the
        same order; equal partitions share their groups."""
        ...

    def gather(self, word: str) -> tuple[str, ...]:
        """The word of every rank, in their order. For set-up, not for steps."""
        ...

    def close(self) -> None:
        """Leave. Idempotent, and never waits for others."""
        ...


class Join(Protocol):
    """Signature of the op."""

    def __call__(self, rendezvous: Rendezvous) -> Communicator: ...
