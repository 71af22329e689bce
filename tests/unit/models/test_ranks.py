# SPDX-License-Identifier: Apache-2.0
"""Every family on many ranks gives the logits of one: threads stand in for processes, each with its part of the weights
and the pages of its partition, and all make the same exchanges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from tokenspeed.core.errors import ConfigError
from tokenspeed.execution.forward import Forward
from tokenspeed.kernels.ops.collective import Communicator, Rendezvous
from tokenspeed.kernels.registry import KernelContext, bind
from tokenspeed.layers.build import ONE_RANK, BuildContext
from tokenspeed.layers.decoder import TOKEN_IDS
from tokenspeed.models import CausalLM, resolve
from tokenspeed.spmd.cost import CostModel
from tokenspeed.spmd.mesh import Group, GroupSizes, Mesh
from tokenspeed.spmd.placement import TokenTable
from tokenspeed.spmd.step import StepInput
from unit.models.conftest import Session, load, make_oracle

MAX_LEN, TIMEOUT_S = 32, 60.0
SEQUENCES = ((0, 1), (2, 3))
"""By partition, where there are two."""
MESHES = {
    "tp2": GroupSizes.of(2),
    "tp4": GroupSizes.of(4),
    "ep2": GroupSizes.of(2, ep=2),
    "dp2": GroupSizes.of(1, attention_dp=2, ep=2),
    "tp2-dp2": GroupSizes.of(2, attention_dp=2),
    "tp2-dp2-ep2": GroupSizes.of(2, attention_dp=2, ep=2),
    "tp4-moe2": GroupSizes.of(4, ep=1, moe_tp=2),
}
PRICES = {"launches": CostModel(), "bytes": CostModel(0, 0, 1_000, 700)}
STEPS: tuple[dict[int, int], ...] = (
    {0: 7, 2: 9},  # both partitions prefill
    {1: 5},  # the second is idle
    {0: 1, 1: 1, 2: 1},
    {3: 11},  # the first is idle
    {0: 1, 1: 4, 2: 1, 3: 2},
)
"""Tokens fed to each sequence."""
CHANGED = {"vocab_size": 96}
MORE = {"mixtral": {"num_local_experts": 6}}


class Recorder:
    """A communicator that notes what is called on which of its groups."""

    def __init__(self, inner: Communicator) -> None:
        self.inner, self.calls = inner, []  # type: ignore[var-annotated]
        self.rank, self.world_size = inner.rank, inner.world_size

    def group(self, members: Sequence[Sequence[int]]) -> Any:
        inner = self.inner.group(members)
        partition = tuple(map(tuple, members))

        class Noting:
            def __getattr__(noting, name: str) -> Any:
                if name != "members":
                    self.calls.append((name, partition))
                return getattr(inner, name)

        return Noting()

    def gather(self, word: str) -> tuple[str, ...]:
        return self.inner.gather(word)

    def close(self) -> None:
        self.inner.close()


def tokens_of(step: int, chunk: Mapping[int, int]) -> dict[int, list[int]]:
    """The same ids on all ranks."""
    rng = np.random.default_rng(step)
    return {sequence: rng.integers(0, 96, count).tolist() for sequence, count in chunk.items()}


def build(config: Mapping[str, object], tensors: Mapping[str, torch.Tensor], ctx: BuildContext) -> CausalLM:
    model = resolve(config).build(config, ctx)
    load(model, tensors)
    return model


def run_steps(session: Session, mesh: Mesh, rank: int) -> list[torch.Tensor]:
    """The logits of every step: all tokens of all partitions, first partition first."""
    num_partitions = mesh.sizes.attention_dp
    partition = mesh.index(rank, mesh.axes_of(Group.ATTENTION_DP))
    logits = []
    for number, chunk in enumerate(STEPS):
        chunks = tokens_of(number, chunk)
        parts = [chunks] if num_partitions == 1 else [{s: chunks[s] for s in own if s in chunks} for own in SEQUENCES]
        ids = [token for part in parts for each in part.values() for token in each]
        table = TokenTable.of(mesh, [sum(map(len, part.values())) for part in parts])
        context = session.batch(parts[partition])
        step = StepInput(table, {TOKEN_IDS: torch.tensor(ids)}, np.arange(len(ids)), context)
        with torch.inference_mode():
            logits.append(session.forward.logits(step))
    return logits


def on_threads(
    config: Mapping[str, object], tensors: Mapping[str, torch.Tensor], mesh: Mesh, cost: CostModel, address: str
) -> list[tuple[list[torch.Tensor], Recorder]]:
    join = bind("collective", KernelContext("cpu", torch.float32, {"collective": "reference"})).call

    def rank_main(rank: int) -> tuple[list[torch.Tensor], Recorder]:
        recorder = Recorder(join(Rendezvous(rank, mesh.world, address, "cpu", TIMEOUT_S)))
        try:
            ctx = BuildContext("cpu", torch.float32, mesh=mesh, rank=rank)
            model = build(config, tensors, ctx)
            session = Session(model, 4, MAX_LEN, Forward(model, ctx, recorder, cost))
            return run_steps(session, mesh, rank), recorder
        finally:
            recorder.close()

    with ThreadPoolExecutor(mesh.world) as pool:
        return list(pool.map(rank_main, range(mesh.world)))


@pytest.mark.parametrize("price", PRICES)
@pytest.mark.parametrize("sizes", MESHES)
def test_many_ranks_compute_what_one_does(family: str, sizes: str, price: str) -> None:
    mesh = Mesh.of(MESHES[sizes])
    oracle = make_oracle(family, **{**CHANGED, **MORE.get(family, {})})
    config, tensors = oracle.config.to_dict(), oracle.state_dict()
    alone = Session(build(config, tensors, BuildContext("cpu", torch.float32)), 4, MAX_LEN)
    expected = run_steps(alone, ONE_RANK, 0)
    ranks = on_threads(config, tensors, mesh, PRICES[price], f"{family}-{sizes}-{price}")
    for rank, (logits, recorder) in enumerate(ranks):
        for number, (mine, theirs) in enumerate(zip(logits, expected, strict=True)):
            in_order = theirs if mesh.sizes.attention_dp == 1 else theirs[by_partition(number)]
            torch.testing.assert_close(mine, in_order, rtol=1e-4, atol=1e-4, msg=f"rank {rank}, step {number}")
        assert recorder.calls == ranks[0][1].calls, f"rank {rank} makes other exchanges than rank 0"
    assert len(ranks[0][1].calls) > len(STEPS)


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
    oracle = make_oracle(family, **{**CHANGED, **MORE.get(family, {})})
    tensors = oracle.state_dict()
    seen: dict[str, torch.Tensor] = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    rebuilt: dict[str, torch.Tensor] = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    for rank in range(mesh.world):
        model = build(oracle.config.to_dict(), tensors, BuildContext("cpu", torch.float32, mesh=mesh, rank=rank))
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
