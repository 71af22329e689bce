# SPDX-License-Identifier: Apache-2.0
"""A product in which a row's bits do not depend on how many rows there are: one tile for every number of them, inputs
always in the same order. Slower than the others; for those who ask for it."""

from __future__ import annotations

import torch

from tokenspeed.kernels.ops.linear._few_rows import FewRows, Tile, new_output
from tokenspeed.kernels.platform import triton_on_cuda
from tokenspeed.kernels.registry import Band, Kernel, KernelContext, Solution

ROWS = 64
TILE = Tile(outputs=64, inputs=64, stages=4)
FLOAT32_TILE = Tile(outputs=64, inputs=32, stages=3)


def build(ctx: KernelContext) -> Kernel:
    few_rows = FewRows(ctx.device)

    def linear(
        x_TD: torch.Tensor, weight_ND: torch.Tensor, bias_N: torch.Tensor | None, out_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        out_TN = new_output(x_TD, weight_ND, out_dtype)
        if out_TN.numel():
            tile = FLOAT32_TILE if x_TD.dtype is torch.float32 else TILE
            few_rows(x_TD, weight_ND, bias_N, out_TN, tile=tile, rows=ROWS)
        return out_TN

    return linear


SOLUTION = Solution("triton_invariant", Band.PORTABLE, triton_on_cuda, build, graph_safe=True, batch_invariant=True)
