# SPDX-License-Identifier: Apache-2.0
"""Few rows in Triton, the weights read once by as many programs as keep memory busy; more rows, and matrices for which
it was measured faster, by cuBLAS."""

from __future__ import annotations

import functools

import torch

from tokenspeed.kernels.ops.linear._few_rows import FewRows, new_output
from tokenspeed.kernels.ops.linear._one_row import OneRow
from tokenspeed.kernels.ops.linear._product import product, widens
from tokenspeed.kernels.ops.linear._tuned import bucket_of, row_tile_for, tile_for
from tokenspeed.kernels.platform import triton_on_cuda
from tokenspeed.kernels.registry import Band, Kernel, KernelContext, Solution


def build(ctx: KernelContext) -> Kernel:
    few_rows, one_row = FewRows(ctx.device), OneRow(ctx.device)
    widens(torch.empty(0, device=ctx.device).device, ctx.dtype)
    tile_of, row_tile_of = functools.cache(tile_for), functools.cache(row_tile_for)

    def linear(
        x_TD: torch.Tensor, weight_ND: torch.Tensor, bias_N: torch.Tensor | None, out_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        rows = bucket_of(x_TD.shape[0])
        if rows is None or x_TD.dtype is torch.float32 or x_TD.numel() == 0:
            return product(x_TD, weight_ND, bias_N, out_dtype)
        if x_TD.shape[0] == 1:
            out_TN = new_output(x_TD, weight_ND, out_dtype)
            one_row(x_TD, weight_ND, bias_N, out_TN, tile=row_tile_of(*weight_ND.shape))
            return out_TN
        tile = tile_of(rows, *weight_ND.shape)
        if tile is None:
            return product(x_TD, weight_ND, bias_N, out_dtype)
        out_TN = new_output(x_TD, weight_ND, out_dtype)
        few_rows(x_TD, weight_ND, bias_N, out_TN, tile=tile, rows=rows)
        return out_TN

    return linear


SOLUTION = Solution("triton", Band.PERFORMANT, triton_on_cuda, build, graph_safe=True)
