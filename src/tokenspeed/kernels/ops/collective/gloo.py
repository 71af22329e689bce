# SPDX-License-Identifier: Apache-2.0
"""Processes with their tensors in main memory, over TCP."""

from __future__ import annotations

import datetime
import socket
from typing import Any

import torch
from torch.distributed import PrefixStore, TCPStore, distributed_c10d, is_gloo_available  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Store

from tokenspeed.kernels.ops.collective import Communicator, Rendezvous
from tokenspeed.kernels.ops.collective._process_groups import Carrier, ProcessGroup, ProcessRanks
from tokenspeed.kernels.registry import Band, KernelContext, Ok, Reason, Solution, Support


def supports(ctx: KernelContext) -> Support:
    if ctx.device != "cpu":
        return Reason(f"carries tensors of the cpu, not of {ctx.device}")
    return Ok() if is_gloo_available() else Reason("this torch is built without gloo")


def join(rendezvous: Rendezvous) -> Communicator:
    return ProcessRanks(rendezvous, Carrier(_connect, _leave, ProcessGroup), torch.device("cpu"))


def _connect(store: Store, place: int, size: int, timeout: datetime.timedelta) -> Any:
    backend: Any = distributed_c10d.ProcessGroupGloo
    options = backend._Options()
    options._timeout = timeout
    options._devices = [backend.create_device(hostname=_own_address(store))]
    return backend(store, place, size, options)


def _leave(_process_group: object) -> None:
    """Sockets close when nobody holds it any more."""


def _own_address(store: Store) -> str:
    """The address of this host on the way to the store, which the other ranks reach too; sends nothing."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    assert isinstance(store, TCPStore), f"{type(store).__name__} has no address"
    family, kind, _, _, address = socket.getaddrinfo(store.host, store.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


SOLUTION = Solution("gloo", Band.PORTABLE, supports, lambda _ctx: join, batch_invariant=True)
