# SPDX-License-Identifier: Apache-2.0
"""Communicators over process groups of torch.distributed, shared by the solutions that differ in what carries them.

There is no default group: each group stands alone on a store, so communicators may follow one another in a process.
Rows travel as bytes, hence any dtype does. Sums are made by the receiver in the order of ranks, half precision in
float32: they have the bits of the reference, whatever else the call holds. Does not know a backend by name.
"""

from __future__ import annotations

import contextlib
import datetime
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed import BroadcastOptions, PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed import rendezvous as find_launcher  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Store

from tokenspeed.kernels.ops.collective import RankLostError, Rendezvous, open_store, split_address

# Below this a sum costs one exchange of everything; above, two exchanges of a part each.
_GATHERED_BYTES_MAX = 1 << 16


@dataclass(frozen=True, slots=True)
class Carrier:
    """connect: (store, rank in the group, size of the group, timeout) -> a backend's process group, blocking until all
    are there. leave: drops one without waiting for anybody."""

    connect: Callable[[Store, int, int, datetime.timedelta], Any]
    leave: Callable[[Any], None]
    group: type[ProcessGroup]


class ProcessGroup:
    """A RankGroup. A group of one has no process group and exchanges nothing."""

    def __init__(self, members: tuple[int, ...], place: int, ranks: ProcessRanks, process_group: Any) -> None:
        self.members = members
        self._place, self._size = place, len(members)
        self._ranks, self._process_group = ranks, process_group

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1)
        if flat.numel() * flat.itemsize <= _GATHERED_BYTES_MAX:
            gathered = self.all_gather(flat, (flat.numel(),) * self._size)
            return _sum_in_order(gathered.view(self._size, -1) if flat.numel() else gathered[None]).view(x.shape)
        least, more = divmod(flat.numel(), self._size)
        counts = [least + (place < more) for place in range(self._size)]
        return self.all_gather(self.reduce_scatter(flat, counts), counts).view(x.shape)

    def all_gather(self, x: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        self._check(counts, len(x), counts[self._place])
        most = max(counts)
        padded = _padded(x, most)
        gathered = x.new_empty(self._size * most, *x.shape[1:])
        outputs, inputs = _bytes(gathered), _bytes(padded)
        with self._ranks.peers_answer():
            if self._size == 1:
                outputs.copy_(inputs)
            elif outputs.numel():
                self._process_group._allgather_base(outputs, inputs).wait()
        if min(counts) == most:
            return gathered
        return torch.cat([gathered[i * most : i * most + count] for i, count in enumerate(counts)])

    def reduce_scatter(self, x: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        self._check(counts, len(x), sum(counts))
        mine = counts[self._place]
        return _sum_in_order(self._exchanged(x, counts, [mine] * self._size).view(self._size, mine, *x.shape[1:]))

    def all_to_all(self, parts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        assert len(parts) == self._size, (len(parts), self.members)
        counts = torch.tensor([len(part) for part in parts])
        theirs = self._exchanged(counts.to(parts[0].device), [1] * self._size, [1] * self._size).tolist()
        return torch.split(self._exchanged(torch.cat(list(parts)), counts.tolist(), theirs), theirs)

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        options = BroadcastOptions()
        options.rootRank = 0
        sent = x.contiguous()
        carried = _bytes(sent.view(-1))
        with self._ranks.peers_answer():
            if self._size > 1 and carried.numel():
                self._process_group.broadcast([carried], options).wait()
        return x if sent is x else x.copy_(sent)

    def close(self) -> None:
        process_group, self._process_group = self._process_group, None
        if process_group is not None:
            self._ranks.carrier.leave(process_group)

    def _check(self, counts: Sequence[int], num_rows: int, expected: int) -> None:
        assert len(counts) == self._size, (counts, self.members)
        assert num_rows == expected, (num_rows, counts, self.members)

    def _exchanged(self, x: torch.Tensor, counts: Sequence[int], theirs: Sequence[int]) -> torch.Tensor:
        """x's runs of counts rows go to the members in turn; the runs of theirs rows that they sent come back."""
        received = x.new_empty(sum(theirs), *x.shape[1:])
        outputs, inputs = _bytes(received), _bytes(x.contiguous())
        with self._ranks.peers_answer():
            if self._size == 1:
                outputs.copy_(inputs)
            elif _row_bytes(x):
                self._process_group.alltoall_base(outputs, inputs, list(theirs), list(counts)).wait()
        return received


class ProcessRanks:
    """A Communicator: this process among the ranks of a store."""

    def __init__(self, rendezvous: Rendezvous, carrier: Carrier, device: torch.device) -> None:
        self.rank, self.world_size, self.carrier = rendezvous.rank, rendezvous.world_size, carrier
        self._device, self._timeout = device, datetime.timedelta(seconds=rendezvous.timeout_s)
        self._closed, self._reason = False, f"rank {self.rank} has closed its communicator"
        self._groups: dict[tuple[tuple[int, ...], ...], ProcessGroup] = {}
        with self.peers_answer():
            self._store = _store_of(rendezvous, self._timeout)
        self._world = self.group((tuple(range(self.world_size)),))

    def group(self, members: Sequence[Sequence[int]]) -> ProcessGroup:
        partition = tuple(tuple(each) for each in members)
        if partition not in self._groups:
            assert sorted(sum(partition, ())) == list(range(self.world_size)), f"{partition} does not part the ranks"
            assert all(list(each) == sorted(each) for each in partition), f"members of {partition} do not ascend"
            [mine] = [each for each in partition if self.rank in each]
            self._groups[partition] = group = self._connected(mine, len(self._groups))
            return group
        return self._groups[partition]

    def gather(self, word: str) -> tuple[str, ...]:
        letters = torch.tensor(list(word.encode()), dtype=torch.uint8, device=self._device)
        words = self._world.all_to_all([letters] * self.world_size)
        return tuple(bytes(each.tolist()).decode() for each in words)

    def close(self) -> None:
        self._closed, self._store = True, None
        for group in self._groups.values():
            group.close()

    @contextlib.contextmanager
    def peers_answer(self) -> Iterator[None]:
        """What torch says of a lost peer or a timeout, as RankLostError; the other ranks see this one leave too."""
        if self._closed:
            raise RankLostError(self._reason)
        try:
            yield
        except RuntimeError as error:
            self._reason = f"rank {self.rank} of {self.world_size} lost another within {self._timeout}: {error}"
            self.close()
            raise RankLostError(self._reason) from error

    def _connected(self, members: tuple[int, ...], index: int) -> ProcessGroup:
        place, size, process_group = members.index(self.rank), len(members), None
        with self.peers_answer():
            if self._store is not None and size > 1:
                store = PrefixStore(f"group/{index}/{members[0]}", self._store)
                process_group = self.carrier.connect(store, place, size, self._timeout)
        return self.carrier.group(members, place, self, process_group)


def _store_of(rendezvous: Rendezvous, timeout: datetime.timedelta) -> Store | None:
    """None for a rank alone."""
    if rendezvous.world_size == 1:
        return None
    if rendezvous.address is None:
        return _launcher_store(rendezvous, timeout)
    if rendezvous.rank == 0:
        store = rendezvous.store or open_store(rendezvous.address)[0]
        store.set_timeout(timeout)
        return store
    host, port = split_address(rendezvous.address)
    joined: Store = TCPStore(host, port, timeout=timeout, wait_for_workers=False)
    return joined


def _launcher_store(rendezvous: Rendezvous, timeout: datetime.timedelta) -> Store:
    """The launcher's store outlives communicators, so the n-th of each rank meet under a name of their own."""
    store, rank, world_size = next(find_launcher("env://", timeout=timeout))
    store.set_timeout(timeout)
    found, asked = (rank, world_size), (rendezvous.rank, rendezvous.world_size)
    assert found == asked, f"the launcher says (rank, world size) {found}, the rendezvous {asked}"
    own: Store = PrefixStore(f"communicator/{store.add(f'communicators/{rank}', 1)}", store)
    return own


def _sum_in_order(parts: torch.Tensor) -> torch.Tensor:
    """(N, ...) -> (...), one addition after the other."""
    half = parts.dtype.is_floating_point and parts.itemsize < 4
    total = parts[0].to(torch.float32 if half else parts.dtype, copy=True)
    for part in parts[1:]:
        total += part
    return total.to(parts.dtype)


def _padded(x: torch.Tensor, num_rows: int) -> torch.Tensor:
    if len(x) == num_rows:
        return x.contiguous()
    padded = x.new_zeros(num_rows, *x.shape[1:])
    padded[: len(x)] = x
    return padded


def _row_bytes(x: torch.Tensor) -> int:
    return math.prod(x.shape[1:]) * x.itemsize


def _bytes(x: torch.Tensor) -> torch.Tensor:
    """(rows, bytes of a row), the same memory; x is contiguous, which strides of single elements need not show."""
    assert x.is_contiguous(), x.stride()
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8).view(len(x), _row_bytes(x))
