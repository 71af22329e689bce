# SPDX-License-Identifier: Apache-2.0
"""The mesh: all ranks of a replica, refined so that every group of ranks is a run of its axes.

A group spans the chain of sizes between its inner and its outer size (experts lie outside the tensor split of one
expert: from moe_tp to moe_tp * ep). The sorted sizes must each divide the next; the axes are the successive ratios,
outermost first. Knows ranks and sizes; does not know tensors, processes or what is computed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from functools import cache
from itertools import pairwise, product
from math import prod

from tokenspeed.core.errors import ConfigError


class Group(StrEnum):
    """The named sub-chains of a mesh."""

    ATTENTION = "attention"
    ATTENTION_DP = "attention_dp"
    DENSE = "dense"
    MOE = "moe"
    EP = "ep"
    WORLD = "world"


@dataclass(frozen=True, slots=True)
class GroupSizes:
    """How many ways each kind of layer is split. attention_tp * attention_dp ranks make a pipeline stage; dense_tp and
    moe_tp * ep may be smaller, then their weights are repeated on the ranks outside."""

    attention_tp: int = 1
    attention_dp: int = 1
    dense_tp: int = 1
    moe_tp: int = 1
    ep: int = 1
    pipeline: int = 1

    @classmethod
    def of(
        cls, tp: int, *, attention_dp: int = 1, ep: int = 1, moe_tp: int | None = None, pipeline: int = 1
    ) -> GroupSizes:
        """The usual choice: attention over tp ranks in each of attention_dp partitions, dense layers over all, and
        experts over ep with each expert over what is left. ConfigError when ep does not divide the ranks."""
        world = tp * attention_dp
        if moe_tp is None:
            if ep < 1 or world % ep:
                raise ConfigError(f"ep {ep} does not divide the {world} ranks; ep may be {_listed(_divisors(world))}")
            moe_tp = world // ep
        return cls(tp, attention_dp, world, moe_tp, ep, pipeline)

    @property
    def world(self) -> int:
        """Ranks of one pipeline stage."""
        return self.attention_tp * self.attention_dp

    def span(self, group: Group) -> tuple[int, int]:
        """(inner, outer): where the group starts and ends in the chain of sizes."""
        return {
            Group.ATTENTION: (1, self.attention_tp),
            Group.ATTENTION_DP: (self.attention_tp, self.world),
            Group.DENSE: (1, self.dense_tp),
            Group.MOE: (1, self.moe_tp),
            Group.EP: (self.moe_tp, self.moe_tp * self.ep),
            Group.WORLD: (1, self.world),
        }[group]


@dataclass(frozen=True, slots=True)
class Mesh:
    """axes: sizes, outermost first, each at least 2; none for one rank. Ranks count through a stage with the innermost
    axis fastest, and stage by stage. Build it with `Mesh.of`."""

    sizes: GroupSizes
    axes: tuple[int, ...]

    @classmethod
    def of(cls, sizes: GroupSizes) -> Mesh:
        """ConfigError, in one line that names sizes that would work, when the sizes do not form a chain."""
        fault = _fault(sizes)
        if fault is not None:
            raise ConfigError(fault)
        return cls(sizes, tuple(outer // inner for inner, outer in pairwise(_chain(sizes)))[::-1])

    @property
    def world(self) -> int:
        """Ranks of one pipeline stage: all that a plan is about."""
        return self.sizes.world

    @property
    def num_ranks(self) -> int:
        """Ranks of the replica, all stages together."""
        return self.world * self.sizes.pipeline

    def axes_of(self, group: Group) -> tuple[int, ...]:
        """Indices into `axes`, ascending; none when the group has one rank."""
        return _axes_of(self, group)

    def size_of(self, axes: Iterable[int]) -> int:
        """Ranks of one group along these axes."""
        return prod(self.axes[axis] for axis in axes)

    def stage_of(self, rank: int) -> int:
        """The pipeline stage of a rank."""
        assert 0 <= rank < self.num_ranks, f"rank {rank} of {self.num_ranks}"
        return rank // self.world

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """The place of a rank on each axis."""
        assert 0 <= rank < self.num_ranks, f"rank {rank} of {self.num_ranks}"
        rest, places = rank % self.world, []
        for size in reversed(self.axes):
            rest, place = divmod(rest, size)
            places.append(place)
        return tuple(reversed(places))

    def rank(self, coordinates: tuple[int, ...], stage: int = 0) -> int:
        """The inverse of coordinates and stage_of."""
        assert len(coordinates) == len(self.axes), f"{len(coordinates)} coordinates for {len(self.axes)} axes"
        place = 0
        for size, coordinate in zip(self.axes, coordinates, strict=True):
            assert 0 <= coordinate < size, f"coordinate {coordinate} of {size}"
            place = place * size + coordinate
        return stage * self.world + place

    def index(self, rank: int, axes: Iterable[int]) -> int:
        """The place of a rank in its group along these axes, in the order of ranks."""
        places, index = self.coordinates(rank), 0
        for axis in sorted(axes):
            index = index * self.axes[axis] + places[axis]
        return index

    def members(self, rank: int, axes: Iterable[int]) -> tuple[int, ...]:
        """The ranks of this rank's group along these axes, ascending."""
        chosen, places = set(axes), self.coordinates(rank)
        choices = [range(size) if i in chosen else (places[i],) for i, size in enumerate(self.axes)]
        return tuple(self.rank(each, self.stage_of(rank)) for each in product(*choices))

    def process_groups(self, axes: Iterable[int]) -> tuple[tuple[int, ...], ...]:
        """Every group along these axes, in all stages: a partition of the ranks."""
        return _process_groups(self, tuple(axes))

    def pipeline_groups(self) -> tuple[tuple[int, ...], ...]:
        """Ranks that stand at the same place of each stage, first stage first."""
        return tuple(tuple(range(place, self.num_ranks, self.world)) for place in range(self.world))

    def __str__(self) -> str:
        spans = (f"{group}={','.join(map(str, self.axes_of(group))) or '-'}" for group in Group if group != Group.WORLD)
        stages = f" stages={self.sizes.pipeline}" if self.sizes.pipeline > 1 else ""
        return f"mesh {'x'.join(map(str, self.axes)) or '1'} {' '.join(spans)}{stages}"


@cache
def _axes_of(mesh: Mesh, group: Group) -> tuple[int, ...]:
    inner, outer = mesh.sizes.span(group)
    bounds = _chain(mesh.sizes)[::-1]
    return tuple(i for i in range(len(mesh.axes)) if inner <= bounds[i + 1] and bounds[i] <= outer)


@cache
def _process_groups(mesh: Mesh, axes: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    return tuple(sorted({mesh.members(rank, axes) for rank in range(mesh.num_ranks)}))


def _chain(sizes: GroupSizes) -> tuple[int, ...]:
    return tuple(sorted({bound for group in Group for bound in sizes.span(group)}))


def _fault(sizes: GroupSizes) -> str | None:
    """What is wrong with the sizes, None when they form a chain."""
    for field in fields(sizes):
        value = getattr(sizes, field.name)
        if value < 1:
            return f"{field.name} is {value}; it must be at least 1"
    world = sizes.world
    for name, size in (("dense_tp", sizes.dense_tp), ("moe_tp * ep", sizes.moe_tp * sizes.ep)):
        if world % size:
            return f"{name} is {size}, which does not divide the {world} ranks of attention; {_working(sizes, name)}"
    for inner, outer in pairwise(_chain(sizes)):
        if outer % inner:
            names = [_owner(sizes, bound) for bound in (inner, outer)]
            advice = "; ".join(_working(sizes, name) for name in names)
            return f"{names[0]} {inner} and {names[1]} {outer} do not nest, one must divide the other; {advice}"
    return None


def _owner(sizes: GroupSizes, bound: int) -> str:
    """The setting that brings this size into the chain."""
    bounds = {
        "attention_tp": sizes.attention_tp,
        "dense_tp": sizes.dense_tp,
        "moe_tp": sizes.moe_tp,
        "moe_tp * ep": sizes.moe_tp * sizes.ep,
    }
    return next(name for name, size in bounds.items() if size == bound)


def _working(sizes: GroupSizes, name: str) -> str:
    """The values of one setting with which the others would form a chain."""
    if name == "moe_tp * ep":
        return f"{_working(sizes, 'ep')}; {_working(sizes, 'moe_tp')}"
    tried = {size: _with(sizes, name, size) for size in _divisors(sizes.world)}
    works = [size for size, changed in tried.items() if _nests(changed)]
    return f"{name} may be {_listed(works)}" if works else f"no {name} would do"


def _with(sizes: GroupSizes, name: str, size: int) -> GroupSizes:
    if name != "attention_tp":
        return replace(sizes, **{name: size})
    return replace(sizes, attention_tp=size, attention_dp=sizes.world // size)


def _nests(sizes: GroupSizes) -> bool:
    divides = sizes.world % sizes.dense_tp == 0 and sizes.world % (sizes.moe_tp * sizes.ep) == 0
    return divides and all(outer % inner == 0 for inner, outer in pairwise(_chain(sizes)))


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def _listed(sizes: list[int]) -> str:
    """1, 2 or 4."""
    head, last = sizes[:-1], sizes[-1]
    return f"{', '.join(map(str, head))} or {last}" if head else str(last)
