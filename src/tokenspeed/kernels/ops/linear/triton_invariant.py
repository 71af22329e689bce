# SPDX-License-Identifier: Apache-2.0
"""A product in which a row's bits do not depend on how many rows there are: a matrix has its inputs added up in one
order, in parts that few rows share out over programs and many rows take one after the other. Slower than the others;
for those who ask for it."""

from __future__ import annotations

import dataclasses

import torch

from tokenspeed.kernels.ops.linear._few_rows import FewRows, Tile, new_output
from tokenspeed.kernels.platform import triton_on_cuda
from tokenspeed.kernels.registry import Band, Kernel, KernelContext, Solution

FEW = (16, 64)
"""Rows of a tile: a call takes the first that holds all of its own."""
MANY = 128
"""Rows, and outputs, of a tile where there are more."""
SPLITS_MAX = 2
_BUSY = 128
"""As many programs as it takes to draw all that the memory of an H200 gives."""


def build(ctx: KernelContext) -> Kernel:
    few_rows = FewRows(ctx.device)

    def linear(
        x_TD: torch.Tensor, weight_ND: torch.Tensor, bias_N: torch.Tensor | None, out_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        out_TN = new_output(x_TD, weight_ND, out_dtype)
        if out_TN.numel():
            rows, tile = tile_for(x_TD.shape[0], weight_ND.shape[0], weight_ND.shape[1], x_TD.dtype)
            few_rows(x_TD, weight_ND, bias_N, out_TN, tile=tile, rows=rows, fold=rows == MANY)
        return out_TN

    return linear


def tile_for(num_rows: int, num_outputs: int, num_inputs: int, dtype: torch.dtype) -> tuple[int, Tile]:
    """(rows of a tile, tile). What decides an order of sums, the tile's inputs and num_splits, hangs on the matrix and
    the dtype alone."""
    is_wide = dtype is torch.float32
    inputs = 32 if is_wide else 128
    is_narrow = -(-num_outputs // 64) < _BUSY and num_inputs >= 4 * inputs * SPLITS_MAX
    few = Tile(64, inputs, num_splits=SPLITS_MAX if is_narrow else 1, stages=3 if is_wide else 4)
    rows = next((rows for rows in FEW if num_rows <= rows), MANY)
    many = dataclasses.replace(few, outputs=MANY, stages=2 if is_wide else 3, num_warps=8)
    return rows, many if rows == MANY else few


SOLUTION = Solution("triton_invariant", Band.PORTABLE, triton_on_cuda, build, graph_safe=True, batch_invariant=True)
