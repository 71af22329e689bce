# SPDX-License-Identifier: Apache-2.0
"""A program whose collectives do not match its layouts cannot be built, let alone run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from tokenspeed.spmd import interpreter
from tokenspeed.spmd.compiler import compile_plan
from tokenspeed.spmd.cost import CostModel
from tokenspeed.spmd.declare import NORM, Form, Placement, forms
from tokenspeed.spmd.graph import Graph
from tokenspeed.spmd.interpreter import run
from tokenspeed.spmd.mesh import GroupSizes, Mesh
from tokenspeed.spmd.placement import LayoutError, MoveKind, TokenTable
from tokenspeed.spmd.program import Call, Move, Plan, Program, Step, Variant, fold
from tokenspeed.spmd.step import StepInput, View
from unit.spmd.stacks import Batch, Stack, dense

MESH = Mesh.of(GroupSizes.of(2, attention_dp=2))
STACK = dense(MESH)
PROGRAM = compile_plan(STACK.graph, MESH, buckets=(None,)).variants[0].program


def fused_calls(program: Program) -> list[tuple[int, Call]]:
    return [(at, step) for at, step in enumerate(program.steps) if isinstance(step, Call) and step.fused]


def changed(at: int, *steps: Step) -> Program:
    return replace(PROGRAM, steps=(*PROGRAM.steps[:at], *steps, *PROGRAM.steps[at + 1 :]))


def test_the_fused_node_cannot_lose_its_all_reduce() -> None:
    for at, call in fused_calls(PROGRAM):
        with pytest.raises(LayoutError, match="needs value"):
            changed(at, replace(call, fused=()))


def test_the_producer_cannot_reduce_for_a_fused_node() -> None:
    """Reducing before a fused node makes a register of another type, which the fused node does not read; a node that
    reads it is no longer fused."""
    for at, call in fused_calls(PROGRAM):
        value = PROGRAM.ops[call.op].ins[0].index
        reduce = Move(value, call.source(0), MoveKind.ALL_REDUCE, call.fused)
        both = changed(at, reduce, replace(call, fused=()))
        assert list(both.collectives()) == list(PROGRAM.collectives())
        only = [step for step in PROGRAM.steps if step is not PROGRAM.steps[at - 1]]
        with pytest.raises(LayoutError):
            replace(PROGRAM, steps=tuple(only))


def test_a_producer_that_has_reduced_cannot_feed_a_fused_node() -> None:
    at, call = fused_calls(PROGRAM)[0]
    producer = PROGRAM.steps[at - 1]
    assert isinstance(producer, Call)
    reduced = replace(producer, form=Form(producer.form.source, call.form.source))
    with pytest.raises(LayoutError, match="embed has no form RR > RR"):
        changed(at - 1, reduced)


@pytest.mark.parametrize("drop", range(len(PROGRAM.steps)))
def test_no_step_can_be_left_out(drop: int) -> None:
    with pytest.raises(LayoutError):
        changed(drop)


def test_only_ops_that_can_be_fused_are() -> None:
    graph = Graph()
    ids = graph.source("ids", width=4)
    x = graph.feed_forward("mlp", ids)
    graph.op("end", Placement(token_local=True), x, widths=())
    calls = (Call(0, Form("RR", "RR")), Call(1, Form("RR", "PP")), Call(2, Form("RR", "RR"), fused=(0, 1)))
    with pytest.raises(LayoutError, match="end cannot be fused"):
        Program(MESH, tuple(graph.ops), calls)


def test_a_fused_norm_runs_on_the_rows_that_it_sums() -> None:
    graph = Graph()
    x = graph.feed_forward("mlp", graph.source("ids", width=4))
    graph.op("end", NORM, x, widths=())
    calls = (Call(0, Form("RR", "RR")), Call(1, Form("RR", "PP")), Call(2, Form("SR", "SR"), fused=(0,)))
    with pytest.raises(LayoutError, match="end"):
        Program(MESH, tuple(graph.ops), calls)


def test_ops_are_called_once_and_in_order() -> None:
    with pytest.raises(LayoutError, match="is called after"):
        changed(0, PROGRAM.steps[0], PROGRAM.steps[0])


def test_the_order_of_bounds_is_asserted() -> None:
    with pytest.raises(AssertionError, match="open"):
        Plan((Variant(64, PROGRAM, 0),))
    with pytest.raises(AssertionError, match="bounds"):
        Plan((Variant(64, PROGRAM, 0), Variant(64, PROGRAM, 0), Variant(None, PROGRAM, 0)))


def test_layers_that_repeat_are_folded() -> None:
    lines = ("embed\tR\t", *(f"layers.{n}.mlp\tR\tall_gather layers.{n - 1}.mlp" for n in range(9, 12)), "head\tR\t")
    assert fold(lines) == ("embed\tR\t", "layers.9..11.mlp\tR\tall_gather layers.<.mlp", "head\tR\t")


def forgetful(stack: Stack, name: str, rank: int) -> Callable[..., object]:
    """The maths of an op with an exchange, which one rank does not make when it has no rows."""

    def run_op(view: View, x: np.ndarray) -> object:
        return x @ np.zeros((4, stack.vocab_size)) if view.rank == rank else stack.maths[name](view, x)

    return run_op


def test_a_rank_that_stays_away_from_a_collective_is_found() -> None:
    batch = Batch.of(MESH, (2, 1, 0, 0), STACK.vocab_size, seed=1)
    STACK.batch = batch
    maths = {**STACK.maths, "head": forgetful(STACK, "head", rank=3)}
    with pytest.raises(LayoutError, match="ranks ask for different collectives"):
        run(PROGRAM, batch.step(), maths)  # type: ignore[arg-type]


def test_idle_ranks_issue_every_collective() -> None:
    batch = Batch.of(MESH, (3, 0, 0, 0), STACK.vocab_size, seed=1)
    STACK.forward(batch)
    model = CostModel(0, 0, 1000, 700)
    for program in (PROGRAM, compile_plan(STACK.graph, MESH, model=model, buckets=(None,)).variants[0].program):
        traces = run(program, batch.step(), STACK.maths).traces
        assert len(set(traces)) == 1
        assert [event[:2] for event in traces[0]] == list(program.collectives())
        assert len(traces[0]) > 5


def test_idle_ranks_skip_maths_that_may_be_skipped() -> None:
    graph = Graph()
    graph.output("end", graph.norm("norm", graph.source("ids", width=2)))
    called: list[int] = []

    def norm(view: View, x: np.ndarray) -> np.ndarray:
        called.append(view.rank)
        return x

    program = compile_plan(graph, MESH, model=CostModel(0, 0, 0, 1), buckets=(None,)).variants[0].program
    sliced = replace(
        program,
        steps=(
            Call(0, Form("RR", "RR")),
            Move(0, "RR", MoveKind.SLICE, (0, 1)),
            Call(1, Form("SS", "SS")),
            Move(1, "SS", MoveKind.ALL_GATHER, (0, 1)),
            Call(2, Form("RR", "RR")),
        ),
    )
    source = np.arange(6.0).reshape(3, 2)
    step = StepInput(TokenTable(MESH, (2, 0, 1, 0)), {"ids": source}, np.arange(0))
    outcome = run(sliced, step, {"norm": norm})
    assert called == [0, 2]
    for array in outcome.outputs["end"]:
        np.testing.assert_array_equal(array, source)


def test_the_interpreter_needs_no_tensor_library() -> None:
    assert "torch" not in vars(interpreter)


def test_people_read_what_is_exchanged_in_words() -> None:
    by_op = {line.split("\t")[0]: line.split("\t")[2] for line in PROGRAM.sentences()}
    assert len(by_op) == len(PROGRAM.ops)
    for call in (call for _, call in fused_calls(PROGRAM)):
        assert "all-reduce its first input over ax" in by_op[PROGRAM.ops[call.op].name]
    moves = [step for step in PROGRAM.steps if isinstance(step, Move)]
    said = "; ".join(by_op.values())
    assert moves
    for move in moves:
        assert f"{move.kind.replace('_', '-')} " in said


def test_an_op_that_exchanges_twice_alike_says_so() -> None:
    graph = Graph()
    x = graph.source("ids", width=4096)
    x = graph.experts("layers.3.experts", x, graph.router("layers.3.router", x, 64), top_k=1)
    graph.output("end", x)
    mesh = Mesh.of(GroupSizes.of(16, ep=16))
    exchanging = next(form for form in forms(graph.ops[2].placement, mesh, "experts") if form.exchanges)
    axis = (0,)
    steps = (
        Call(0, Form("R", "R")),
        Move(0, "R", MoveKind.SLICE, axis),
        Call(1, Form("S", "S")),
        Call(2, exchanging),
        Move(2, "S", MoveKind.ALL_GATHER, axis),
        Call(3, Form("R", "R")),
    )
    said = Program(mesh, tuple(graph.ops), steps).sentences()[2]
    assert said == "layers.3.experts\tS > S\twithin: all-to-all over axis 0, 2 times"
