# SPDX-License-Identifier: Apache-2.0
"""Run a program over all ranks of a stage in one process: the CPU twin of what ranks do, and the oracle of tests.

Every rank is a generator that stops at each collective; all ranks must ask for the same one. Values are numpy float64
arrays whose first dimension is the rows. Knows layouts and the token table; the maths of each op is given to it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tokenspeed.spmd.declare import Form
from tokenspeed.spmd.graph import Op, RowSet
from tokenspeed.spmd.mesh import Mesh
from tokenspeed.spmd.placement import Layout, LayoutError, MoveKind, TokenTable, moved
from tokenspeed.spmd.program import Call, Move, Program
from tokenspeed.spmd.step import Event, Request, StepInput, View

Array = npt.NDArray[np.float64]


Exchanging = Generator[Request, tuple[Array, ...], "Array | tuple[Array, ...]"]
Maths = Callable[..., "Array | tuple[Array, ...] | Exchanging"]
"""(view, *inputs) -> outputs. An op with exchanges is a generator that yields `view.exchange(...)` for each."""


@dataclass(frozen=True)
class Outcome:
    """outputs: by the name of the op that takes them, a list over ranks. traces: the collectives of each rank."""

    outputs: Mapping[str, list[Array]]
    traces: tuple[tuple[Event, ...], ...]


def run(program: Program, step: StepInput, maths: Mapping[str, Maths]) -> Outcome:
    """Run one step on every rank. LayoutError when ranks ask for different collectives."""
    mesh = program.mesh
    ranks = [_Rank(program, step, maths, rank) for rank in range(mesh.world)]
    running = [rank.steps() for rank in ranks]
    answers: list[tuple[Array, ...] | None] = [None] * mesh.world
    while True:
        requests = [_resume(steps, answer) for steps, answer in zip(running, answers, strict=True)]
        asked = [None if request is None else request.event for request in requests]
        if any(event != asked[0] for event in asked):
            raise LayoutError(f"ranks ask for different collectives: {asked}")
        waiting = [request for request in requests if request is not None]
        if not waiting:
            break
        for rank, request in zip(ranks, waiting, strict=True):
            rank.trace.append(request.event)
        answers = list(_collective(mesh, step, waiting))
    names = [op.name for op in program.ops if not op.outs]
    outputs = {name: [rank.outputs[name] for rank in ranks] for name in names}
    return Outcome(outputs, tuple(tuple(rank.trace) for rank in ranks))


_Steps = Generator[Request, tuple[Array, ...], None]


def _resume(steps: _Steps, answer: tuple[Array, ...] | None) -> Request | None:
    try:
        return next(steps) if answer is None else steps.send(answer)
    except StopIteration:
        return None


class _Rank:
    """One rank on its way through a program."""

    def __init__(self, program: Program, step: StepInput, maths: Mapping[str, Maths], rank: int) -> None:
        self.trace: list[Event] = []
        self.outputs: dict[str, Array] = {}
        self._program, self._step, self._maths, self._rank = program, step, maths, rank
        self._values = {value.index: value for op in program.ops for value in op.outs}
        self._held: dict[tuple[int, Layout], Array] = {}

    def steps(self) -> _Steps:
        """Stops at each collective and goes on with its answer."""
        for each in self._program.steps:
            yield from self._move(each) if isinstance(each, Move) else self._call(each)

    def _move(self, move: Move) -> _Steps:
        value, here = self._values[move.value], self._held[move.value, move.source]
        target = move.target(value.name)
        if move.kind is MoveKind.SLICE:
            places = self._step.places(value.rows, move.source, target, self._rank)
            self._held[move.value, target] = here[places]
        else:
            (answer,) = yield Request(move.kind, move.axes, value.name, here, move.source, value.rows)
            self._held[move.value, target] = answer

    def _call(self, call: Call) -> _Steps:
        op = self._program.ops[call.op]
        inputs = [self._held[value.index, call.source(slot)] for slot, value in enumerate(op.ins)]
        if call.fused:
            rows = op.ins[0].rows
            (inputs[0],) = yield Request(
                MoveKind.ALL_REDUCE, call.fused, op.name, inputs[0], source=call.source(0), rows=rows
            )
        if not op.outs:
            self.outputs[op.name] = inputs[0]
            return
        outputs = yield from self._compute(op, call.form, inputs)
        for value, array in zip(op.outs, outputs, strict=True):
            expected = (len(self._step.rows(value.rows, call.form.target, self._rank)), value.width)
            assert array.shape == expected, f"{op.name}: {array.shape}, not {expected}"
            self._held[value.index, call.form.target] = array

    def _compute(
        self, op: Op, form: Form, inputs: list[Array]
    ) -> Generator[Request, tuple[Array, ...], tuple[Array, ...]]:
        which = op.ins[0].rows if op.ins else op.outs[0].rows
        rows = self._step.rows(which, form.source, self._rank)
        if not op.ins:
            return (self._step.sources[op.name][rows],)
        if not len(rows) and op.placement.idle_ok:
            return tuple(np.zeros((0, value.width)) for value in op.outs)
        result = self._maths[op.name](View(self._program.mesh, self._rank, op, form, self._step), *inputs)
        outputs: Array | tuple[Array, ...] = (yield from result) if isinstance(result, Generator) else result
        return outputs if isinstance(outputs, tuple) else (outputs,)


def _collective(mesh: Mesh, step: StepInput, requests: list[Request]) -> list[tuple[Array, ...]]:
    """The answer of every rank."""
    answers: list[tuple[Array, ...]] = [()] * len(requests)
    for members in mesh.process_groups(requests[0].axes):
        if members[0] < mesh.world:
            answered = _group_collective(step, members, [requests[rank] for rank in members])
            for rank, answer in zip(members, answered, strict=True):
                answers[rank] = answer
    return answers


def _group_collective(step: StepInput, members: Sequence[int], requests: list[Request]) -> list[tuple[Array, ...]]:
    first = requests[0]
    if first.source is None:
        return [tuple(request.payload[place] for request in requests) for place in range(len(members))]
    arrays = [request.payload for request in requests if isinstance(request.payload, np.ndarray)]
    if first.kind is MoveKind.ALL_GATHER:
        whole = moved(first.source, first.kind, first.axes, first.label)
        gathered = np.zeros((len(step.rows(first.rows, whole, members[0])), arrays[0].shape[1]))
        for rank, array in zip(members, arrays, strict=True):
            gathered[step.places(first.rows, whole, first.source, rank)] = array
        return [(gathered,)] * len(members)
    total = np.sum(arrays, axis=0)
    if first.kind is MoveKind.ALL_REDUCE:
        return [(total,)] * len(members)
    scattered = moved(first.source, first.kind, first.axes, first.label)
    return [(total[step.places(first.rows, first.source, scattered, rank)],) for rank in members]


def denoted(mesh: Mesh, table: TokenTable, layout: Layout, locals_: Sequence[Array]) -> Array:
    """The whole value that the ranks' arrays stand for. LayoutError when copies that should be equal differ."""
    addends = tuple(axis for axis, letter in enumerate(layout) if letter == "P")
    whole = np.full((table.num_tokens, locals_[0].shape[1]), np.nan)
    for group in mesh.process_groups(addends):
        rows = table.rows(layout, group[0])
        total = np.sum([locals_[rank] for rank in group], axis=0)
        there = whole[rows]
        if not np.all(np.isnan(there) | np.isclose(there, total, rtol=1e-12, atol=1e-12)):
            raise LayoutError(f"copies under {layout} differ")
        whole[rows] = total
    return whole


def apply_move(mesh: Mesh, table: TokenTable, move: Move, locals_: Sequence[Array]) -> list[Array]:
    """One move of a value on all ranks."""
    step = StepInput(table, {}, np.arange(0))
    if move.kind is MoveKind.SLICE:
        target = move.target("value")
        places = [step.places(RowSet.TOKENS, move.source, target, rank) for rank in range(mesh.world)]
        return [array[each] for array, each in zip(locals_, places, strict=True)]
    requests = [Request(move.kind, move.axes, "value", array, move.source) for array in locals_]
    return [answer[0] for answer in _collective(mesh, step, requests)]
