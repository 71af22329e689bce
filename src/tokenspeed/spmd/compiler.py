# SPDX-License-Identifier: Apache-2.0
"""Choose the form of every op and every move between them, for the whole model at once and at the least price.

Dynamic programming over the ops in order. A state is, for each value that is still to be read (the branch, the residual
stream, what is tapped), the layouts of it that have been made; only layouts from which nothing is reached cheaper than
from another are dropped, so the result is a cheapest program. Layers that repeat meet the same states, whose
expansions are kept. Knows prices and placements; does not know maths.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product

from tokenspeed.spmd.cost import CostModel, Pricing
from tokenspeed.spmd.declare import Form, Placement, forms
from tokenspeed.spmd.graph import Graph, Op, Value
from tokenspeed.spmd.mesh import Mesh
from tokenspeed.spmd.placement import Axes, Layout, LayoutError, axes_of, layouts, with_addends
from tokenspeed.spmd.program import Call, Move, Plan, Program, Step, Variant
from tokenspeed.spmd.routes import Hop, Routes

BUCKETS: tuple[int | None, ...] = (64, 1024, None)
OPEN_BUCKET_TOKENS = 8192
NUM_RIVALS = 32
"""How many of the cheapest states each other one is compared with; more would only make the search smaller."""

Kept = tuple[Layout, ...]
State = tuple[Kept, ...]
Reader = tuple[Placement, int]
"""A placement and which of its inputs a value is."""
Fate = tuple[Reader, ...]
"""Who reads a value from here on, in order."""


def compile_plan(
    graph: Graph, mesh: Mesh, *, model: CostModel | None = None, buckets: tuple[int | None, ...] = BUCKETS
) -> Plan:
    """The plan of a model: a program for each bucket of tokens, neighbours that are equal merged. LayoutError, naming
    the op, when an op cannot get its inputs."""
    variants: list[Variant] = []
    for bucket in buckets:
        num_tokens = OPEN_BUCKET_TOKENS if bucket is None else bucket
        pricing = Pricing(model or CostModel(), mesh, num_tokens, graph.itemsize)
        cost_fs, program = cheapest(graph, pricing)
        if variants and variants[-1].program.steps == program.steps:
            variants.pop()
        variants.append(Variant(bucket, program, cost_fs))
    return Plan(tuple(variants))


def price_fs(program: Program, pricing: Pricing) -> int:
    """The price of a program, node by node."""
    values = {value.index: value for op in program.ops for value in op.outs}
    total = 0
    for step in program.steps:
        if isinstance(step, Move):
            total += pricing.move_fs(step.kind, step.axes, step.source, values[step.value].width)
        else:
            total += call_fs(program.ops[step.op], step, pricing)
    return total


def call_fs(op: Op, call: Call, pricing: Pricing) -> int:
    """The price of one call, with the all-reduce that is fused into it."""
    total = pricing.op_fs(op, call.form.source, call.form.exchanges)
    if call.fused:
        total += pricing.fused_fs(call.fused, call.source(0), op.ins[0].width)
    return total


@dataclass(frozen=True, slots=True)
class _Way:
    """One way to run an op from a state. moves: hops of each input."""

    price: int
    state: State
    form: Form
    moves: tuple[tuple[Hop, ...], ...]
    fused: Axes


@dataclass(frozen=True, slots=True)
class _Shape:
    """All that the expansion of an op depends on, so that repeated layers share it. live: width and fate of each live
    value before the op. slots: where the inputs stand in `live`."""

    placement: Placement
    live: tuple[tuple[int, Fate], ...]
    slots: tuple[int, ...]
    outs: tuple[tuple[int, Fate], ...]


_Level = dict[State, tuple[int, State | None, _Way | None]]
"""States after an op: price, and the state and way that led there."""


def cheapest(graph: Graph, pricing: Pricing) -> tuple[int, Program]:
    """The least price and a program of it; the same on every rank."""
    search = _Search(graph, pricing)
    return search.run()


class _Search:
    def __init__(self, graph: Graph, pricing: Pricing) -> None:
        self._ops = tuple(graph.ops)
        self._pricing = pricing
        self._readers: list[list[tuple[int, Reader]]] = [[] for _ in graph.values]
        for place, op in enumerate(self._ops):
            for slot, value in enumerate(op.ins):
                self._readers[value.index].append((place, (op.placement, slot)))
        self._routes: dict[int, Routes] = {}
        self._steps: dict[tuple[_Shape, tuple[tuple[State, int], ...]], tuple[int, _Level]] = {}
        self._ways: dict[_Shape, dict[State, tuple[_Way, ...]]] = {}
        self._kept: dict[tuple[int, Fate, Kept], Kept] = {}
        self._wants: dict[Fate, tuple[Layout, ...]] = {}

    def run(self) -> tuple[int, Program]:
        live: tuple[Value, ...] = ()
        levels: list[_Level] = [{(): (0, None, None)}]
        total = 0
        for place, op in enumerate(self._ops):
            shape = self._shape(place, live)
            base, level = self._step(op, shape, levels[-1])
            total += base
            levels.append(level)
            live = self._live_after(place, live)
        assert list(levels[-1]) == [()], "values are left that nobody reads"
        return total, self._program(levels)

    def _step(self, op: Op, shape: _Shape, states: _Level) -> tuple[int, _Level]:
        """The least price after an op, and the states with their prices above it. Repeated layers soon meet the same
        states at the same distances."""
        key = (shape, tuple((state, price) for state, (price, _, _) in states.items()))
        if key not in self._steps:
            after = self._without_beaten(shape, self._advance(op, shape, states))
            base = min(price for price, _, _ in after.values())
            self._steps[key] = base, {state: (price - base, last, way) for state, (price, last, way) in after.items()}
        return self._steps[key]

    def _advance(self, op: Op, shape: _Shape, states: _Level) -> _Level:
        after: _Level = {}
        known = self._ways.setdefault(shape, {})
        for state, (price, _, _) in states.items():
            if state not in known:
                known[state] = self._expand(op, shape, state)
            for way in known[state]:
                total = price + way.price
                if way.state not in after or total < after[way.state][0]:
                    after[way.state] = (total, state, way)
        if not after:
            raise LayoutError(f"{op.name}: no form of it can get its inputs")
        return after

    def _without_beaten(self, shape: _Shape, states: _Level) -> _Level:
        """Without the states that a cheaper one could turn into for the difference in price."""
        live = _live_shapes(shape)
        kept: _Level = {}
        rivals: list[tuple[int, State]] = []
        for state in sorted(states, key=lambda each: (states[each][0], each)):
            price = states[state][0]
            if any(lower + self._turning(other, state, live) <= price for lower, other in rivals):
                continue
            kept[state] = states[state]
            if len(rivals) < NUM_RIVALS:
                rivals.append((price, state))
        return kept

    def _turning(self, state: State, target: State, live: list[tuple[int, Fate]]) -> float:
        """The price of making in one state all that is kept in another."""
        total = 0.0
        for (width, fate), kept, wanted in zip(live, state, target, strict=True):
            if kept != wanted:
                total += self._route_table(width).turning(kept, wanted, is_shared=len(fate) > 1)
        return total

    def _expand(self, op: Op, shape: _Shape, state: State) -> tuple[_Way, ...]:
        """The cheapest way to each state after an op."""
        best: dict[State, _Way] = {}
        for form in forms(op.placement, self._pricing.mesh, op.name):
            base = self._pricing.op_fs(op, form.source, form.exchanges)
            for price, kept, moves, fused in self._arrivals(shape, state, form.source):
                after = self._settle(shape, kept, form.target)
                if after not in best or base + price < best[after].price:
                    best[after] = _Way(base + price, after, form, moves, fused)
        return tuple(best.values())

    def _arrivals(
        self, shape: _Shape, state: State, target: Layout
    ) -> Iterator[tuple[int, State, tuple[tuple[Hop, ...], ...], Axes]]:
        """Ways to bring all inputs of an op to a layout."""
        if len(set(shape.slots)) == len(shape.slots):
            options = [list(self._bring(shape, state, slot, target)) for slot in range(len(shape.slots))]
        else:  # a value that is read twice by one op is brought once
            options = [
                [(0, (*state[place], target), (), ())]
                if place in shape.slots[:slot]
                else list(self._bring(shape, state, slot, target))
                for slot, place in enumerate(shape.slots)
            ]
        for combination in product(*options):
            kept = list(state)
            for place, (_, made, _, _) in zip(shape.slots, combination, strict=True):
                kept[place] = tuple(sorted({*kept[place], *made}))
            fused = combination[0][3] if combination else ()
            yield sum(each[0] for each in combination), tuple(kept), tuple(each[2] for each in combination), fused

    def _bring(
        self, shape: _Shape, state: State, slot: int, target: Layout
    ) -> Iterator[tuple[int, Kept, tuple[Hop, ...], Axes]]:
        """Ways to bring one input to a layout: price, layouts kept, moves, fused axes. A value that is read again may
        first be brought to another layout that its later readers share."""
        place = shape.slots[slot]
        width, fate = shape.live[place]
        routes, kept = self._route_table(width), state[place]
        direct = routes.best(kept, target)
        if direct is None:
            return
        made = _made(kept, direct[1], target)
        yield direct[0], made, direct[1], ()
        if slot == 0 and shape.placement.fuses and shape.slots.count(place) == 1:
            for price, path, axes in routes.fused(kept, target):
                yield price, _made(kept, path, with_addends(target, axes)), path, axes
        if len(fate) == 1:
            return
        for between in self._wanted(fate):
            last = routes.between(between, target)
            first = None if last is None or last[0] >= direct[0] else routes.best(kept, between)
            if first is None or last is None:
                continue
            extra = first[0] + last[0] - direct[0]
            if (len(fate) - 1) * routes.gain(made, between) >= extra:
                yield first[0] + last[0], _made((*kept, between), first[1] + last[1], target), first[1] + last[1], ()

    def _settle(self, shape: _Shape, kept: State, target: Layout) -> State:
        """The state after the op: values that are read no more are gone, its outputs are there."""
        after = []
        for place, (width, fate) in enumerate(shape.live):
            num_reads = shape.slots.count(place)
            if len(fate) > num_reads:
                after.append(self._worth_keeping(width, fate[num_reads:], kept[place]))
        after += [(target,) for _, fate in shape.outs if fate]
        return tuple(after)

    def _worth_keeping(self, width: int, fate: Fate, kept: Kept) -> Kept:
        if len(kept) == 1:
            return kept
        key = (width, fate, kept)
        if key not in self._kept:
            routes = self._route_table(width)
            self._kept[key] = routes.worth_keeping(kept, self._wanted(fate))
        return self._kept[key]

    def _wanted(self, fate: Fate) -> tuple[Layout, ...]:
        """The layouts at which these readers may take a value; when there are several, also those between."""
        if fate not in self._wants:
            mesh = self._pricing.mesh
            wanted = set(layouts(len(mesh.axes), "RS")) if len(fate) > 1 else set()
            for placement, slot in fate:
                sources = {form.source for form in forms(placement, mesh, "")}
                if placement.fuses and slot == 0:
                    sources |= {with_addends(layout, axes) for layout in sources for axes in axes_of(layout, "R")}
                wanted |= sources
            self._wants[fate] = tuple(sorted(wanted))
        return self._wants[fate]

    def _route_table(self, width: int) -> Routes:
        if width not in self._routes:
            self._routes[width] = Routes(self._pricing, width)
        return self._routes[width]

    def _shape(self, place: int, live: tuple[Value, ...]) -> _Shape:
        op = self._ops[place]
        return _Shape(
            op.placement,
            tuple((value.width, self._fate(value, place)) for value in live),
            tuple(live.index(value) for value in op.ins),
            tuple((value.width, self._fate(value, place + 1)) for value in op.outs),
        )

    def _fate(self, value: Value, start: int) -> Fate:
        """Who reads a value from op `start` on; an op that reads it twice counts twice."""
        return tuple(reader for place, reader in self._readers[value.index] if place >= start)

    def _live_after(self, place: int, live: tuple[Value, ...]) -> tuple[Value, ...]:
        candidates = (*live, *self._ops[place].outs)
        return tuple(value for value in candidates if self._fate(value, place + 1))

    def _program(self, levels: list[_Level]) -> Program:
        ways: list[_Way] = []
        state: State | None = ()
        for level in reversed(levels[1:]):
            assert state is not None
            _, state, way = level[state]
            assert way is not None
            ways.append(way)
        steps: list[Step] = []
        for place, way in enumerate(reversed(ways)):
            for value, hops in zip(self._ops[place].ins, way.moves, strict=True):
                steps += [Move(value.index, source, kind, axes) for source, kind, axes in hops]
            steps.append(Call(place, way.form, way.fused))
        return Program(self._pricing.mesh, self._ops, _without_repeats(steps))


def _live_shapes(shape: _Shape) -> list[tuple[int, Fate]]:
    """Width and remaining readers of what is live after an op."""
    before = ((width, fate[shape.slots.count(place) :]) for place, (width, fate) in enumerate(shape.live))
    return [(width, fate) for width, fate in (*before, *shape.outs) if fate]


def _made(kept: Iterable[Layout], path: tuple[Hop, ...], target: Layout) -> Kept:
    """What is there after a route."""
    return (*kept, *(source for source, _, _ in path), target)


def _without_repeats(steps: list[Step]) -> tuple[Step, ...]:
    """Slices that two readers make of one value are made once; other moves are never repeated by the search."""
    seen: set[Step] = set()
    out: list[Step] = []
    for step in steps:
        if isinstance(step, Call) or step not in seen:
            out.append(step)
        seen.add(step)
    return tuple(out)
