# SPDX-License-Identifier: Apache-2.0
"""Ranks that run on their own, one thread each, with real rendezvous: the same results and the same collectives."""

from __future__ import annotations

import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from tokenspeed.spmd.compiler import compile_plan
from tokenspeed.spmd.cost import CostModel
from tokenspeed.spmd.declare import Form
from tokenspeed.spmd.executor import Executor
from tokenspeed.spmd.graph import Graph, Value
from tokenspeed.spmd.interpreter import run
from tokenspeed.spmd.mesh import GroupSizes, Mesh
from tokenspeed.spmd.placement import Axes, MoveKind, TokenTable
from tokenspeed.spmd.program import Call, Move, Program
from tokenspeed.spmd.step import StepInput, View
from unit.spmd.stacks import STACKS, Batch, Stack

TIMEOUT_S = 20
MESHES = (GroupSizes.of(1), GroupSizes.of(3), GroupSizes.of(2, attention_dp=2, ep=4), GroupSizes(4, 2, 8, 2, 4))
PRICES = {"launches": CostModel(), "bytes": CostModel(0, 0, 1_000, 700)}


class Board:
    """Where threads leave what they send and wait for one another."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.left: list[Any] = [None] * mesh.world
        self.barrier = threading.Barrier(mesh.world)


class ThreadCollectives:
    """See executor.Collectives."""

    def __init__(self, board: Board, rank: int) -> None:
        self.board, self.rank = board, rank
        self.trace: list[tuple[MoveKind, Axes]] = []

    def _sent(self, kind: MoveKind, axes: Axes, what: Any) -> list[Any]:
        """What each member of the group sent."""
        self.trace.append((kind, axes))
        self.board.left[self.rank] = what
        self.board.barrier.wait(TIMEOUT_S)
        received = [self.board.left[member] for member in self.board.mesh.members(self.rank, axes)]
        self.board.barrier.wait(TIMEOUT_S)
        return received

    def all_reduce(self, x: np.ndarray, axes: Axes) -> np.ndarray:
        return np.sum(self._sent(MoveKind.ALL_REDUCE, axes, x), axis=0)

    def all_gather(self, x: np.ndarray, axes: Axes, counts: tuple[int, ...]) -> np.ndarray:
        received = self._sent(MoveKind.ALL_GATHER, axes, x)
        assert tuple(map(len, received)) == counts
        return np.concatenate(received)

    def reduce_scatter(self, x: np.ndarray, axes: Axes, counts: tuple[int, ...]) -> np.ndarray:
        total = np.sum(self._sent(MoveKind.REDUCE_SCATTER, axes, x), axis=0)
        return np.split(total, np.cumsum(counts))[self.board.mesh.index(self.rank, axes)]

    def exchange(self, kind: MoveKind, parts: tuple[np.ndarray, ...], axes: Axes) -> tuple[np.ndarray, ...]:
        place = self.board.mesh.index(self.rank, axes)
        return tuple(sent[place] for sent in self._sent(kind, axes, parts))

    def index(self, rows: np.ndarray) -> np.ndarray:
        return rows

    def take(self, x: np.ndarray, rows: np.ndarray) -> np.ndarray:
        return x[rows]

    def zeros(self, num_rows: int, value: Value) -> np.ndarray:
        return np.zeros((num_rows, value.width))


def run_threads(program: Program, stack: Stack, batch: Batch, **more: Any) -> list[tuple[dict[str, Any], Any]]:
    """(outputs, collectives) of each rank."""
    board = Board(program.mesh)

    def rank_main(rank: int) -> tuple[dict[str, Any], Any]:
        collectives = ThreadCollectives(board, rank)
        executor = Executor(program, rank, stack.maths, collectives, **more)
        try:
            return executor.run(batch.step()), tuple(collectives.trace)
        except BaseException:
            board.barrier.abort()
            raise

    with ThreadPoolExecutor(program.mesh.world) as pool:
        return list(pool.map(rank_main, range(program.mesh.world)))


@pytest.mark.parametrize("price", PRICES)
@pytest.mark.parametrize("sizes", MESHES)
@pytest.mark.parametrize("name", STACKS)
def test_ranks_on_their_own(name: str, sizes: GroupSizes, price: str) -> None:
    mesh = Mesh.of(sizes)
    stack = STACKS[name](mesh)
    program = compile_plan(stack.graph, mesh, model=PRICES[price], buckets=(None,)).variants[0].program
    batch = Batch.of(mesh, tuple((3, 0, 1, 0, 0, 2, 1, 0)[: mesh.world]), stack.vocab_size, seed=3)
    expected = stack.forward(batch)
    ranks = run_threads(program, stack, batch)
    for outputs, trace in ranks:
        assert trace == tuple(program.collectives())
        for output, array in outputs.items():
            np.testing.assert_allclose(array, expected[output], rtol=1e-9, atol=1e-12)
    twin = run(program, batch.step(), stack.maths)
    assert [event[:2] for event in twin.traces[0]] == list(program.collectives())


def test_rows_that_travel_out_of_order_are_put_in_order() -> None:
    """Gathering the outer axis first, or scattering the inner one first, makes runs of rows that do not follow."""
    mesh = Mesh.of(GroupSizes.of(2, attention_dp=2))
    stack = Stack(mesh)
    x = stack.embed(stack.graph.source("ids"))
    stack.output("end", x)
    ids, value = (op.outs[0].index for op in stack.graph.ops[:2])
    steps = (
        Call(0, Form("RR", "RR")),
        Move(ids, "RR", MoveKind.SLICE, (0, 1)),
        Move(ids, "SS", MoveKind.ALL_GATHER, (0,)),
        Move(ids, "RS", MoveKind.ALL_GATHER, (1,)),
        Call(1, Form("RR", "PP")),
        Move(value, "PP", MoveKind.REDUCE_SCATTER, (1,)),
        Move(value, "PS", MoveKind.ALL_REDUCE, (0,)),
        Move(value, "RS", MoveKind.ALL_GATHER, (1,)),
        Call(2, Form("RR", "RR")),
    )
    batch = Batch.of(mesh, (1, 2, 3, 2), stack.vocab_size, seed=3)
    expected = stack.forward(batch)["end"]
    for outputs, _ in run_threads(Program(mesh, tuple(stack.graph.ops), steps), stack, batch):
        np.testing.assert_allclose(outputs["end"], expected)


def test_a_fused_kernel_takes_the_place_of_both() -> None:
    mesh = Mesh.of(GroupSizes.of(2))
    stack = STACKS["dense"](mesh)
    program = compile_plan(stack.graph, mesh).variants[-1].program
    batch = Batch.of(mesh, (2, 1), stack.vocab_size, seed=3)
    expected = stack.forward(batch)["logits"]
    made: list[str] = []

    def fused(view: Any, axes: Axes, *inputs: Any) -> Any:
        made.append(view.op.name)
        total = np.sum(received_by[view.rank]._sent(MoveKind.ALL_REDUCE, axes, inputs[0]), axis=0)
        return stack.maths[view.op.name](view, total, *inputs[1:])

    board = Board(mesh)
    received_by = [ThreadCollectives(board, rank) for rank in range(2)]
    table = {"layers.0.post_norm": fused}
    executors = [Executor(program, rank, stack.maths, received_by[rank], table) for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:
        for outputs in pool.map(lambda executor: executor.run(batch.step()), executors):
            np.testing.assert_allclose(outputs["logits"], expected, rtol=1e-9, atol=1e-12)
    assert made == ["layers.0.post_norm"] * 2
    assert all(tuple(each.trace) == tuple(program.collectives()) for each in received_by)


def test_values_that_are_read_no_more_are_let_go() -> None:
    graph = Graph()
    graph.output("end", graph.norm("third", graph.norm("second", graph.norm("first", graph.source("ids", width=2)))))
    made: list[weakref.ref[np.ndarray]] = []
    alive: list[int] = []

    def norm(view: View, x: np.ndarray) -> np.ndarray:
        alive.append(sum(each() is not None for each in made))
        out = x + 1
        made.append(weakref.ref(out))
        return out

    mesh = Mesh.of(GroupSizes.of(1))
    program = compile_plan(graph, mesh).variants[0].program
    step = StepInput(TokenTable(mesh, (2,)), {"ids": np.zeros((2, 2))}, np.arange(0))
    maths = dict.fromkeys(("first", "second", "third"), norm)
    (end,) = Executor(program, 0, maths, ThreadCollectives(Board(mesh), 0)).run(step).values()
    assert end.tolist() == [[3, 3], [3, 3]]
    assert alive == [0, 1, 1]


def test_every_op_needs_its_maths() -> None:
    mesh = Mesh.of(GroupSizes.of(1))
    stack = STACKS["dense"](mesh)
    program = compile_plan(stack.graph, mesh).variants[0].program
    maths = {name: each for name, each in stack.maths.items() if name != "norm"}
    with pytest.raises(AssertionError, match=r"no maths for \['norm'\]"):
        Executor(program, 0, maths, ThreadCollectives(Board(mesh), 0))


def test_both_price_models_reach_every_kind_of_collective() -> None:
    seen: set[MoveKind] = set()
    for build in STACKS.values():
        for sizes in MESHES:
            mesh = Mesh.of(sizes)
            graph = build(mesh).graph
            for model in PRICES.values():
                seen |= {kind for kind, _ in compile_plan(graph, mesh, model=model).variants[0].program.collectives()}
    assert seen == set(MoveKind) - {MoveKind.SLICE}
