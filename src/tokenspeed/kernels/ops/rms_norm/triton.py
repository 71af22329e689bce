# SPDX-License-Identifier: Apache-2.0
"""One launch in Triton. Short rows share a program; rows longer than LONG numbers are read twice."""

from __future__ import annotations

import torch

from tokenspeed.kernels.platform import has_dependent_launch, triton_on_cuda
from tokenspeed.kernels.registry import Band, Kernel, KernelContext, Solution

LONG = 16384
TILE = 2048


def build(ctx: KernelContext) -> Kernel:
    from tokenspeed.kernels.ops.rms_norm import _triton

    pdl = has_dependent_launch(ctx.device)
    launch = {"launch_pdl": True} if pdl else {}

    def rms_norm(
        x: torch.Tensor, weight_D: torch.Tensor, residual: torch.Tensor | None, *, eps: float, weight_offset: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        *outer, size = x.shape
        assert 1 <= len(outer) <= 2, x.shape
        assert residual is None or (residual.shape == x.shape and residual.dtype is x.dtype), x.shape
        assert size == 1 or x.stride(-1) == 1, x.stride()
        assert weight_D.is_contiguous(), weight_D.stride()
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        y = x if residual is None else residual
        num_rows = outer[0] * (outer[1] if len(outer) == 2 else 1)
        if num_rows == 0:
            return out, y
        rows, block, num_warps = tile_of(size)
        kernel = _triton.long_rows if size > LONG else _triton.whole_rows
        kernel[(-(-num_rows // rows),)](
            x,
            weight_D,
            y,
            out,
            num_rows,
            outer[1] if len(outer) == 2 else 1,
            x.stride(0),
            x.stride(1) if len(outer) == 2 else 0,
            y.stride(0),
            y.stride(1) if len(outer) == 2 else 0,
            eps,
            weight_offset,
            SIZE=size,
            ROWS=rows,
            BLOCK=block,
            HAS_RESIDUAL=residual is not None,
            PDL=pdl,
            num_warps=num_warps,
            **launch,
        )
        return out, y

    return rms_norm


def tile_of(size: int) -> tuple[int, int, int]:
    """Rows, columns and warps of a program. Depends on the row's size alone, so that a row's bits do too."""
    if size > LONG:
        return 1, 8192, 16
    block = 1 << (size - 1).bit_length()
    rows = max(1, min(16, TILE // block))
    return rows, block, min(16, max(1, rows * block // 512))


SOLUTION = Solution("triton", Band.PERFORMANT, triton_on_cuda, build, graph_safe=True, batch_invariant=True)
