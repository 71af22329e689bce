# SPDX-License-Identifier: Apache-2.0
"""Page tables that follow deltas equal rebuilt ones, and a batch is what a plain loop makes of the same plan."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tokenspeed.core.plan import CacheGroup, GroupKind, RowKind, StepPlan
from tokenspeed.execution import kv_cache
from tokenspeed.execution.input_buffers import InputBuffers, OwnRows, Seats, StepInputs
from tokenspeed.execution.kv_cache import PoolSize
from tokenspeed.kernels.ops.page_table_update.reference import page_table_update
from tokenspeed.layers.attention import KvSpec
from tokenspeed.layers.build import BuildContext
from tokenspeed.layers.decoder import TOKEN_IDS
from tokenspeed.spmd.mesh import GroupSizes, Mesh
from tokenspeed.spmd.step import StepInput

FULL = CacheGroup(GroupKind.FULL, block_size=4, num_blocks=60)
WINDOW = CacheGroup(GroupKind.WINDOW, block_size=4, num_blocks=20, window=9)
SIZE = PoolSize((FULL,), (), max_model_len=40, kv_bytes=0)
SEATS = 5


def built(buffers: InputBuffers, plan: StepPlan) -> StepInput:
    return buffers.step(buffers.read(plan))


def ran(buffers: InputBuffers, plan: StepPlan, token_ids: list[int]) -> None:
    """The step has run, and sampled these tokens."""
    inputs = buffers.read(plan)
    buffers.commit(inputs, torch.tensor(token_ids, dtype=torch.int64))
    buffers.advance(inputs)


@pytest.fixture
def buffers() -> InputBuffers:
    return InputBuffers(SIZE, Seats(SEATS), (), torch.device("cpu"), page_table_update)


def test_tables_that_follow_deltas_equal_rebuilt_ones(buffers: InputBuffers, tools: Any) -> None:
    generator = np.random.default_rng(2)
    tables: dict[int, list[int]] = {seat: [] for seat in range(SEATS)}
    for step in range(200):
        seated = [seat for seat in range(SEATS) if generator.random() < 0.1]
        for seat in seated:
            tables[seat] = []
        delta = []
        for seat in range(SEATS):
            for _ in range(int(generator.integers(0, 3))):
                if len(tables[seat]) < SIZE.blocks_per_seat:
                    page = int(generator.integers(1, SIZE.num_blocks + 1))
                    delta.append((seat, len(tables[seat]), page))
                    tables[seat].append(page)
        buffers.apply(tools.make_plan(step, [], seated=seated, pages=delta))
        for seat, table in tables.items():
            row = buffers.page_tables[0, seat].tolist()
            assert row == table + [0] * (len(row) - len(table))
        if step % 3 == 0:  # what waits is not lost where no step asks for it
            buffers.tables.flush()
            assert np.array_equal(buffers.tables.on_device.numpy(), buffers.tables.on_host)


def test_a_step_takes_along_few_changes_and_no_cleared_seat(buffers: InputBuffers, tools: Any) -> None:
    tables = buffers.tables

    def on_device() -> Any:
        return tables.on_device[0, :SEATS, :2].tolist()

    buffers.apply(tools.make_plan(0, [], seated=[1], pages=[(1, 0, 5)]))
    assert len(tables.take(9)) == 0, "a seat is cleared, so all of it is done at once"
    assert on_device()[1] == [5, 0]
    buffers.apply(tools.make_plan(1, [], pages=[(1, 1, 6), (3, 0, 7)]))
    assert on_device()[1] == [5, 0]
    assert tables.take(2).tolist() == [[1, 0, 1, 6], [3, 0, 0, 7]]
    assert len(tables.take(2)) == 0, "taken once"
    assert on_device()[1] == [5, 0], "whoever took it sets it"
    buffers.apply(tools.make_plan(2, [], pages=[(2, 0, 8), (2, 1, 9)]))
    assert len(tables.take(1)) == 0
    assert on_device()[2] == [8, 9]


def test_a_mixed_batch_equals_a_plain_loop(buffers: InputBuffers, tools: Any) -> None:
    pages = [(seat, index, 1 + (seat * 11 + index * 7) % 60) for seat in range(4) for index in range(6)]
    table = {(seat, index): page for seat, index, page in pages}
    first = tools.make_plan(
        0,
        [(3, RowKind.PREFILL_LAST, 0, 9), (1, RowKind.PREFILL_LAST, 0, 4)],
        list(range(13)),
        seated=[0, 1, 2, 3],
        pages=pages,
    )
    buffers.apply(first)
    assert built(buffers, first).sampled.tolist() == [8, 12]
    ran(buffers, first, [70, 71])
    # The plan's context_len of a decode row is a lower bound: the device's own length counts.
    rows = [
        (1, RowKind.DECODE, 2, 1),
        (3, RowKind.DECODE, 9, 1),
        (0, RowKind.PREFILL, 5, 6),
        (2, RowKind.PREFILL_LAST, 0, 3),
    ]
    plan = tools.make_plan(1, rows, [20, 21, 22, 23, 24, 25, 30, 31, 32])
    buffers.apply(plan)
    inputs = buffers.read(plan)
    step = buffers.step(inputs)
    batch, token_ids_T = step.context, step.sources[TOKEN_IDS]
    context_lens = [4, 9, 5, 0]
    positions = [
        (seat, context + offset)
        for (seat, _, _, query), context in zip(rows, context_lens, strict=True)
        for offset in range(query)
    ]
    assert token_ids_T.tolist() == [71, 70, 20, 21, 22, 23, 24, 25, 30, 31, 32]
    assert batch.positions_T.tolist() == [position for _, position in positions]
    assert batch.groups[0].slot_mapping_T.tolist() == [table[s, p // 4] * 4 + p % 4 for s, p in positions]
    assert batch.query_start.tolist() == [0, 1, 2, 8, 11]
    assert batch.seq_lens_R.tolist() == [5, 10, 11, 3]
    assert batch.groups[0].block_tables_RB.tolist() == [[table[row[0], index] for index in range(3)] for row in rows]
    assert step.sampled.tolist() == [0, 1, 10]
    assert (batch.max_query_len, batch.max_seq_len) == (6, 11)
    assert inputs.position_S.tolist() == [5, 10, 3]
    assert inputs.seats_S.tolist() == [1, 3, 2]
    assert [token_ids_T.dtype, batch.positions_T.dtype, batch.groups[0].slot_mapping_T.dtype] == [torch.int64] * 3
    assert [batch.query_start.dtype, batch.seq_lens_R.dtype, batch.groups[0].block_tables_RB.dtype] == [torch.int32] * 3


def test_a_batch_is_not_changed_by_the_next_step(buffers: InputBuffers, tools: Any) -> None:
    plan = tools.make_plan(0, [(0, 1, 0, 3)], [1, 2, 3], seated=[0], pages=[(0, 0, 9)])
    buffers.apply(plan)
    batch = built(buffers, plan).context
    buffers.apply(tools.make_plan(1, [], seated=[0], pages=[(0, 0, 10)]))
    assert batch.groups[0].block_tables_RB.tolist() == [[9]]


@pytest.mark.parametrize("num_partitions", [1, 2])
def test_rows_that_decode_again_are_read_as_if_anew(tools: Any, num_partitions: int) -> None:
    mesh = Mesh.of(GroupSizes.of(num_partitions, attention_dp=num_partitions))
    each = SEATS if num_partitions == 1 else 3
    buffers = InputBuffers(SIZE, Seats(each, mesh), (), torch.device("cpu"), page_table_update)
    decodes = {
        "one": [(1, RowKind.DECODE, 3, 1)],
        "three": [(4, RowKind.DECODE, 9, 1), (1, RowKind.DECODE, 0, 1), (2, RowKind.DECODE, 5, 1)],
        "others": [(4, RowKind.DECODE, 9, 1), (1, RowKind.DECODE, 0, 1), (3, RowKind.DECODE, 5, 1)],
    }
    buffers.seq_len[:5] = 7, 3, 20, 11, 9
    for step, name in enumerate(["one", "one", "three", "three", "three", "one", "three", "others", "three", "three"]):
        rows = [(seat, kind, context + step % 3, query) for seat, kind, context, query in decodes[name]]
        plan = tools.make_plan(step, rows)
        inputs, (anew, _) = buffers.read(plan), buffers._read(plan)
        for field in StepInputs.__struct_fields__:
            ours, theirs = (getattr(each, field) for each in (inputs, anew))
            for part in OwnRows.__struct_fields__ if field == "own" else [None]:
                got, wanted = (each if part is None else getattr(each, part) for each in (ours, theirs))
                assert np.array_equal(got, wanted), (step, field, part)
                assert getattr(got, "dtype", None) == getattr(wanted, "dtype", None), (step, field, part)
        buffers.advance(inputs)
    assert buffers.seq_len[1] == 3 + 10


def test_rows_without_sampling_and_empty_plans(buffers: InputBuffers, tools: Any) -> None:
    plan = tools.make_plan(0, [(0, RowKind.PREFILL, 0, 3)], [1, 2, 3], seated=[0], pages=[(0, 0, 9)])
    buffers.apply(plan)
    assert built(buffers, plan).sampled.shape == (0,)
    ran(buffers, plan, [])
    assert buffers.seq_len[0] == 3
    assert built(buffers, tools.make_plan(1, [])).sources[TOKEN_IDS].shape == (0,)


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({"rows": [], "pages": [(0, 0, 0)]}, "null page"),
        ({"rows": [], "pages": [(0, 0, 61)]}, "61"),
        ({"rows": [(0, 1, 0, 1), (1, 2, 0, 1)], "token_ids": [5]}, "decode rows do not come first"),
        ({"rows": [(0, 1, 0, 4)], "token_ids": [5]}, "1, "),
    ],
)
def test_plans_out_of_contract_are_bugs(buffers: InputBuffers, tools: Any, plan: dict[str, Any], words: str) -> None:
    made: StepPlan = tools.make_plan(0, **plan)

    def run() -> None:
        buffers.apply(made)
        buffers.read(made)

    with pytest.raises(AssertionError, match=words):
        run()


@pytest.fixture
def grouped() -> InputBuffers:
    ctx = BuildContext("cpu", torch.float32)
    specs = (KvSpec(1, 2, 9), KvSpec(1, 2))
    size = PoolSize((FULL, WINDOW), (1, 0), max_model_len=40, kv_bytes=0)
    return InputBuffers(size, Seats(SEATS), kv_cache.allocate(size, specs, ctx), torch.device("cpu"), page_table_update)


def test_each_group_has_tables_of_its_own(grouped: InputBuffers, tools: Any) -> None:
    pages = [(2, 0, index, 30 + index) for index in range(4)] + [(2, 1, index, 20 - index) for index in range(4)]
    plan = tools.make_plan(0, [(2, RowKind.PREFILL, 0, 14)], list(range(14)), seated=[2], pages=pages)
    grouped.apply(plan)
    batch = built(grouped, plan).context
    full, window = batch.groups
    assert [layer.group for layer in batch.kv_layers] == [1, 0]
    assert [len(layer.k) for layer in batch.kv_layers] == [21, 61]
    assert full.block_tables_RB.tolist() == [[30, 31, 32, 33]]
    assert window.block_tables_RB.tolist() == [[20, 19, 18, 17]]
    assert full.slot_mapping_T.tolist() == [(30 + at // 4) * 4 + at % 4 for at in range(14)]
    assert window.slot_mapping_T.tolist() == [(20 - at // 4) * 4 + at % 4 for at in range(14)]
    ran(grouped, plan, [])
    # The next token sits at 14 and looks back to 6: block 0 has expired and may go to someone else.
    plan = tools.make_plan(1, [(2, RowKind.DECODE, 14, 1)], pages=[(2, 1, 0, 0), (3, 1, 0, 20)])
    grouped.apply(plan)
    full, window = built(grouped, plan).context.groups
    assert full.block_tables_RB.tolist() == [[30, 31, 32, 33]]
    assert window.block_tables_RB.tolist() == [[0, 19, 18, 17]]
    assert window.slot_mapping_T.tolist() == [17 * 4 + 2]
    grouped.apply(tools.make_plan(2, [], seated=[2]))
    assert not grouped.page_tables[:, 2].any()
    assert grouped.page_tables[1, 3, 0] == 20


def test_pages_are_zeroed_and_copied_in_their_own_group(grouped: InputBuffers, tools: Any) -> None:
    window, full = built(grouped, tools.make_plan(0, [])).context.kv_layers
    for layer in (window, full):
        layer.k[:] = torch.arange(len(layer.k)).view(-1, 1, 1, 1)
        layer.v.copy_(layer.k)
    grouped.apply(tools.make_plan(1, [], zero=[(0, 5), (1, 6)], copy=[(1, 7, 8), (0, 9, 10), (1, 3, 4)]))
    for pages in (full.k, full.v):
        assert pages[[4, 5, 6, 8, 10], 0, 0, 0].tolist() == [4, 0, 6, 8, 9]
    for pages in (window.k, window.v):
        assert pages[[4, 5, 6, 8, 10], 0, 0, 0].tolist() == [3, 5, 0, 7, 10]


@pytest.mark.parametrize(
    ("page", "words"), [((0, 0, 0, 0), "null page"), ((0, 1, 0, 21), "21"), ((0, 2, 0, 1), "no cache group 2 of 2")]
)
def test_a_group_hands_out_its_own_pages_only(
    grouped: InputBuffers, tools: Any, page: tuple[int, ...], words: str
) -> None:
    with pytest.raises(AssertionError, match=words):
        grouped.apply(tools.make_plan(0, [], pages=[page]))
