# SPDX-License-Identifier: Apache-2.0
"""Axes from group sizes, ranks and coordinates, process groups, and refusals that name sizes that would work."""

from __future__ import annotations

import pytest

from tokenspeed.core.errors import ConfigError
from tokenspeed.spmd.mesh import Group, GroupSizes, Mesh
from unit.spmd.stacks import every_sizes


def every_mesh() -> list[Mesh]:
    meshes = []
    for sizes in every_sizes(16):
        try:
            meshes.append(Mesh.of(sizes))
        except ConfigError:
            continue
    return meshes


def test_axes_are_the_ratios_of_the_chain() -> None:
    mesh = Mesh.of(GroupSizes(attention_tp=4, attention_dp=4, dense_tp=16, moe_tp=2, ep=8))
    assert mesh.axes == (4, 2, 2)
    spans = {group: mesh.axes_of(group) for group in Group}
    assert spans == {
        Group.ATTENTION: (1, 2),
        Group.ATTENTION_DP: (0,),
        Group.DENSE: (0, 1, 2),
        Group.MOE: (2,),
        Group.EP: (0, 1),
        Group.WORLD: (0, 1, 2),
    }
    assert str(mesh) == "mesh 4x2x2 attention=1,2 attention_dp=0 dense=0,1,2 moe=2 ep=0,1"


def test_groups_have_their_sizes_on_every_mesh() -> None:
    meshes = every_mesh()
    assert len(meshes) == 1472
    for mesh in meshes:
        sizes = mesh.sizes
        expected = (sizes.attention_tp, sizes.attention_dp, sizes.dense_tp, sizes.moe_tp, sizes.ep, sizes.world)
        assert tuple(mesh.size_of(mesh.axes_of(group)) for group in Group) == expected


@pytest.mark.parametrize("sizes", [GroupSizes(), GroupSizes(2, 3, 6, 2, 3), GroupSizes(4, 2, 2, 1, 4, pipeline=3)])
def test_ranks_and_coordinates_are_inverse(sizes: GroupSizes) -> None:
    mesh = Mesh.of(sizes)
    seen = {(mesh.stage_of(rank), mesh.coordinates(rank)) for rank in range(mesh.num_ranks)}
    assert len(seen) == mesh.num_ranks == sizes.world * sizes.pipeline
    assert [mesh.rank(places, stage) for stage, places in sorted(seen)] == list(range(mesh.num_ranks))


def test_process_groups_partition_the_ranks() -> None:
    mesh = Mesh.of(GroupSizes(2, 2, 4, 1, 4, pipeline=2))
    assert mesh.process_groups(mesh.axes_of(Group.ATTENTION)) == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert mesh.process_groups(mesh.axes_of(Group.ATTENTION_DP)) == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert mesh.process_groups(mesh.axes_of(Group.DENSE)) == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert mesh.pipeline_groups() == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert [mesh.index(rank, mesh.axes_of(Group.ATTENTION)) for rank in range(4)] == [0, 1, 0, 1]


def test_the_usual_choice() -> None:
    assert GroupSizes.of(2, attention_dp=2) == GroupSizes(2, 2, 4, 4, 1)
    assert GroupSizes.of(4, ep=2) == GroupSizes(4, 1, 4, 2, 2)
    assert GroupSizes.of(4, ep=2, moe_tp=1) == GroupSizes(4, 1, 4, 1, 2)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (GroupSizes(attention_tp=0), "attention_tp is 0; it must be at least 1"),
        (
            GroupSizes(attention_tp=8, dense_tp=3),
            "dense_tp is 3, which does not divide the 8 ranks of attention; dense_tp may be 1, 2, 4 or 8",
        ),
        (
            GroupSizes(attention_tp=4, moe_tp=2, ep=4),
            "moe_tp * ep is 8, which does not divide the 4 ranks of attention; ep may be 1 or 2; moe_tp may be 1",
        ),
        (
            GroupSizes(attention_tp=4, attention_dp=3, dense_tp=6),
            "attention_tp 4 and dense_tp 6 do not nest, one must divide the other; "
            "attention_tp may be 1, 2, 3, 6 or 12; dense_tp may be 1, 2, 4 or 12",
        ),
    ],
)
def test_refusals_name_sizes_that_work(sizes: GroupSizes, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Mesh.of(sizes)
    assert str(refused.value) == message


def test_ep_must_divide() -> None:
    with pytest.raises(ConfigError, match=r"ep 4 does not divide the 6 ranks; ep may be 1, 2, 3 or 6"):
        GroupSizes.of(6, ep=4)


def test_every_size_that_is_advised_works() -> None:
    Mesh.of(GroupSizes(attention_tp=6, attention_dp=2, dense_tp=6))
    Mesh.of(GroupSizes(attention_tp=4, attention_dp=3, dense_tp=4))
