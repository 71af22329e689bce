# SPDX-License-Identifier: Apache-2.0
"""As triton, but one row is multiplied by sums of products. For those who choose it: it has not been measured."""

from __future__ import annotations

import functools

import torch

from tokenspeed.kernels.ops.linear._chosen import few_rows_or_product
from tokenspeed.kernels.ops.linear._few_rows import new_output
from tokenspeed.kernels.ops.linear._one_row import OneRow, tile_for
from tokenspeed.kernels.platform import triton_on_cuda
from tokenspeed.kernels.registry import Band, Kernel, KernelContext, Solution


def build(ctx: KernelContext) -> Kernel:
    one_row, any_rows = OneRow(ctx.device), few_rows_or_product(ctx)
    tile_of = functools.cache(tile_for)

    def linear(
        x_TD: torch.Tensor, weight_ND: torch.Tensor, bias_N: torch.Tensor | None, out_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        if x_TD.shape[0] != 1 or weight_ND.numel() == 0:
            return any_rows(x_TD, weight_ND, bias_N, out_dtype)  # type: ignore[no-any-return]
        out_TN = new_output(x_TD, weight_ND, out_dtype)
        one_row(x_TD, weight_ND, bias_N, out_TN, tile=tile_of(*weight_ND.shape))
        return out_TN

    return linear


SOLUTION = Solution("triton_one_row", Band.PORTABLE, triton_on_cuda, build, graph_safe=True)
