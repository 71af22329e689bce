# SPDX-License-Identifier: Apache-2.0
"""Every family on many ranks gives the logits of one: threads stand in for processes, each with its part of the weights
and the pages of its partition, and all make the same exchanges."""

from __future__ import annotations

import functools
import multiprocessing
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tokenspeed.core.errors import ConfigError
from tokenspeed.layers.build import ONE_RANK, BuildContext
from tokenspeed.models import resolve
from tokenspeed.spmd.cost import CostModel
from tokenspeed.spmd.mesh import GroupSizes, Mesh
from unit.models.conftest import make_oracle
from unit.models.rank_steps import (
    MAX_LEN,
    MESHES,
    PRICES,
    SEQUENCES,
    STEPS,
    Recorder,
    build,
    join,
    process_main,
    run_rank,
    run_steps,
)
from unit.models.sessions import Session

CHANGED = {"vocab_size": 96}
MORE = {"mixtral": {"num_local_experts": 6}}
PROCESS_CASES = tuple(
    (family, sizes, "bytes" if sizes == "ep2" else "launches")
    for sizes in ("tp2", "ep2", "tp4", "tp2-dp2")
    for family in ("qwen3", "qwen3_moe", "deepseek_v3")
)


def on_threads(
    config: Mapping[str, object], tensors: Mapping[str, torch.Tensor], mesh: Mesh, cost: CostModel, address: str
) -> list[tuple[list[torch.Tensor], Recorder]]:
    def rank_main(rank: int) -> tuple[list[torch.Tensor], Recorder]:
        recorder = join(rank, mesh, address, "reference")
        try:
            return run_rank(config, tensors, mesh, cost, recorder), recorder
        finally:
            recorder.close()

    with ThreadPoolExecutor(mesh.world) as pool:
        return list(pool.map(rank_main, range(mesh.world)))


@pytest.mark.parametrize("price", PRICES)
@pytest.mark.parametrize("sizes", MESHES)
def test_many_ranks_compute_what_one_does(family: str, sizes: str, price: str) -> None:
    mesh = Mesh.of(MESHES[sizes])
    ranks = on_threads(*tiny(family), mesh, PRICES[price], f"{family}-{sizes}-{price}")
    assert_equal_to_one_rank(family, mesh, [(logits, recorder.calls) for logits, recorder in ranks])


def test_real_processes_compute_what_one_does(tmp_path: Path) -> None:
    """Over gloo, once for all cases: starting processes takes seconds."""
    run_processes(PROCESS_CASES, 4, tmp_path, "gloo")


@pytest.mark.gpu
def test_two_gpus_compute_what_one_cpu_rank_does(tmp_path: Path) -> None:
    """Over NCCL, with both price models."""
    cases = [case for case in PROCESS_CASES if Mesh.of(MESHES[case[1]]).world == 2]
    run_processes([(family, sizes, price) for family, sizes, _ in cases for price in PRICES], 2, tmp_path, "nccl")


def run_processes(cases: Sequence[tuple[str, str, str]], number: int, folder: Path, solution: str) -> None:
    """All cases on so many processes, each held to one rank."""
    for family in {family for family, _, _ in cases}:
        torch.save(tiny(family), folder / f"{family}.pt")
    spawn = multiprocessing.get_context("spawn")
    addresses = [spawn.Queue() for _ in range(number)]
    arguments = [(rank, cases, folder, addresses, solution) for rank in range(number)]
    processes = [spawn.Process(target=process_main, args=each) for each in arguments]
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join()
    finally:
        for process in processes:
            process.kill()
    assert [process.exitcode for process in processes] == [0] * number
    for family, sizes, price in cases:
        mesh = Mesh.of(MESHES[sizes])
        ranks = [torch.load(folder / f"{family}-{sizes}-{price}-{rank}.pt") for rank in range(mesh.world)]
        assert_equal_to_one_rank(family, mesh, ranks)


@functools.cache
def tiny(family: str) -> tuple[dict[str, object], dict[str, torch.Tensor]]:
    """Configuration and weights whose vocabulary and experts divide."""
    oracle = make_oracle(family, **{**CHANGED, **MORE.get(family, {})})
    return oracle.config.to_dict(), oracle.state_dict()


@functools.cache
def on_one_rank(family: str) -> list[torch.Tensor]:
    """The logits of every step."""
    model = build(*tiny(family), BuildContext("cpu", torch.float32))
    return run_steps(Session(model, 4, MAX_LEN), ONE_RANK, 0)


def assert_equal_to_one_rank(family: str, mesh: Mesh, ranks: Sequence[tuple[list[torch.Tensor], list[object]]]) -> None:
    """The logits of all ranks are those of one, and their exchanges each other's."""
    expected = on_one_rank(family)
    for rank, (logits, calls) in enumerate(ranks):
        for number, (mine, theirs) in enumerate(zip(logits, expected, strict=True)):
            in_order = theirs if mesh.sizes.attention_dp == 1 else theirs[by_partition(number)]
            torch.testing.assert_close(mine, in_order, rtol=1e-4, atol=1e-4, msg=f"rank {rank}, step {number}")
        assert calls == ranks[0][1], f"rank {rank} makes other exchanges than rank 0"
    assert len(ranks[0][1]) > len(STEPS)


def by_partition(number: int) -> list[int]:
    """Where the tokens of a step, partition after partition, stand in their order on one rank."""
    starts, place = {}, 0
    for sequence, count in STEPS[number].items():
        starts[sequence] = place
        place += count
    return [starts[s] + i for own in SEQUENCES for s in own if s in starts for i in range(STEPS[number][s])]


@pytest.mark.parametrize("sizes", ["tp4", "tp2-dp2-ep2"])
def test_parts_of_all_ranks_are_the_checkpoint(family: str, sizes: str) -> None:
    """Every element of every tensor that a model reads is on some rank; only what is replicated is on several."""
    mesh = Mesh.of(MESHES[sizes])
    config, tensors = tiny(family)
    seen: dict[str, torch.Tensor] = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    rebuilt: dict[str, torch.Tensor] = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    for rank in range(mesh.world):
        model = build(config, tensors, BuildContext("cpu", torch.float32, mesh=mesh, rank=rank))
        weight_map = model.weight_map().for_checkpoint(tensors)
        for slot in weight_map:
            name = next(name for name in slot.names if name in tensors)
            if slot.cut.has_values and slot.target.numel():
                seen[name][slot.cut.index] += 1
                rebuilt[name][slot.cut.index] = slot.target
    for name, tensor in tensors.items():
        if weight_map.ignores(name):
            continue
        assert bool((seen[name] >= 1).all()), f"{name} is not read whole"
        assert torch.equal(rebuilt[name], tensor), name


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        (GroupSizes.of(3), "4 attention heads do not split over 3 ranks of attention; it may have 1, 2, 4"),
        (GroupSizes.of(4, ep=4), "6 experts do not split over 4 ranks of ep; it may have 1, 2, 3, 6"),
        (GroupSizes.of(1, attention_dp=5), "96 tokens of the vocabulary do not split over 5 ranks of dense"),
    ],
)
def test_what_does_not_divide_is_refused_with_sizes_that_would(sizes: GroupSizes, words: str) -> None:
    config = make_oracle("qwen3_moe", **CHANGED).config.to_dict()
    with pytest.raises(ConfigError, match=words):
        resolve(config).build(config, BuildContext("cpu", torch.float32, mesh=Mesh.of(sizes)))
