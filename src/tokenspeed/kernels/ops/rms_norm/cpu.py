# SPDX-License-Identifier: Apache-2.0
"""The compiled CPU kernel (csrc/cpu)."""

from __future__ import annotations

import torch

from tokenspeed.kernels.platform import CPU_DTYPES, compiled_cpu, require_cpu_module
from tokenspeed.kernels.registry import Band, Kernel, KernelContext, Solution


def build(_ctx: KernelContext) -> Kernel:
    kernel = require_cpu_module().rms_norm

    def rms_norm(
        x: torch.Tensor, weight_D: torch.Tensor, residual: torch.Tensor | None, *, eps: float, weight_offset: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        *outer, size = x.shape
        assert len(outer) <= 2, x.shape
        assert residual is None or (len(outer) == 1 and residual.shape == x.shape and residual.dtype is x.dtype)
        assert weight_D.dtype is x.dtype, (weight_D.dtype, x.dtype)
        assert x.stride(-1) == 1 or size == 1, x.stride()
        out = torch.empty(x.shape, dtype=x.dtype)
        kernel(
            x.data_ptr(),
            weight_D.data_ptr(),
            0 if residual is None else residual.data_ptr(),
            out.data_ptr(),
            outer[0] if outer else 1,
            outer[1] if len(outer) == 2 else 1,
            size,
            x.stride(0),
            x.stride(1) if len(outer) == 2 else 0,
            0 if residual is None else residual.stride(0),
            eps,
            weight_offset,
            CPU_DTYPES[x.dtype],
        )
        return out, x if residual is None else residual

    return rms_norm


SOLUTION = Solution("cpu", Band.PERFORMANT, compiled_cpu, build, batch_invariant=True)
