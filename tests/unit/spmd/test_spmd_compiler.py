# SPDX-License-Identifier: Apache-2.0
"""Plans as text, the search against brute force, and declarations that cannot be planned."""

from __future__ import annotations

import heapq
import time
from itertools import count
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from golden import assert_golden
from tokenspeed.spmd import declare
from tokenspeed.spmd.compiler import cheapest, compile_plan, price_fs
from tokenspeed.spmd.cost import CostModel, Pricing
from tokenspeed.spmd.declare import Alternative, Choice, Placement, forms
from tokenspeed.spmd.graph import Graph
from tokenspeed.spmd.mesh import Group, GroupSizes, Mesh
from tokenspeed.spmd.placement import LayoutError, MoveKind, TokenTable, axes_of, with_addends
from tokenspeed.spmd.program import Call
from tokenspeed.spmd.routes import hops

MESHES = tuple(
    Mesh.of(sizes)
    for sizes in (
        GroupSizes.of(2),
        GroupSizes.of(1, attention_dp=3),
        GroupSizes.of(2, attention_dp=2),
        GroupSizes.of(4, ep=2),
        GroupSizes(attention_tp=6, dense_tp=2, moe_tp=2, ep=3),
        GroupSizes(attention_tp=2, attention_dp=3, dense_tp=2, moe_tp=1, ep=6),
    )
)
PLACEMENTS = (
    declare.NORM,
    declare.NORM,
    declare.ADD,
    declare.projection(8, 4),
    declare.split(Group.DENSE),
    declare.attention(),
    declare.experts(8, 1),
    declare.WHOLE,
    declare.OWN,
)


def brute_force(graph: Graph, pricing: Pricing, bound_fs: int) -> int:
    """The least price below the bound, by every order of single moves; the bound when there is none below it. A state
    is all that has been made of every value; free moves are made at once, since more never hurts. `rest` is what ops
    to come cost at least."""
    mesh, ops = pricing.mesh, graph.ops
    last_read = {value.index: place for place, op in enumerate(ops) for value in op.ins}
    ticket = count()
    least = [
        min(pricing.op_fs(op, form.source, form.exchanges) for form in forms(op.placement, mesh, op.name))
        - op.placement.fuses * pricing.model.launch_fs
        for op in ops
    ]
    rest = [sum(least[place:]) for place in range(len(ops) + 1)]

    def closed(place: int, held: set[tuple[int, str]]) -> frozenset[tuple[int, str]]:
        held = {each for each in held if last_read.get(each[0], -1) >= place}
        todo = list(held)
        while todo:
            index, layout = todo.pop()
            for kind, axes, target in hops(layout):
                is_free = pricing.move_fs(kind, axes, layout, graph.values[index].width) == 0
                if is_free and (index, target) not in held:
                    held.add((index, target))
                    todo.append((index, target))
        return frozenset(held)

    def successors(place: int, held: frozenset[tuple[int, str]]):  # type: ignore[no-untyped-def]
        for index, layout in held:
            for kind, axes, target in hops(layout):
                if (index, target) not in held:
                    price = pricing.move_fs(kind, axes, layout, graph.values[index].width)
                    yield price, place, {*held, (index, target)}
        op = ops[place]
        for form in forms(op.placement, mesh, op.name):
            for fused in ((), *(axes_of(form.source, "R") if op.placement.fuses and op.ins else ())):
                layouts = [form.source] * len(op.ins)
                price = pricing.op_fs(op, form.source, form.exchanges)
                if fused:
                    layouts[0] = with_addends(form.source, fused)
                    price += pricing.fused_fs(fused, layouts[0], op.ins[0].width)
                if all((value.index, layout) in held for value, layout in zip(op.ins, layouts, strict=True)):
                    yield price, place + 1, {*held, *((value.index, form.target) for value in op.outs)}

    queue = [(rest[0], next(ticket), 0, closed(0, set()))]
    done: set[tuple[int, frozenset[tuple[int, str]]]] = set()
    while queue:
        total, _, place, held = heapq.heappop(queue)
        if (place, held) in done:
            continue
        done.add((place, held))
        if place == len(ops):
            return total
        assume(len(done) < 4_000)  # else the graph is too large for brute force
        for step, after, made in successors(place, held):
            longer = total - rest[place] + step + rest[after]
            if longer < bound_fs:
                heapq.heappush(queue, (longer, next(ticket), after, closed(after, made)))
    return bound_fs


@st.composite
def small_graphs(draw: st.DrawFn) -> Graph:
    """Up to five ops over a source, read in any pattern."""
    graph = Graph()
    values = [graph.source("ids", width=8)]
    values = [graph.op("op1", declare.split(Group.DENSE), values[0], widths=(8,))[0]]
    for place in range(draw(st.integers(1, 4))):
        placement = draw(st.sampled_from(PLACEMENTS))
        most = 2 if placement in {declare.NORM, declare.ADD, declare.attention()} else 1
        recent = values[-3:]
        ins = draw(st.lists(st.sampled_from(recent), min_size=1, max_size=most, unique_by=lambda value: value.index))
        num_outs = 0 if placement in {declare.WHOLE, declare.OWN} else draw(st.integers(1, len(ins)))
        values += graph.op(f"op{place + 2}", placement, *ins, widths=(8,) * num_outs)
    graph.output("end", values[-1], draw(st.sampled_from((declare.WHOLE, declare.OWN))))
    return graph


@st.composite
def prices(draw: st.DrawFn) -> CostModel:
    """Collectives always cost something; the rest may be free."""
    cost = st.sampled_from((0, 1, 7, 40, 300))
    return CostModel(draw(cost) * 100, (1 + draw(cost)) * 100, draw(cost), draw(cost))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(graph=small_graphs(), mesh=st.sampled_from(MESHES), model=prices(), num_tokens=st.sampled_from((1, 6, 60)))
def test_no_plan_costs_more_than_brute_force_finds(graph: Graph, mesh: Mesh, model: CostModel, num_tokens: int) -> None:
    pricing = Pricing(model, mesh, num_tokens, graph.itemsize)
    price, program = cheapest(graph, pricing)
    assert price_fs(program, pricing) == price
    assert brute_force(graph, pricing, bound_fs=price) == price


@pytest.mark.slow
@settings(max_examples=500, deadline=None, derandomize=True)
@given(graph=small_graphs(), mesh=st.sampled_from(MESHES), model=prices(), num_tokens=st.sampled_from((1, 6, 60)))
def test_no_plan_costs_more_than_brute_force_finds_at_length(
    graph: Graph, mesh: Mesh, model: CostModel, num_tokens: int
) -> None:
    pricing = Pricing(model, mesh, num_tokens, graph.itemsize)
    price, _ = cheapest(graph, pricing)
    assert brute_force(graph, pricing, bound_fs=price) == price


def wide_decoder(num_layers: int, width: int = 4096) -> Graph:
    """A dense decoder as a model declares it."""
    graph = Graph()
    x, residual = graph.embed("embed", graph.source("ids"), width), None
    for index in range(num_layers):
        x, residual = graph.add_norm(f"layers.{index}.input_norm", x, residual)
        x = graph.attention(f"layers.{index}.attention", x, width=width)
        x, residual = graph.add_norm(f"layers.{index}.post_norm", x, residual)
        x = graph.feed_forward(f"layers.{index}.mlp", x)
    x, _ = graph.add_norm("norm", x, residual)
    graph.output("logits", graph.head("head", graph.select("select", x), 32_000))
    return graph


def wide_latent_experts(num_layers: int, width: int = 7168) -> Graph:
    """Latent attention with a dense layer and then experts, as a model declares it."""
    graph = Graph()
    x, residual = graph.embed("embed", graph.source("ids"), width), None
    for index in range(num_layers):
        name = f"layers.{index}"
        x, residual = graph.add_norm(f"{name}.input_norm", x, residual)
        q = graph.norm(f"{name}.q_norm", graph.project(f"{name}.q_down", x, 1536))
        kv = graph.norm(f"{name}.kv_norm", graph.project(f"{name}.kv_down", x, 576))
        x = graph.attention(f"{name}.attention", q, kv, width=width)
        x, residual = graph.add_norm(f"{name}.post_norm", x, residual)
        if index == 0:
            x = graph.feed_forward(f"{name}.mlp", x)
            continue
        scores = graph.project(f"{name}.router", x, 256)
        shared = graph.feed_forward(f"{name}.shared", x)
        x = graph.add(f"{name}.sum", graph.experts(f"{name}.experts", x, scores, top_k=8), shared)
    x, _ = graph.add_norm("norm", x, residual)
    graph.output("logits", graph.head("head", graph.select("select", x), 129_280))
    return graph


GOLDEN = {
    "decoder_tp4": (wide_decoder(4), GroupSizes.of(4)),
    "decoder_tp2_dp2": (wide_decoder(4), GroupSizes.of(2, attention_dp=2)),
    "latent_experts_tp8_ep8": (wide_latent_experts(4), GroupSizes.of(8, ep=8)),
    "latent_experts_dp16_ep16": (wide_latent_experts(4), GroupSizes.of(1, attention_dp=16, ep=16)),
    "latent_experts_tp2_dp4_ep8": (wide_latent_experts(4), GroupSizes(2, 4, 2, 1, 8)),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_plans_as_text_are_golden(name: str) -> None:
    graph, sizes = GOLDEN[name]
    text = compile_plan(graph, Mesh.of(sizes)).text()
    assert_golden(Path(__file__).parent / "golden" / f"{name}.txt", text)


def test_the_digest_of_a_plan_is_stable_and_its_own() -> None:
    digests = {name: compile_plan(graph, Mesh.of(sizes)).digest() for name, (graph, sizes) in GOLDEN.items()}
    assert len(set(digests.values())) == len(GOLDEN)
    assert digests["decoder_tp4"] == "d10d120f2a1631eb"
    deeper = compile_plan(wide_decoder(5), Mesh.of(GroupSizes.of(4)))
    assert deeper.digest() != digests["decoder_tp4"]


def test_the_bucket_is_chosen_by_the_table() -> None:
    mesh = Mesh.of(GroupSizes.of(4))
    plan = compile_plan(wide_decoder(2), mesh)
    small, large = (plan.program_for(TokenTable.of(mesh, (tokens,))) for tokens in (64, 5000))
    assert MoveKind.REDUCE_SCATTER not in {kind for kind, _ in small.collectives()}
    assert MoveKind.ALL_REDUCE not in {kind for kind, _ in large.collectives()}
    fused = [call for call in small.steps if isinstance(call, Call) and call.fused]
    assert len(fused) == 5, "every all-reduce is made by the norm after it"


def test_a_long_model_is_planned_quickly() -> None:
    start = time.process_time()
    compile_plan(wide_latent_experts(61), Mesh.of(GroupSizes(2, 4, 8, 1, 8)))
    assert time.process_time() - start < 5


def test_addends_do_not_enter_an_op_that_is_not_linear() -> None:
    with pytest.raises(LayoutError, match="not linear"):
        Placement((Choice.of(Group.DENSE, "P>P"),))


@pytest.mark.parametrize("letters", ["S>R", "R>S", "P>R", "S>P", "P>S", "S > P", "Q>R"])
def test_maths_alone_does_not_change_a_layout(letters: str) -> None:
    with pytest.raises(LayoutError, match="cannot be done without an exchange"):
        Alternative(letters)


def test_idle_ranks_must_enter_an_exchange() -> None:
    with pytest.raises(LayoutError, match="idle"):
        Placement((Choice(Group.EP, (Alternative("S>S", (declare.Exchange(MoveKind.ALL_TO_ALL, 8),)),)),))


def test_groups_of_an_op_must_not_overlap() -> None:
    graph = Graph()
    both = Placement((Choice.of(Group.ATTENTION, "R>P"), Choice.of(Group.DENSE, "R>P")))
    graph.output("end", graph.op("layers.0.both", both, graph.source("ids"), widths=(8,))[0])
    with pytest.raises(LayoutError, match=r"layers\.0\.both: dense and attention overlap"):
        compile_plan(graph, Mesh.of(GroupSizes.of(2)))


def test_a_value_that_cannot_get_there_names_the_op() -> None:
    graph = Graph()
    addends = Placement((Choice.of(Group.WORLD, "P>P"),), linear=True)
    graph.op("layers.0.wants_addends", addends, graph.source("ids"), widths=(8,))
    with pytest.raises(LayoutError, match=r"layers\.0\.wants_addends: no form of it can get its inputs"):
        compile_plan(graph, Mesh.of(GroupSizes.of(2)))


def test_declarations_that_do_not_fit_together() -> None:
    graph = Graph()
    ids = graph.source("ids", width=8)
    with pytest.raises(LayoutError, match="two ops"):
        graph.source("ids")
    with pytest.raises(LayoutError, match="widths"):
        graph.add("sum", ids, graph.project("down", ids, 4))
    with pytest.raises(LayoutError, match="rows"):
        graph.add("mixed", ids, graph.select("select", ids))
    with pytest.raises(LayoutError, match="another graph"):
        Graph().norm("norm", ids)
