# SPDX-License-Identifier: Apache-2.0
"""Run a program on one real rank: the moves that the plan lists, then the maths of each op.

Knows which rows a rank holds and in which order they travel; what it works out of a step it works out once. Does not
know a tensor library, how collectives are made, or what an op computes; those are given to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import GeneratorType
from typing import Any, Protocol

import numpy as np

from tokenspeed.spmd.graph import Op, RowSet, Value
from tokenspeed.spmd.placement import Axes, Layout, MoveKind, Rows, moved
from tokenspeed.spmd.program import Call, Move, Program
from tokenspeed.spmd.step import Request, StepInput, View

Tensor = Any
Register = tuple[int, Layout]
Held = dict[Register, Tensor]


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

    def index(self, rows: Rows) -> Tensor:
        """The rows as `take` wants them; made once a step and used in every layer."""
        ...

    def take(self, x: Tensor, index: Tensor) -> Tensor:
        """Some rows, in this order."""
        ...

    def zeros(self, num_rows: int, value: Value) -> Tensor:
        """For an op that an idle rank skips."""
        ...


class Executor:
    """One rank. fused: an all-reduce and an op in one kernel, by op name, (view, axes, *inputs) -> outputs; where there
    is none the two are made one after the other, on every rank alike since all have the same table of them. An op
    whose outputs have the sampled rows of its input needs no maths."""

    def __init__(
        self,
        program: Program,
        rank: int,
        maths: Mapping[str, Callable[..., Any]],
        collectives: Collectives,
        fused: Mapping[str, Callable[..., Any]] | None = None,
    ) -> None:
        self._mesh, self._rank = program.mesh, rank
        self._maths, self._fused, self._collectives = maths, fused or {}, collectives
        self._values = {value.index: value for op in program.ops for value in op.outs}
        computed = [op.name for op in program.ops if op.ins and op.outs and not _selects(op)]
        assert not set(computed) - set(maths), f"no maths for {sorted(set(computed) - set(maths))}"
        deaths = _deaths(program)
        self._nodes = [
            (self._node(program.ops, step), deaths.get(place, ())) for place, step in enumerate(program.steps)
        ]

    def run(self, step: StepInput) -> dict[str, Tensor]:
        """The outputs by the name of the op that takes them."""
        held: Held = {}
        outputs: dict[str, Tensor] = {}
        for node, dead in self._nodes:
            node(step, held, outputs)
            for register in dead:
                del held[register]
        return outputs

    def _node(self, ops: Sequence[Op], step: Move | Call) -> _Node:
        if isinstance(step, Move):
            return self._move_node(step)
        op, call = ops[step.op], step
        if not op.ins:
            return self._source_node(op, call)
        sources = [(value.index, call.source(slot)) for slot, value in enumerate(op.ins)]
        targets = [(value.index, call.form.target) for value in op.outs]
        if not targets:
            return lambda step, held, outputs: outputs.__setitem__(op.name, held[sources[0]])
        if _selects(op):
            return self._select_node(sources[0], targets[0])
        mesh, rank, compute = self._mesh, self._rank, self._computation(op, call)
        is_single = len(targets) == 1

        def run(step: StepInput, held: Held, outputs: dict[str, Tensor]) -> None:
            result = compute(View(mesh, rank, op, call.form, step), [held[source] for source in sources])
            if is_single:
                held[targets[0]] = result
            else:
                held.update(zip(targets, result, strict=True))

        return run

    def _computation(self, op: Op, call: Call) -> Callable[[View, list[Tensor]], Tensor]:
        """The output of an op, or a tuple of its outputs where there are several."""
        if call.fused and op.name in self._fused:
            fused = self._fused[op.name]
            return lambda view, inputs: fused(view, call.fused, *inputs)
        maths, collectives, may_skip = self._maths.get(op.name), self._collectives, op.placement.idle_ok
        assert maths is not None, f"{op.name} has no maths"

        def compute(view: View, inputs: list[Tensor]) -> Tensor:
            if call.fused:
                inputs[0] = collectives.all_reduce(inputs[0], call.fused)
            if may_skip and inputs[0].shape[0] == 0:
                nothing = tuple(collectives.zeros(0, value) for value in op.outs)
                return nothing if len(nothing) > 1 else nothing[0]
            result = maths(view, *inputs)
            return self._exchanged(result) if isinstance(result, GeneratorType) else result

        return compute

    def _exchanged(self, asking: GeneratorType[Request, tuple[Tensor, ...], Tensor]) -> Tensor:
        """Answer an op that stops at its exchanges."""
        try:
            request = next(asking)
            while True:
                request = asking.send(self._collectives.exchange(request.kind, request.payload, request.axes))
        except StopIteration as end:
            return end.value

    def _source_node(self, op: Op, call: Call) -> _Node:
        layout, value = call.form.source, op.outs[0]

        def run(step: StepInput, held: Held, outputs: dict[str, Tensor]) -> None:
            whole = step.sources[op.name]
            if "S" in layout:
                whole = self._taken(step, whole, ("source", layout), lambda: step.rows(value.rows, layout, self._rank))
            held[value.index, call.form.target] = whole

        return run

    def _select_node(self, source: Register, target: Register) -> _Node:
        layout = source[1]

        def run(step: StepInput, held: Held, outputs: dict[str, Tensor]) -> None:
            if step.sampled_index is not None:
                held[target] = self._collectives.take(held[source], step.sampled_index)
                return
            places = partial(step.selected, layout, self._rank)
            held[target] = self._taken(step, held[source], ("selected", layout), places)

        return run

    def _move_node(self, move: Move) -> _Node:
        name, rows = self._values[move.value].name, self._values[move.value].rows
        source, target = (move.value, move.source), (move.value, move.target(name))
        act = {
            MoveKind.SLICE: self._slice,
            MoveKind.ALL_REDUCE: self._all_reduce,
            MoveKind.ALL_GATHER: self._all_gather,
            MoveKind.REDUCE_SCATTER: self._reduce_scatter,
        }[move.kind]

        def run(step: StepInput, held: Held, outputs: dict[str, Tensor]) -> None:
            held[target] = act(step, move, rows, held[source])

        return run

    def _slice(self, step: StepInput, move: Move, rows: RowSet, x: Tensor) -> Tensor:
        target = move.target("move")
        key = (move.kind, rows, move.source, target)
        return self._taken(step, x, key, lambda: step.places(rows, move.source, target, self._rank))

    def _all_reduce(self, step: StepInput, move: Move, rows: RowSet, x: Tensor) -> Tensor:
        return self._collectives.all_reduce(x, move.axes)

    def _all_gather(self, step: StepInput, move: Move, rows: RowSet, x: Tensor) -> Tensor:
        whole = moved(move.source, move.kind, move.axes, "move")
        places, counts = self._travel(step, rows, whole, move.source, move.axes)
        gathered = self._collectives.all_gather(x, move.axes, counts)
        return self._taken(step, gathered, (move.kind, rows, move.source, move.axes), lambda: np.argsort(places))

    def _reduce_scatter(self, step: StepInput, move: Move, rows: RowSet, x: Tensor) -> Tensor:
        places, counts = self._travel(step, rows, move.source, move.target("move"), move.axes)
        ordered = self._taken(step, x, (move.kind, rows, move.source, move.axes), lambda: places)
        return self._collectives.reduce_scatter(ordered, move.axes, counts)

    def _travel(
        self, step: StepInput, rows: RowSet, whole: Layout, part: Layout, axes: Axes
    ) -> tuple[Rows, tuple[int, ...]]:
        """Where the members' rows stand among the whole ones, member after member, and how many each has."""
        key = ("travel", rows, whole, part, axes)
        if key not in step.memo:
            places = [step.places(rows, whole, part, rank) for rank in self._mesh.members(self._rank, axes)]
            step.memo[key] = np.concatenate(places), tuple(len(each) for each in places)
        places_and_counts: tuple[Rows, tuple[int, ...]] = step.memo[key]
        return places_and_counts

    def _taken(self, step: StepInput, x: Tensor, key: object, places: Callable[[], Rows]) -> Tensor:
        """x at some of its rows: itself when they are all of them in their order. key: names the places in a step."""
        memo = step.memo
        if key not in memo:
            rows = places()
            is_whole = len(rows) == len(x) and np.array_equal(rows, np.arange(len(rows)))
            memo[key] = None if is_whole else self._collectives.index(rows)
        index = memo[key]
        return x if index is None else self._collectives.take(x, index)


_Node = Callable[[StepInput, Held, dict[str, Tensor]], None]


def _selects(op: Op) -> bool:
    return bool(op.ins and op.outs) and op.ins[0].rows is not op.outs[0].rows


def _deaths(program: Program) -> dict[int, tuple[Register, ...]]:
    """The registers that nobody reads after a step of the program."""
    last: dict[Register, int] = {}
    for place, step in enumerate(program.steps):
        if isinstance(step, Move):
            last[step.value, step.source] = last[step.value, step.target("move")] = place
            continue
        op = program.ops[step.op]
        last.update({(value.index, step.source(slot)): place for slot, value in enumerate(op.ins)})
        last.update({(value.index, step.form.target): place for value in op.outs})
    deaths: dict[int, tuple[Register, ...]] = {}
    for register, place in last.items():
        deaths[place] = (*deaths.get(place, ()), register)
    return deaths
