# SPDX-License-Identifier: Apache-2.0
"""Run a program on one real rank: the moves that the plan lists, then the maths of each op.

Knows which rows a rank holds and in which order they travel. Does not know a tensor library, how collectives are made,
or what an op computes; those are given to it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from tokenspeed.spmd.graph import Op, RowSet, Value
from tokenspeed.spmd.placement import Axes, Layout, MoveKind, Rows, moved
from tokenspeed.spmd.program import Call, Move, Program
from tokenspeed.spmd.step import Request, StepInput, View

Tensor = Any


class Collectives(Protocol):
    """One rank's end of the groups of its mesh. Tensors have rows first. counts: rows of each member of the group, in
    the order of ranks; zero is legal."""

    def all_reduce(self, x: Tensor, axes: Axes) -> Tensor:
        """The sum over the group. x stays as it is, since another op may read the addends."""
        ...

    def all_gather(self, x: Tensor, axes: Axes, counts: tuple[int, ...]) -> Tensor:
        """The rows of all members, one after the other."""
        ...

    def reduce_scatter(self, x: Tensor, axes: Axes, counts: tuple[int, ...]) -> Tensor:
        """This member's run of the rows of the sum; x has those of all members, one after the other."""
        ...

    def exchange(self, kind: MoveKind, parts: tuple[Tensor, ...], axes: Axes) -> tuple[Tensor, ...]:
        """An op's own exchange: part i goes to member i; what member i sent comes back at i."""
        ...

    def take(self, x: Tensor, rows: Rows) -> Tensor:
        """Some rows, in this order."""
        ...

    def zeros(self, num_rows: int, value: Value) -> Tensor:
        """For an op that an idle rank skips."""
        ...


class Executor:
    """One rank. fused: an all-reduce and an op in one kernel, by op name, (view, axes, *inputs) -> outputs; where there
    is none the two are made one after the other, on every rank alike since all have the same table of them."""

    def __init__(
        self,
        program: Program,
        rank: int,
        maths: Mapping[str, Callable[..., Any]],
        collectives: Collectives,
        fused: Mapping[str, Callable[..., Any]] | None = None,
    ) -> None:
        self._program, self._rank = program, rank
        self._maths, self._fused, self._collectives = maths, fused or {}, collectives
        self._values = {value.index: value for op in program.ops for value in op.outs}
        self._last_read = {value.index: place for place, op in enumerate(program.ops) for value in op.ins}
        computed = [op.name for op in program.ops if op.ins and op.outs]
        assert not set(computed) - set(maths), f"no maths for {sorted(set(computed) - set(maths))}"

    def run(self, step: StepInput) -> dict[str, Tensor]:
        """The outputs by the name of the op that takes them."""
        held: dict[tuple[int, Layout], Tensor] = {}
        outputs: dict[str, Tensor] = {}
        for each in self._program.steps:
            if isinstance(each, Move):
                held[each.value, each.target("move")] = self._move(step, each, held[each.value, each.source])
                continue
            op = self._program.ops[each.op]
            inputs = [held[value.index, each.source(slot)] for slot, value in enumerate(op.ins)]
            if not op.outs:
                outputs[op.name] = inputs[0]
            for value, tensor in zip(op.outs, self._call(step, op, each, inputs), strict=True):
                held[value.index, each.form.target] = tensor
            held = {key: x for key, x in held.items() if self._last_read.get(key[0], 0) > each.op}
        return outputs

    def _move(self, step: StepInput, move: Move, x: Tensor) -> Tensor:
        rows, target = self._values[move.value].rows, move.target("move")
        if move.kind is MoveKind.SLICE:
            return self._taken(x, step.places(rows, move.source, target, self._rank))
        if move.kind is MoveKind.ALL_REDUCE:
            return self._collectives.all_reduce(x, move.axes)
        if move.kind is MoveKind.ALL_GATHER:
            whole = moved(move.source, move.kind, move.axes, "move")
            places, counts = self._travel(step, rows, whole, move.source, move.axes)
            return self._taken(self._collectives.all_gather(x, move.axes, counts), np.argsort(places))
        places, counts = self._travel(step, rows, move.source, target, move.axes)
        return self._collectives.reduce_scatter(self._taken(x, places), move.axes, counts)

    def _travel(
        self, step: StepInput, rows: RowSet, whole: Layout, part: Layout, axes: Axes
    ) -> tuple[Rows, tuple[int, ...]]:
        """Where the members' rows stand among the whole ones, member after member, and how many each has."""
        members = self._program.mesh.members(self._rank, axes)
        places = [step.places(rows, whole, part, rank) for rank in members]
        return np.concatenate(places), tuple(len(each) for each in places)

    def _taken(self, x: Tensor, places: Rows) -> Tensor:
        """x itself when the rows are already in their order."""
        if len(places) == len(x) and np.array_equal(places, np.arange(len(places))):
            return x
        return self._collectives.take(x, places)

    def _call(self, step: StepInput, op: Op, call: Call, inputs: list[Tensor]) -> Sequence[Tensor]:
        if not op.outs:
            return ()
        rows = step.rows(op.ins[0].rows if op.ins else op.outs[0].rows, call.form.source, self._rank)
        if not op.ins:
            return (self._taken(step.sources[op.name], rows),)
        view = View(self._program.mesh, self._rank, op, call.form, step, rows)
        if call.fused and op.name in self._fused:
            return _several(self._fused[op.name](view, call.fused, *inputs))
        if call.fused:
            inputs[0] = self._collectives.all_reduce(inputs[0], call.fused)
        if not len(rows) and op.placement.idle_ok:
            return [self._collectives.zeros(0, value) for value in op.outs]
        result = self._maths[op.name](view, *inputs)
        return _several(self._exchanged(result) if isinstance(result, Generator) else result)

    def _exchanged(self, asking: Generator[Request, tuple[Tensor, ...], Tensor]) -> Tensor:
        """Answer an op that stops at its exchanges."""
        try:
            request = next(asking)
            while True:
                answer = self._collectives.exchange(request.kind, request.payload, request.axes)
                request = asking.send(answer)
        except StopIteration as end:
            return end.value


def _several(result: Tensor) -> Sequence[Tensor]:
    return result if isinstance(result, tuple) else (result,)
