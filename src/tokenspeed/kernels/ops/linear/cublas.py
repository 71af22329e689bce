# SPDX-License-Identifier: Apache-2.0
"""cuBLAS through torch."""

from __future__ import annotations

import torch

from tokenspeed.kernels.ops.linear._product import product, widens
from tokenspeed.kernels.registry import Band, Kernel, KernelContext, Ok, Reason, Solution, Support


def supports(ctx: KernelContext) -> Support:
    if torch.device(ctx.device).type != "cuda":
        return Reason(f"runs on a CUDA device, not on {ctx.device}")
    return Ok()


def build(ctx: KernelContext) -> Kernel:
    widens(torch.empty(0, device=ctx.device).device, ctx.dtype)
    return product


SOLUTION = Solution("cublas", Band.PORTABLE, supports, build, graph_safe=True)
