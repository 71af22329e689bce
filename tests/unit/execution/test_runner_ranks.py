# SPDX-License-Identifier: Apache-2.0
"""Several runners given the same plans, one a rank, answer as one runner does: partitions mixed in a plan, scored
prompts, sampling told by the first rank, transfers of a partition's own pages, a failed step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from tokenspeed.checkpoints import open_model
from tokenspeed.core.config import ParallelConfig
from tokenspeed.core.errors import StartError
from tokenspeed.core.plan import RowKind, Seating, StepPlan
from tokenspeed.core.request import SamplingParams
from tokenspeed.execution import ModelRunner, StepOutput
from tokenspeed.execution.forward import Forward
from tokenspeed.kernels.ops.collective import Rendezvous
from tokenspeed.kernels.registry import KernelContext, bind
from tokenspeed.layers.build import BuildContext
from tokenspeed.models import resolve
from tokenspeed.spmd.cost import CostModel
from tokenspeed.spmd.mesh import GroupSizes, Mesh

SEATS = 4
"""Of a partition."""
PREFILL, LAST, DECODE = RowKind.PREFILL, RowKind.PREFILL_LAST, RowKind.DECODE
ASKING = SamplingParams(temperature=1.0, seed=11, top_k=20, logprobs=2, prompt_logprobs=1)
LAYOUTS = {"tp2": ParallelConfig(tp=2), "dp2": ParallelConfig(dp_attention=2)}
PROMPTS = {seat: [(7 * seat + 5 * index) % 96 for index in range(10 + seat)] for seat in (0, 1, 4, 6)}
"""By seat; in two partitions those from 4 on are of the second."""

Launch = Callable[[StepPlan, Sequence[Seating]], list[StepOutput]]


def in_threads(number: int, act: Callable[[int], Any]) -> list[Any]:
    with ThreadPoolExecutor(number) as pool:
        return list(pool.map(act, range(number)))


def join(rank: int, number: int, address: str) -> Any:
    call = bind("collective", KernelContext("cpu", torch.float32, {"collective": "reference"})).call
    return call(Rendezvous(rank, number, address, "cpu", 60.0))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tools: Any) -> Path:
    config = {**tools.CONFIG, "vocab_size": 96}
    made: Path = tools.write_checkpoint(
        tmp_path_factory.mktemp("ranks") / "model", config, [tools.tiny_tensors(config)]
    )
    return made


@pytest.fixture
def alone(folder: Path, tools: Any) -> Iterator[Launch]:
    """One runner, whose pages of the second partition are numbered behind those of the first."""
    runner = tools.new_runner(tools.engine_config(folder, max_num_seqs=2 * SEATS))
    yield lambda plan, seatings: [runner.launch(plan, seatings).wait()]
    runner.close()


@pytest.fixture(params=LAYOUTS)
def ranks(request: pytest.FixtureRequest, folder: Path, tools: Any) -> Iterator[list[ModelRunner]]:
    parallel = LAYOUTS[request.param]
    seats = SEATS if parallel.dp_attention == 2 else 2 * SEATS
    config = tools.engine_config(folder, max_num_seqs=seats, host_tokens=80)
    config = msgspec.structs.replace(config, parallel=parallel)
    communicators = in_threads(2, lambda rank: join(rank, 2, request.node.name))
    source = [open_model(config.model) for _ in communicators]
    made = in_threads(2, lambda rank: ModelRunner.create(config, source[rank], None, communicators[rank]))
    yield made
    for communicator in communicators:
        communicator.close()
    for runner in made:
        runner.close()


def launch(ranks: Sequence[ModelRunner], plan: StepPlan, seatings: Sequence[Seating] = ()) -> list[StepOutput]:
    handles = [runner.launch(plan, seatings) for runner in ranks]
    return [handle.wait() for handle in handles]


def pages_of(seat: int) -> list[tuple[int, int, int]]:
    return [(seat, index, 1 + seat * 4 + index) for index in range(4)]


def steps(tools: Any) -> list[tuple[StepPlan, list[Seating]]]:
    """Prefills of both partitions in chunks, then decodes among them; the order of a plan mixes partitions."""
    seatings = {seat: tools.make_seating(seat, ids, ASKING) for seat, ids in PROMPTS.items()}

    def plan(number: int, rows: list[tuple[int, int, int, int]], seated: tuple[int, ...] = ()) -> Any:
        ids = [
            token
            for seat, kind, context, count in rows
            if kind != DECODE
            for token in PROMPTS[seat][context : context + count]
        ]
        pages = [page for seat in seated for page in pages_of(seat)]
        made = tools.make_plan(number, rows, ids, seated=seated, pages=pages)
        return made, [seatings[seat] for seat in seated]

    return [
        plan(0, [(4, LAST, 0, 14), (0, PREFILL, 0, 6)], (4, 0)),
        plan(1, [(4, DECODE, 14, 1), (0, LAST, 6, 4), (6, PREFILL, 0, 9)], (6,)),
        plan(2, [(0, DECODE, 10, 1), (4, DECODE, 15, 1), (1, LAST, 0, 11), (6, LAST, 9, 7)], (1,)),
        plan(3, [(6, DECODE, 16, 1), (1, DECODE, 11, 1), (4, DECODE, 16, 1), (0, DECODE, 11, 1)]),
        plan(4, [(6, DECODE, 17, 1)]),
    ]


def test_ranks_answer_as_one_does(ranks: list[ModelRunner], alone: Launch, tools: Any) -> None:
    for plan, seatings in steps(tools):
        (expected,) = alone(plan, seatings)
        first, second = launch(ranks, plan, seatings)
        for output in (first, second):
            assert output.result.token_ids.tolist() == expected.result.token_ids.tolist()
            assert output.result.accepted_offsets.tolist() == expected.result.accepted_offsets.tolist()
            assert not output.result.fault and not output.result.row_faults.any()
        assert [said is not None for said in first.logprobs] == [said is not None for said in expected.logprobs]
        for mine, theirs in zip(first.logprobs, expected.logprobs, strict=True):
            if mine is not None and theirs is not None:
                assert mine[0].logprob == pytest.approx(theirs[0].logprob, abs=1e-4)
        for scored, wanted in zip(first.prompt_logprobs, expected.prompt_logprobs, strict=True):
            assert (scored is None) == (wanted is None)
            if scored is not None and wanted is not None:
                numbers = [[entry.logprob for entry in each.entries if entry] for each in (scored, wanted)]
                assert numbers[0] == pytest.approx(numbers[1], abs=1e-4)


def test_pages_of_a_partition_are_moved_by_its_ranks(ranks: list[ModelRunner], tools: Any) -> None:
    """Groups of transfers are numbered over all partitions; whoever has nothing to move says done at once."""
    num_partitions = ranks[0]._seats.mesh.sizes.attention_dp
    plan, seatings = steps(tools)[0]
    launch(ranks, plan, seatings)
    store = [(7, 0, 1, 3)] if num_partitions == 1 else [(7, 0, 1, 3), (8, 1, 17, 4)]
    outputs = launch(ranks, tools.make_plan(1, [], store=store))
    for output in outputs:
        assert sorted(output.transfers) == [(lease, True) for lease, *_ in store]
    held = [runner._buffers.kv_layers[0].k[[1, 17]].clone() for runner in ranks]
    load = [(9, group, 30 + group, 3 + group) for group in range(num_partitions)]
    launch(ranks, tools.make_plan(2, [], load=load))
    for rank, runner in enumerate(ranks):
        own = 0 if num_partitions == 1 else rank
        assert torch.equal(runner._buffers.kv_layers[0].k[30 + own], held[rank][own])
        assert held[rank][own].any()


def test_a_step_that_fails_everywhere_is_a_fault_everywhere(
    ranks: list[ModelRunner], tools: Any, caplog: pytest.LogCaptureFixture
) -> None:
    plan, seatings = steps(tools)[0]
    bad = msgspec.structs.replace(plan, token_ids=plan.token_ids[:-1])
    with caplog.at_level(logging.CRITICAL):
        assert [output.result.fault for output in launch(ranks, bad, seatings)] == [True, True]
    assert [output.result.fault for output in launch(ranks, plan, seatings)] == [False, False]


def test_ranks_with_other_plans_do_not_start(folder: Path, tools: Any) -> None:
    mesh = Mesh.of(GroupSizes.of(2))
    source = open_model(tools.engine_config(folder).model)
    prices = (CostModel(), CostModel(0, 0, 1_000, 700))

    def start(rank: int) -> str:
        communicator = join(rank, 2, "other plans")
        ctx = BuildContext("cpu", torch.float32, mesh=mesh, rank=rank)
        with pytest.raises(StartError) as caught:
            Forward(resolve(source.config).build(source.config, ctx), ctx, communicator, prices[rank])
        communicator.close()
        return str(caught.value)

    for said in in_threads(2, start):
        assert said.startswith("rank 1 has another plan than rank 0: ")
