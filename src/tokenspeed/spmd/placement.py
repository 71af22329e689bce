# SPDX-License-Identifier: Apache-2.0
"""Layouts, the moves between them, and the token table of a step.

A layout has one letter an axis of the mesh: R, every rank holds the rows; S, each holds its rows of the one token
table; P, each holds an addend of the rows. Knows no op and no tensor library; which moves are worth their price is the
compiler's matter.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from itertools import accumulate, combinations, product

import numpy as np
import numpy.typing as npt

from tokenspeed.spmd.mesh import Group, Mesh

Layout = str
Axes = tuple[int, ...]
Rows = npt.NDArray[np.int64]


class LayoutError(Exception):
    """A declaration or a plan that has no meaning. A bug of a model file, never of a user."""


class MoveKind(StrEnum):
    """The only ways a value changes its layout, and the exchanges an op may own."""

    ALL_REDUCE = "all_reduce"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_GATHER = "all_gather"
    SLICE = "slice"
    ALL_TO_ALL = "all_to_all"


MOVES = {
    ("P", "R"): MoveKind.ALL_REDUCE,
    ("P", "S"): MoveKind.REDUCE_SCATTER,
    ("S", "R"): MoveKind.ALL_GATHER,
    ("R", "S"): MoveKind.SLICE,
}
LETTERS_OF = {kind: letters for letters, kind in MOVES.items()}


def move_kind(source: str, target: str, op: str) -> MoveKind:
    """The move between two letters of one axis. LayoutError naming the op when there is none."""
    kind = MOVES.get((source, target))
    if kind is None:
        raise LayoutError(f"{op}: there is no move from {source} to {target}")
    return kind


def check_layout(layout: Layout, mesh: Mesh, op: str) -> None:
    """LayoutError unless the layout has one of the three letters for each axis."""
    if len(layout) != len(mesh.axes) or set(layout) - set("RSP"):
        raise LayoutError(f"{op}: {layout!r} is no layout of {len(mesh.axes)} axes")


def moved(layout: Layout, kind: MoveKind, axes: Axes, op: str) -> Layout:
    """The layout after one move along `axes`. LayoutError naming the op when a letter does not fit."""
    source, target = LETTERS_OF[kind]
    letters = list(layout)
    for axis in axes:
        if letters[axis] != source:
            raise LayoutError(f"{op}: {kind} along axis {axis} needs {source}, but {layout} has {letters[axis]}")
        letters[axis] = target
    return "".join(letters)


def with_addends(layout: Layout, axes: Axes) -> Layout:
    """What an all-reduce along these axes turns into the layout."""
    return "".join("P" if axis in axes else letter for axis, letter in enumerate(layout))


def axes_of(layout: Layout, letter: str) -> tuple[Axes, ...]:
    """Every choice of at least one axis with this letter."""
    fitting = [axis for axis, each in enumerate(layout) if each == letter]
    return tuple(axes for size in range(1, len(fitting) + 1) for axes in combinations(fitting, size))


def layouts(num_axes: int, letters: str = "RSP") -> tuple[Layout, ...]:
    """Every layout of so many axes."""
    return tuple("".join(each) for each in product(letters, repeat=num_axes))


def shown(layout: Layout) -> str:
    """For texts: one rank has no axes."""
    return layout or "-"


@dataclass(frozen=True)
class TokenTable:
    """The tokens of one step in their canonical order, and how many each rank of a stage owns (zero is legal). Every S
    of the step means these rows; a partition of data-parallel attention owns a run of them."""

    mesh: Mesh
    counts: tuple[int, ...]

    def __post_init__(self) -> None:
        assert len(self.counts) == self.mesh.world, f"{len(self.counts)} counts for {self.mesh.world} ranks"
        assert all(count >= 0 for count in self.counts), f"counts {self.counts}"

    @classmethod
    def of(cls, mesh: Mesh, partition_counts: Iterable[int]) -> TokenTable:
        """The table of a step whose attention partitions have so many tokens; each is shared out evenly."""
        given = tuple(partition_counts)
        assert len(given) == mesh.sizes.attention_dp, f"{len(given)} partitions, the mesh has {mesh.sizes.attention_dp}"
        size = mesh.sizes.attention_tp
        return cls(mesh, tuple((count + size - 1 - place) // size for count in given for place in range(size)))

    @property
    def num_tokens(self) -> int:
        return sum(self.counts)

    def partition_counts(self) -> tuple[int, ...]:
        """Tokens of each attention partition."""
        size = self.mesh.sizes.attention_tp
        return tuple(sum(self.counts[start : start + size]) for start in range(0, self.mesh.world, size))

    def rows(self, layout: Layout, rank: int) -> Rows:
        """The rows that a rank holds under a layout, ascending: those of all ranks that share its place on the S axes.
        P holds rows as R does."""
        others = tuple(axis for axis, letter in enumerate(layout) if letter != "S")
        starts = _starts(self.counts)
        runs = [np.arange(starts[each], starts[each + 1]) for each in _members(self.mesh, rank, others)]
        return np.concatenate(runs)


@cache
def _starts(counts: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(accumulate(counts, initial=0))


@cache
def _members(mesh: Mesh, rank: int, axes: Axes) -> tuple[int, ...]:
    return mesh.members(rank, axes)


def attention_layout(mesh: Mesh) -> Layout:
    """Rows as attention needs them: each partition its own."""
    partitions = mesh.axes_of(Group.ATTENTION_DP)
    return "".join("S" if axis in partitions else "R" for axis in range(len(mesh.axes)))
