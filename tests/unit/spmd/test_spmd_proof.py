# SPDX-License-Identifier: Apache-2.0
"""Every mesh of up to 16 ranks, every stack, ragged counts with zeros: equal to the unsharded float64 result."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from tokenspeed.core.errors import ConfigError
from tokenspeed.spmd.compiler import compile_plan
from tokenspeed.spmd.cost import CostModel
from tokenspeed.spmd.interpreter import run
from tokenspeed.spmd.mesh import GroupSizes, Mesh
from unit.spmd.stacks import STACKS, Batch, every_sizes

DEFAULT_RANKS_MAX = 6
# What a launch costs decides between few large and many small collectives; what memory costs, between R and S.
PRICES = {"launches": CostModel(), "bytes": CostModel(0, 0, 1_000, 700)}
# The parts of a mesh that a stack does not use are left at one rank or at all, so that no mesh is proved twice.
USED = {
    "dense": lambda sizes: sizes.moe_tp == sizes.ep == 1,
    "sandwich": lambda sizes: sizes.moe_tp == sizes.ep == 1,
    "moe": lambda sizes: sizes.dense_tp == sizes.world,
    "mixed": lambda sizes: sizes.moe_tp * sizes.ep == sizes.world,
    "mla": lambda sizes: sizes.dense_tp == sizes.world and sizes.moe_tp * sizes.ep == sizes.world,
}


def meshes(stack: str, num_ranks: int) -> Iterator[Mesh]:
    for sizes in every_sizes(num_ranks):
        if sizes.world == num_ranks and USED[stack](sizes):
            try:
                yield Mesh.of(sizes)
            except ConfigError:
                continue


def ragged(num_ranks: int, seed: int) -> tuple[int, ...]:
    """Counts with zeros; one in eight is a step of idle ranks apart from one, or of none at all."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, 4, num_ranks) * (rng.random(num_ranks) < 0.6)
    if seed % 8 == 0:
        counts[rng.integers(0, num_ranks) :] = 0
    return tuple(int(count) for count in counts)


def prove(stack_name: str, mesh: Mesh) -> int:
    """Configurations proved on one mesh."""
    stack = STACKS[stack_name](mesh)
    for place, model in enumerate(PRICES.values()):
        plan = compile_plan(stack.graph, mesh, model=model, buckets=(None,))
        batch = Batch.of(mesh, ragged(mesh.world, hash(mesh.sizes) % 1000 + place), stack.vocab_size, seed=place)
        expected = stack.forward(batch)
        program = plan.program_for(batch.table)
        outcome = run(program, batch.step(), stack.maths)
        for name, arrays in outcome.outputs.items():
            for array in arrays:
                np.testing.assert_allclose(array, expected[name], rtol=1e-9, atol=1e-12, err_msg=f"{mesh} {name}")
        assert len(set(outcome.traces)) == 1, f"ranks of {mesh} issued different collectives"
        assert [event[:2] for event in outcome.traces[0]] == list(program.collectives())
    return len(PRICES)


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("num_ranks", range(1, DEFAULT_RANKS_MAX + 1))
def test_small_meshes(stack: str, num_ranks: int) -> None:
    for mesh in meshes(stack, num_ranks):
        prove(stack, mesh)


@pytest.mark.slow
@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("num_ranks", range(DEFAULT_RANKS_MAX + 1, 17))
def test_large_meshes(stack: str, num_ranks: int) -> None:
    for mesh in meshes(stack, num_ranks):
        prove(stack, mesh)


def test_the_proof_has_its_size() -> None:
    counted = [mesh for stack in STACKS for num_ranks in range(1, 17) for mesh in meshes(stack, num_ranks)]
    assert len(counted) * len(PRICES) >= 1_800


@pytest.mark.parametrize("stack", STACKS)
def test_the_largest_mesh_of_three_axes(stack: str) -> None:
    mesh = Mesh.of(GroupSizes(attention_tp=4, attention_dp=4, dense_tp=16, moe_tp=2, ep=8))
    assert mesh.axes == (4, 2, 2)
    prove(stack, mesh)
