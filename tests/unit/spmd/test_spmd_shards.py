# SPDX-License-Identifier: Apache-2.0
"""Ranks' parts put together give the checkpoint back; what does not divide is refused with sizes that would work."""

from __future__ import annotations

import numpy as np
import pytest

from tokenspeed.core.errors import ConfigError
from tokenspeed.spmd import shards
from tokenspeed.spmd.mesh import Group, GroupSizes, Mesh
from tokenspeed.spmd.shards import Shards, Split
from unit.spmd.stacks import STACKS

MESH = Mesh.of(GroupSizes(attention_tp=4, attention_dp=2, dense_tp=8, moe_tp=2, ep=4))


@pytest.mark.parametrize("name", STACKS)
@pytest.mark.parametrize(
    "sizes", [GroupSizes(), GroupSizes.of(3), GroupSizes.of(2, attention_dp=2), GroupSizes(8, 2, 4, 2, 2)]
)
def test_parts_give_the_checkpoint_back(name: str, sizes: GroupSizes) -> None:
    mesh = Mesh.of(sizes)
    stack = STACKS[name](mesh)
    for weight, dealt in stack.shards.items():
        parts = [local[weight] for local in stack.local]
        assert {part.shape for part in parts} == {dealt.local_shape(stack.full[weight].shape, mesh)}
        np.testing.assert_array_equal(dealt.join(parts, stack.full[weight].shape, mesh), stack.full[weight])


@pytest.mark.parametrize(
    ("dealt", "shape", "rank", "slices"),
    [
        (shards.WHOLE, (3, 5), 5, (slice(0, 3), slice(0, 5))),
        (shards.rows(Group.ATTENTION, 2), (8, 5), 5, (slice(2, 4), slice(0, 5))),
        (shards.rows(Group.ATTENTION, 2, shared=True), (4, 5), 5, (slice(0, 2), slice(0, 5))),
        (shards.rows(Group.ATTENTION, 2, shared=True), (4, 5), 6, (slice(2, 4), slice(0, 5))),
        (shards.columns(Group.DENSE), (3, 16), 5, (slice(0, 3), slice(10, 12))),
        (shards.stacked(2), (8, 3, 4), 5, (slice(4, 6), slice(0, 3), slice(2, 4))),
    ],
)
def test_parts_of_a_rank(dealt: Shards, shape: tuple[int, ...], rank: int, slices: tuple[slice, ...]) -> None:
    dealt.check("w", shape, MESH)
    assert dealt.slices(shape, MESH, rank) == slices


def test_a_bias_after_a_sum_is_added_once() -> None:
    bias = np.arange(1.0, 4.0)
    parts = [shards.once(Group.ATTENTION).cut(bias, MESH, rank) for rank in range(MESH.world)]
    assert [bool(part.any()) for part in parts] == [True, False, False, False] * 2
    np.testing.assert_array_equal(np.sum(parts[:4], axis=0), bias)


@pytest.mark.parametrize(
    ("dealt", "shape", "message"),
    [
        (
            shards.rows(Group.ATTENTION, 64),
            (576, 8),
            "w: 9 units do not split over 4 ranks of attention; it may have 1, 3, 9",
        ),
        (
            shards.rows(Group.ATTENTION, 64, shared=True),
            (192, 8),
            "w: 3 units do not split over 4 ranks of attention; it may have 1, 3 or a multiple of the last",
        ),
        (
            shards.columns(Group.DENSE),
            (8, 12),
            "w: 12 elements do not split over 8 ranks of dense; it may have 1, 2, 3, 4, 6, 12",
        ),
        (shards.columns(Group.DENSE, 32), (8, 100), "w: 100 elements are not whole units of 32"),
        (shards.stacked(1), (6, 4, 4), "w: 6 experts do not split over 4 ranks of ep; it may have 1, 2, 3, 6"),
    ],
)
def test_refusals_name_sizes_that_work(dealt: Shards, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        dealt.check("w", shape, MESH)
    assert str(refused.value) == message


def test_query_heads_find_their_shared_kv_head() -> None:
    """12 query heads on 2 K/V heads over 4 ranks: the part of a rank's K/V is that of its query heads."""
    queries, keys = shards.rows(Group.ATTENTION), shards.rows(Group.ATTENTION, shared=True)
    for rank in range(4):
        (mine,), (key,) = queries.slices((12,), MESH, rank), keys.slices((2,), MESH, rank)
        assert {head * 2 // 12 for head in range(mine.start, mine.stop)} == set(range(key.start, key.stop))


def test_join_finds_parts_that_are_wrong() -> None:
    dealt, whole = shards.rows(Group.ATTENTION), np.arange(4.0)
    parts = [dealt.cut(whole, MESH, rank) for rank in range(MESH.world)]
    with pytest.raises(ValueError, match="rank 7 has another copy"):
        dealt.join([*parts[:7], parts[0]], (4,), MESH)
    with pytest.raises(ValueError, match="1 elements are in no part"):
        dealt.join(parts[:3], (4,), MESH)


def test_a_dimension_is_split_once() -> None:
    with pytest.raises(AssertionError, match="split twice"):
        Shards((Split(0, Group.EP), Split(0, Group.MOE)))


def test_the_share_of_a_rank() -> None:
    assert shards.stacked(1).bytes_fraction((8, 4, 4), MESH) == 1 / 8
