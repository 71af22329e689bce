# SPDX-License-Identifier: Apache-2.0
"""What the maths of an op and the collectives of a rank are given in a step.

Rows are index arrays of the canonical token table; values may be of any tensor library. Knows no collective library.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tokenspeed.spmd.declare import Form
from tokenspeed.spmd.graph import Op, RowSet
from tokenspeed.spmd.mesh import Group, Mesh
from tokenspeed.spmd.placement import Axes, Layout, MoveKind, Rows, TokenTable

Event = tuple[MoveKind, Axes, str]


@dataclass(frozen=True)
class Request:
    """A collective that a rank waits for. label: the op that owns it. Rows of source and target are those of `rows`
    where a move changes them; an exchange inside an op sends one array to each member of its group."""

    kind: MoveKind
    axes: Axes
    label: str
    payload: Any
    source: Layout | None = None
    rows: RowSet = RowSet.TOKENS

    @property
    def event(self) -> Event:
        return self.kind, self.axes, self.label


class StepInput:
    """One step. sources: whole arrays by the name of their op. sampled: the rows that are sampled, ascending. context:
    what the maths need beside their inputs. memo: what whoever runs the plan works out of the step once. sampled_index:
    for one rank alone, the sampled rows as `take` wants them, where only the device knows which they are; `sampled`
    then says no more than how many."""

    def __init__(
        self,
        table: TokenTable,
        sources: Mapping[str, Any],
        sampled: Rows,
        context: Any = None,
        sampled_index: Any = None,
    ) -> None:
        self.table = table
        self.sources = sources
        self.sampled = sampled
        self.context = context
        self.sampled_index = sampled_index
        self.memo: dict[object, Any] = {}
        self._rows: dict[tuple[RowSet, Layout, int], Rows] = {}
        self._places: dict[tuple[RowSet, Layout, Layout, int], Rows] = {}

    def rows(self, which: RowSet, layout: Layout, rank: int) -> Rows:
        """The rows of a value that a rank holds, as indices of the whole value."""
        key = (which, layout.replace("P", "R"), rank)
        if key not in self._rows:
            held = self.table.rows(layout, rank)
            is_sampled = which is RowSet.SAMPLED
            self._rows[key] = np.flatnonzero(np.isin(self.sampled, held)) if is_sampled else held
        return self._rows[key]

    def places(self, which: RowSet, source: Layout, target: Layout, rank: int) -> Rows:
        """Where the rows that a rank has under `target` stand among those it has under `source`."""
        key = (which, source, target, rank)
        if key not in self._places:
            self._places[key] = np.searchsorted(self.rows(which, source, rank), self.rows(which, target, rank))
        return self._places[key]

    def selected(self, layout: Layout, rank: int) -> Rows:
        """Where the sampled rows stand among the rows of the tokens that a rank has."""
        return np.flatnonzero(np.isin(self.rows(RowSet.TOKENS, layout, rank), self.sampled))


@dataclass(slots=True)
class View:
    """What the maths of an op sees of its rank, good until the op has answered."""

    mesh: Mesh
    rank: int
    op: Op
    form: Form
    step: StepInput

    @property
    def context(self) -> Any:
        """What the step carries for the maths."""
        return self.step.context

    @property
    def rows(self) -> Rows:
        """The rows of the op's inputs in the canonical table."""
        which = self.op.ins[0].rows if self.op.ins else self.op.outs[0].rows
        return self.step.rows(which, self.form.source, self.rank)

    def index(self, group: Group) -> int:
        """The rank's place in a group."""
        return self.mesh.index(self.rank, self.mesh.axes_of(group))

    def size(self, group: Group) -> int:
        """Ranks of a group."""
        return self.mesh.size_of(self.mesh.axes_of(group))

    def exchanges(self) -> bool:
        """Whether the form chosen has exchanges."""
        return bool(self.form.exchanges)

    def exchange(self, place: int, parts: Sequence[Any]) -> Request:
        """The op's exchange at `place`: part i goes to member i of the group, what returns came from member i."""
        placed = self.form.exchanges[place]
        return Request(placed.kind, placed.axes, self.op.name, tuple(parts))
