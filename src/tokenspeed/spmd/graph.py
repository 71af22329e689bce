# SPDX-License-Identifier: Apache-2.0
"""A model as its ops in the order they run: the intermediate form that models declare and the compiler reads.

Values carry rows: of the step's tokens, or of those that are sampled. Knows names, widths and placements; knows no
layout, no mesh and no maths.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum

from tokenspeed.spmd import declare
from tokenspeed.spmd.declare import Placement
from tokenspeed.spmd.mesh import Group
from tokenspeed.spmd.placement import LayoutError

Run = Callable[..., object]
"""The maths of an op on one device, (context, *inputs) -> outputs; the graph only carries it to who runs the plan."""


class RowSet(StrEnum):
    """Which rows a value has; the rows that are sampled belong to the ranks that own their tokens."""

    TOKENS = "tokens"
    SAMPLED = "sampled"


@dataclass(frozen=True, slots=True)
class Value:
    """index: place in Graph.values. width: elements of a row."""

    index: int
    name: str
    width: int
    rows: RowSet


@dataclass(frozen=True, slots=True)
class Op:
    """One boundary of a model: everything inside it runs on one device, apart from the exchanges it declares."""

    name: str
    placement: Placement
    ins: tuple[Value, ...]
    outs: tuple[Value, ...]


class Graph:
    """Ops are added in the order they run. itemsize: bytes of an element, for prices."""

    def __init__(self, itemsize: int = 2) -> None:
        self.itemsize = itemsize
        self.ops: list[Op] = []
        self.values: list[Value] = []
        self.maths: dict[str, Run] = {}
        self._names: set[str] = set()

    def op(
        self,
        name: str,
        placement: Placement,
        *ins: Value,
        widths: tuple[int, ...],
        rows: RowSet | None = None,
        run: Run | None = None,
    ) -> tuple[Value, ...]:
        """Add an op with an output of each width. rows: those of the outputs where they are not the inputs'. run: its
        maths; a graph that is only planned needs none."""
        if name in self._names:
            raise LayoutError(f"{name}: two ops have this name")
        for value in ins:
            if value.index >= len(self.values) or self.values[value.index] != value:
                raise LayoutError(f"{name}: the input {value.name} belongs to another graph")
            if value.rows != ins[0].rows:
                raise LayoutError(f"{name}: {value.name} has the rows of {value.rows}, {ins[0].name} of {ins[0].rows}")
        out_rows = rows or (ins[0].rows if ins else RowSet.TOKENS)
        outs = tuple(self._value(name, place, width, out_rows) for place, width in enumerate(widths))
        self._names.add(name)
        self.ops.append(Op(name, placement, ins, outs))
        if run is not None:
            self.maths[name] = run
        return outs

    def source(self, name: str, width: int = 1, placement: Placement = declare.WHOLE) -> Value:
        """What a step starts from, such as the token ids; usually known to every rank."""
        return self.op(name, placement, widths=(width,))[0]

    def embed(self, name: str, ids: Value, width: int, over: Group = Group.DENSE, *, run: Run | None = None) -> Value:
        """An embedding whose vocabulary is split over a group."""
        return self.op(name, declare.split(over, launches=1), ids, widths=(width,), run=run)[0]

    def norm(self, name: str, x: Value, *, run: Run | None = None) -> Value:
        """Any normalisation of single rows."""
        return self.op(name, declare.NORM, x, widths=(x.width,), run=run)[0]

    def add(self, name: str, *terms: Value, run: Run | None = None) -> Value:
        """The sum of values of one width."""
        _same_widths(name, terms)
        return self.op(name, declare.ADD, *terms, widths=(terms[0].width,), run=run)[0]

    def add_norm(self, name: str, x: Value, residual: Value | None, *, run: Run | None = None) -> tuple[Value, Value]:
        """(normalised x + residual, x + residual); None starts the residual stream with x."""
        ins = (x,) if residual is None else (x, residual)
        _same_widths(name, ins)
        normed, stream = self.op(name, declare.NORM, *ins, widths=(x.width, x.width), run=run)
        return normed, stream

    def project(self, name: str, x: Value, width: int, *, bias: bool = False, run: Run | None = None) -> Value:
        """A small projection that every rank has whole."""
        placement = declare.projection(x.width, width, bias=bias, itemsize=self.itemsize)
        return self.op(name, placement, x, widths=(width,), run=run)[0]

    def attention(self, name: str, *ins: Value, width: int, shared_widths: int = 0, run: Run | None = None) -> Value:
        """From hidden rows, or from latents, to the output projection. shared_widths: see declare.attention."""
        return self.op(name, declare.attention(shared_widths), *ins, widths=(width,), run=run)[0]

    def latents(self, name: str, x: Value, widths: tuple[int, ...], *, run: Run | None = None) -> tuple[Value, ...]:
        """Small projections that every rank has whole, each with a norm after it."""
        placement = declare.projection(x.width, sum(widths), bias=True, itemsize=self.itemsize)
        return self.op(name, placement, x, widths=widths, run=run)

    def feed_forward(self, name: str, x: Value, over: Group = Group.DENSE, *, run: Run | None = None) -> Value:
        """A feed-forward block whose inner width is split over a group."""
        return self.op(name, declare.split(over), x, widths=(x.width,), run=run)[0]

    def router(self, name: str, x: Value, num_experts: int, *, bias: bool = False, run: Run | None = None) -> Value:
        """Scores of experts, a small projection in a number format of its own: ranks without rows enter it too, so that
        what they exchange has the same format."""
        placement = declare.projection(x.width, num_experts, bias=bias, itemsize=self.itemsize)
        return self.op(name, replace(placement, idle_ok=False), x, widths=(num_experts,), run=run)[0]

    def experts(
        self, name: str, x: Value, scores: Value, top_k: int, *, all_to_all: bool = True, run: Run | None = None
    ) -> Value:
        """Routed experts; scores: the router's, a projection of x."""
        placement = declare.experts(x.width, top_k, all_to_all=all_to_all)
        return self.op(name, placement, x, scores, widths=(x.width,), run=run)[0]

    def select(self, name: str, x: Value, *, run: Run | None = None) -> Value:
        """The rows that are sampled; who runs the plan may know how to take them, and then it needs no maths."""
        return self.op(name, declare.SELECT, x, widths=(x.width,), rows=RowSet.SAMPLED, run=run)[0]

    def head(self, name: str, x: Value, vocab_size: int, over: Group = Group.DENSE, *, run: Run | None = None) -> Value:
        """Logits of a vocabulary split over a group."""
        return self.op(name, declare.head(vocab_size, over), x, widths=(vocab_size,), run=run)[0]

    def output(self, name: str, x: Value, placement: Placement = declare.WHOLE) -> None:
        """Leave the model with this value, or tap it for a drafter; by default whole on every rank."""
        self.op(name, placement, x, widths=())

    def _value(self, op: str, place: int, width: int, rows: RowSet) -> Value:
        value = Value(len(self.values), f"{op}.{place}" if place else op, width, rows)
        self.values.append(value)
        return value


def _same_widths(name: str, values: tuple[Value, ...]) -> None:
    widths = {value.width for value in values}
    if len(widths) != 1:
        raise LayoutError(f"{name}: the widths {sorted(widths)} cannot be added")
