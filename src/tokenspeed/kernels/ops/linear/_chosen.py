# SPDX-License-Identifier: Apache-2.0
"""The kernel for few rows where it is known to be the faster one, else torch's product. Knows no tile."""

from __future__ import annotations

import functools

import torch

from tokenspeed.kernels.ops.linear._few_rows import FewRows, new_output
from tokenspeed.kernels.ops.linear._product import product, widens
from tokenspeed.kernels.ops.linear._tuned import bucket_of, tile_for
from tokenspeed.kernels.registry import Kernel, KernelContext


def few_rows_or_product(ctx: KernelContext) -> Kernel:
    """The op for any number of rows."""
    few_rows = FewRows(ctx.device)
    widens(torch.empty(0, device=ctx.device).device, ctx.dtype)
    tile_of = functools.cache(tile_for)

    def linear(
        x_TD: torch.Tensor, weight_ND: torch.Tensor, bias_N: torch.Tensor | None, out_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        rows = bucket_of(x_TD.shape[0])
        if rows is None or x_TD.dtype is torch.float32 or x_TD.numel() == 0:
            return product(x_TD, weight_ND, bias_N, out_dtype)
        tile = tile_of(rows, *weight_ND.shape)
        if tile is None:
            return product(x_TD, weight_ND, bias_N, out_dtype)
        out_TN = new_output(x_TD, weight_ND, out_dtype)
        few_rows(x_TD, weight_ND, bias_N, out_TN, tile=tile, rows=rows)
        return out_TN

    return linear
