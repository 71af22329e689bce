# SPDX-License-Identifier: Apache-2.0
"""The compiled CPU kernel (csrc/cpu)."""

from __future__ import annotations

import torch

from tokenspeed.kernels.platform import CPU_DTYPES, compiled_cpu, require_cpu_module
from tokenspeed.kernels.registry import Band, Kernel, KernelContext, Solution


def build(_ctx: KernelContext) -> Kernel:
    kernel = require_cpu_module().gated

    def gelu_tanh_mul(x_TF: torch.Tensor) -> torch.Tensor:
        num_rows, size = x_TF.shape[0], x_TF.shape[1] // 2
        assert x_TF.stride(1) == 1, x_TF.stride()
        out_TF = torch.empty((num_rows, size), dtype=x_TF.dtype)
        kernel(x_TF.data_ptr(), out_TF.data_ptr(), num_rows, size, x_TF.stride(0), 1, CPU_DTYPES[x_TF.dtype])
        return out_TF

    return gelu_tanh_mul


SOLUTION = Solution("cpu", Band.PERFORMANT, compiled_cpu, build, batch_invariant=True)
