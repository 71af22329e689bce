# SPDX-License-Identifier: Apache-2.0
"""Tiles of linear for few rows: each fits the machine, and every matrix gets one or is left to cuBLAS."""

from __future__ import annotations

import pytest
import torch

from tokenspeed.kernels.ops.linear import _one_row, _tuned, triton_invariant
from tokenspeed.kernels.ops.linear._few_rows import ARRIVALS_MAX, Tile
from tokenspeed.kernels.registry import KernelContext, bind

SHARED_MEMORY_BYTES = 227 << 10
MATRICES = [
    *((n, k) for n in (1, 48, 512, 2048, 4096, 6144, 24576, 151936) for k in (1, 40, 512, 1100, 4096, 12288)),
    *{matrix for _, matrix in _tuned._MEASURED},
]


def shared_bytes(tile: Tile, rows: int) -> int:
    """What the blocks on their way take, of numbers of two bytes."""
    return tile.stages * (tile.outputs + rows) * tile.inputs * 2


@pytest.mark.parametrize("rows", _tuned.BUCKETS)
def test_every_tile_fits(rows: int) -> None:
    tiles = [(matrix, tile) for matrix in MATRICES if (tile := _tuned.tile_for(rows, *matrix)) is not None]
    assert tiles
    for (num_outputs, num_inputs), tile in tiles:
        assert shared_bytes(tile, rows) <= SHARED_MEMORY_BYTES, tile
        assert tile.num_splits == 1 or -(-num_outputs // tile.outputs) <= ARRIVALS_MAX, tile
        assert tile.num_splits == 1 or num_inputs >= 4 * tile.inputs * tile.num_splits, tile
        assert tile.prefetch % 16 == 0, tile
        assert tile.prefetch <= 2 * num_inputs // tile.num_splits, tile


def test_rows_take_the_first_bucket_that_holds_them() -> None:
    assert [_tuned.bucket_of(rows) for rows in (1, 16, 17, 32, 33, 64, 65, 8192)] == [
        16,
        16,
        32,
        32,
        64,
        64,
        None,
        None,
    ]


def test_many_outputs_are_not_split_and_few_are() -> None:
    many, few = _tuned.tile_for(16, 100_000, 5120), _tuned.tile_for(16, 1024, 5120)
    assert many is not None and many.num_splits == 1
    assert few is not None and few.num_splits > 1
    assert _tuned.tile_for(64, 100_000, 5120) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_invariant_tiles_fit_and_add_up_in_an_order_that_hangs_on_the_matrix_alone(dtype: torch.dtype) -> None:
    for num_outputs, num_inputs in MATRICES:
        orders = set()
        for num_rows in (1, 16, 17, 64, 65, 8192):
            rows, tile = triton_invariant.tile_for(num_rows, num_outputs, num_inputs, dtype)
            orders.add((tile.inputs, tile.num_splits))
            assert shared_bytes(tile, rows) * dtype.itemsize // 2 <= SHARED_MEMORY_BYTES, (rows, tile)
            is_shared_out = tile.num_splits > 1 and rows != triton_invariant.MANY
            assert not is_shared_out or -(-num_outputs // tile.outputs) <= ARRIVALS_MAX, tile
        assert len(orders) == 1, (num_outputs, num_inputs, orders)


@pytest.mark.parametrize("num_rows", [1, 40, 150])
def test_parts_of_the_invariant_product_make_the_whole(num_rows: int) -> None:
    """Shared out over programs and one after the other. Their bits are compared on a GPU: the interpreter's products
    hang on their shapes."""
    kernel = bind("linear", KernelContext("cpu", torch.float32, {"linear": "triton_invariant!"})).call
    assert triton_invariant.tile_for(num_rows, 70, 260, torch.float32)[1].num_splits > 1
    torch.manual_seed(0)
    x_TD, weight_ND = torch.randn(num_rows, 260), torch.randn(70, 260)
    torch.testing.assert_close(kernel(x_TD, weight_ND, None), x_TD @ weight_ND.T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("num_outputs", "num_inputs"), MATRICES)
def test_the_tile_of_one_row_stays_in_registers(num_outputs: int, num_inputs: int) -> None:
    tile = _one_row.tile_for(num_outputs, num_inputs)
    assert tile.inputs & (tile.inputs - 1) == 0, tile
    assert tile.outputs * tile.inputs <= 64 * 32 * tile.num_warps, tile
    assert tile.inputs >= num_inputs or tile.inputs >= 1024, tile
