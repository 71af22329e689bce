# SPDX-License-Identifier: Apache-2.0
"""The oracle: ranks are threads of one process that meet in memory under any address.

Every exchange is the same: all members lay down what they have, and each takes everything. Says, as an assertion, when
members make different calls.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tokenspeed.kernels.ops.collective import Communicator, RankLostError, Rendezvous
from tokenspeed.kernels.registry import Band, Ok, Solution

Members = tuple[int, ...]


@dataclass(slots=True)
class _Exchange:
    """What members have laid down, by rank, and who has taken it."""

    call: object
    laid: dict[int, Any] = field(default_factory=dict)
    taken: set[int] = field(default_factory=set)


class _Room:
    """Where the ranks of one address meet."""

    def __init__(self) -> None:
        self.joined: set[int] = set()
        self.gone: set[int] = set()
        self._exchanges: dict[tuple[Members, int], _Exchange] = {}
        self._changed = threading.Condition()

    def exchange(self, key: tuple[Members, int], rank: int, call: object, value: object, timeout_s: float) -> list[Any]:
        """What all members lay down under this key, in their order; a rank that laid it down and left is no loss."""
        members = key[0]
        with self._changed:
            here = self._exchanges.setdefault(key, _Exchange(call))
            assert here.call == call, f"rank {rank} calls {call}, another of {members} {here.call}"
            here.laid[rank] = value
            self._changed.notify_all()
            self._changed.wait_for(lambda: len(here.laid) == len(members) or self._lost(here, members), timeout_s)
            missing = sorted(set(members) - set(here.laid))
            if missing:
                raise RankLostError(f"rank {rank} has waited for ranks {missing}; gone are {sorted(self.gone)}")
            here.taken.add(rank)
            if len(here.taken) == len(members):
                del self._exchanges[key]
            return [here.laid[member] for member in members]

    def leave(self, rank: int) -> None:
        with self._changed:
            self.gone.add(rank)
            self._changed.notify_all()

    def _lost(self, here: _Exchange, members: Members) -> bool:
        return bool(self.gone & (set(members) - set(here.laid)))


class _Rooms:
    """The rooms that still wait for ranks, by address and number of ranks; a full one is known to its ranks alone."""

    def __init__(self) -> None:
        self._open: dict[tuple[str | None, int], _Room] = {}
        self._lock = threading.Lock()

    def enter(self, rendezvous: Rendezvous) -> _Room:
        key = (rendezvous.address, rendezvous.world_size)
        with self._lock:
            room = self._open.get(key)
            if room is None or room.gone:
                room = self._open[key] = _Room()
            assert rendezvous.rank not in room.joined, f"rank {rendezvous.rank} has joined {rendezvous.address} already"
            room.joined.add(rendezvous.rank)
            if len(room.joined) == rendezvous.world_size:
                del self._open[key]
            return room


class _ThreadGroup:
    def __init__(self, ranks: _ThreadRanks, members: Members) -> None:
        self.members = members
        self._ranks, self._place = ranks, members.index(ranks.rank)
        self._num_calls = 0

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return _sum_in_order(self._exchange(("all_reduce", tuple(x.shape), x.dtype), x.clone()))

    def all_gather(self, x: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        assert len(x) == counts[self._place], (x.shape, counts)
        return torch.cat(self._exchange(("all_gather", _kind(x), tuple(counts)), x.clone()))

    def reduce_scatter(self, x: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        assert len(x) == sum(counts), (x.shape, counts)
        total = _sum_in_order(self._exchange(("reduce_scatter", _kind(x), tuple(counts)), x.clone()))
        return total.split(list(counts))[self._place].clone()  # type: ignore[no-untyped-call, no-any-return]

    def all_to_all(self, parts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        assert len(parts) == len(self.members), (len(parts), self.members)
        everything = self._exchange(("all_to_all", _kind(parts[0])), [part.clone() for part in parts])
        return tuple(theirs[self._place] for theirs in everything)

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        return x.copy_(self._exchange(("broadcast", tuple(x.shape), x.dtype), x.clone())[0])

    def words(self, word: str) -> tuple[str, ...]:
        return tuple(self._exchange(("gather",), word))

    def _exchange(self, call: tuple[object, ...], value: object) -> list[Any]:
        self._num_calls += 1
        return self._ranks.exchange((self.members, self._num_calls), call, value)


class _ThreadRanks:
    """A Communicator: this thread among the ranks of a room."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        self.rank, self.world_size = rendezvous.rank, rendezvous.world_size
        self._timeout_s, self._closed = rendezvous.timeout_s, False
        self._groups: dict[Members, _ThreadGroup] = {}
        self._room = _ROOMS.enter(rendezvous)
        self._world = self.group((tuple(range(self.world_size)),))
        self._world.words("")

    def group(self, members: Sequence[Sequence[int]]) -> _ThreadGroup:
        partition = tuple(tuple(each) for each in members)
        assert sorted(sum(partition, ())) == list(range(self.world_size)), f"{partition} does not part the ranks"
        assert all(list(each) == sorted(each) for each in partition), f"members of {partition} do not ascend"
        [mine] = [each for each in partition if self.rank in each]
        if mine not in self._groups:
            self._groups[mine] = _ThreadGroup(self, mine)
        return self._groups[mine]

    def gather(self, word: str) -> tuple[str, ...]:
        return self._world.words(word)

    def close(self) -> None:
        self._closed = True
        self._room.leave(self.rank)

    def exchange(self, key: tuple[Members, int], call: object, value: object) -> list[Any]:
        if self._closed:
            raise RankLostError(f"rank {self.rank} has closed its communicator")
        try:
            return self._room.exchange(key, self.rank, call, value, self._timeout_s)
        except RankLostError:
            self.close()
            raise


def join(rendezvous: Rendezvous) -> Communicator:
    return _ThreadRanks(rendezvous)


def _kind(x: torch.Tensor) -> tuple[object, ...]:
    """What must be alike everywhere whatever the rows."""
    return (x.dtype, x.shape[1:])


def _sum_in_order(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """One addition after the other, half precision in float32."""
    dtype = parts[0].dtype
    total = parts[0].to(torch.float32) if dtype in (torch.float16, torch.bfloat16) else parts[0].clone()
    for part in parts[1:]:
        total = total + part
    return total.to(dtype)


_ROOMS = _Rooms()
SOLUTION = Solution("reference", Band.REFERENCE, lambda _ctx: Ok(), lambda _ctx: join, batch_invariant=True)
