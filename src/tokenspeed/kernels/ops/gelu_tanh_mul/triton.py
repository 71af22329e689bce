# SPDX-License-Identifier: Apache-2.0
"""One launch in Triton."""

from __future__ import annotations

import torch

from tokenspeed.kernels.platform import has_dependent_launch, triton_on_cuda
from tokenspeed.kernels.registry import Band, Kernel, KernelContext, Solution

FEW_ROWS = 64
"""Up to so many rows, small programs: there are processors for all of them."""


def build(ctx: KernelContext) -> Kernel:
    from tokenspeed.kernels.ops.gelu_tanh_mul import _triton

    pdl = has_dependent_launch(ctx.device)
    launch = {"launch_pdl": True} if pdl else {}

    def gelu_tanh_mul(x_TF: torch.Tensor) -> torch.Tensor:
        num_rows, size = x_TF.shape[0], x_TF.shape[1] // 2
        assert x_TF.stride(1) == 1, x_TF.stride()
        out_TF = torch.empty((num_rows, size), dtype=x_TF.dtype, device=x_TF.device)
        if out_TF.numel() == 0:
            return out_TF
        block, num_warps = (512, 2) if num_rows <= FEW_ROWS else (2048, 8)
        num_blocks = -(-size // block)
        _triton.gated[(num_rows * num_blocks,)](
            x_TF, out_TF, num_blocks, x_TF.stride(0), SIZE=size, BLOCK=block, PDL=pdl, num_warps=num_warps, **launch
        )
        return out_TF

    return gelu_tanh_mul


SOLUTION = Solution("triton", Band.PERFORMANT, triton_on_cuda, build, graph_safe=True, batch_invariant=True)
