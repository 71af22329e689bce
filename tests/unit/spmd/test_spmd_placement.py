# SPDX-License-Identifier: Apache-2.0
"""Moves keep the value that a layout stands for; the token table deals out rows; other moves do not exist."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenspeed.spmd.interpreter import Array, apply_move, denoted
from tokenspeed.spmd.mesh import Group, GroupSizes, Mesh
from tokenspeed.spmd.placement import LayoutError, MoveKind, TokenTable, check_layout, layouts, move_kind, moved
from tokenspeed.spmd.program import Move
from tokenspeed.spmd.routes import hops

MESHES = tuple(
    Mesh.of(sizes)
    for sizes in (
        GroupSizes.of(1),
        GroupSizes.of(3),
        GroupSizes.of(2, attention_dp=3),
        GroupSizes(4, 2, 8, 2, 4),
        GroupSizes(8, 2, 4, 2, 2),
    )
)


@st.composite
def dealt(draw: st.DrawFn) -> tuple[Mesh, TokenTable, str, Array, list[Array]]:
    """A value and a random way in which ranks hold it under a random layout."""
    mesh = draw(st.sampled_from(MESHES))
    table = TokenTable(mesh, tuple(draw(st.lists(st.integers(0, 3), min_size=mesh.world, max_size=mesh.world))))
    layout = draw(st.sampled_from(layouts(len(mesh.axes))))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    whole = rng.normal(size=(table.num_tokens, 2))
    locals_: list[Array] = [whole[table.rows(layout, rank)] for rank in range(mesh.world)]
    addends = [axis for axis, letter in enumerate(layout) if letter == "P"]
    copied = [axis for axis, letter in enumerate(layout) if letter == "R"]
    for group in mesh.process_groups(addends):
        parts = rng.normal(size=(len(group), *locals_[group[0]].shape))
        parts[-1] = locals_[group[0]] - parts[:-1].sum(axis=0)
        for rank, part in zip(group, parts, strict=True):
            first = mesh.members(rank, copied)[0]
            locals_[rank] = part if first == rank else locals_[first]
    return mesh, table, layout, whole, locals_


@settings(max_examples=100, deadline=None, derandomize=True)
@given(dealt())
def test_a_move_keeps_the_value(given_value: tuple[Mesh, TokenTable, str, Array, list[Array]]) -> None:
    mesh, table, layout, whole, locals_ = given_value
    np.testing.assert_allclose(denoted(mesh, table, layout, locals_), whole, atol=1e-9)
    for kind, axes, target in hops(layout):
        after = apply_move(mesh, table, Move(0, layout, kind, axes), locals_)
        assert [len(array) for array in after] == [len(table.rows(target, rank)) for rank in range(mesh.world)]
        np.testing.assert_allclose(denoted(mesh, table, target, after), whole, atol=1e-9)


def test_copies_that_differ_stand_for_nothing() -> None:
    mesh = Mesh.of(GroupSizes.of(2))
    table = TokenTable(mesh, (1, 1))
    with pytest.raises(LayoutError, match="copies"):
        denoted(mesh, table, "R", [np.zeros((2, 1)), np.ones((2, 1))])


def test_there_are_four_moves() -> None:
    found = {}
    for source in "RSP":
        for target in "RSP":
            if source != target:
                with suppress(LayoutError):
                    found[source + target] = move_kind(source, target, "layers.0.norm")
    assert found == {
        "PR": MoveKind.ALL_REDUCE,
        "PS": MoveKind.REDUCE_SCATTER,
        "SR": MoveKind.ALL_GATHER,
        "RS": MoveKind.SLICE,
    }
    with pytest.raises(LayoutError, match=r"layers\.0\.norm: there is no move from S to P"):
        move_kind("S", "P", "layers.0.norm")


def test_a_move_needs_its_letter_on_every_axis() -> None:
    assert moved("PPS", MoveKind.ALL_REDUCE, (0, 1), "op") == "RRS"
    with pytest.raises(LayoutError, match=r"layers\.0\.norm: all_reduce along axis 2 needs P, but PPS has S"):
        moved("PPS", MoveKind.ALL_REDUCE, (0, 2), "layers.0.norm")


@pytest.mark.parametrize("layout", ["R", "RRX", "RRRR"])
def test_layouts_fit_their_mesh(layout: str) -> None:
    with pytest.raises(LayoutError, match=r"op: .* is no layout of 3 axes"):
        check_layout(layout, MESHES[3], "op")


def test_a_table_from_partitions() -> None:
    mesh = Mesh.of(GroupSizes.of(3, attention_dp=2))
    table = TokenTable.of(mesh, (4, 0))
    assert table.counts == (2, 1, 1, 0, 0, 0)
    assert table.partition_counts() == (4, 0)
    assert table.num_tokens == 4


def test_rows_follow_the_s_axes() -> None:
    mesh = Mesh.of(GroupSizes.of(2, attention_dp=2))
    table = TokenTable(mesh, (2, 1, 0, 3))
    held = {layout: [table.rows(layout, rank).tolist() for rank in range(4)] for layout in ("SS", "SR", "RS", "PR")}
    assert held["SS"] == [[0, 1], [2], [], [3, 4, 5]]
    assert held["SR"] == [[0, 1, 2], [0, 1, 2], [3, 4, 5], [3, 4, 5]]
    assert held["RS"] == [[0, 1], [2, 3, 4, 5], [0, 1], [2, 3, 4, 5]]
    assert held["PR"] == [[0, 1, 2, 3, 4, 5]] * 4
    assert mesh.axes_of(Group.ATTENTION_DP) == (0,)
