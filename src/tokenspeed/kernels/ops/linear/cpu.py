# SPDX-License-Identifier: Apache-2.0
"""The compiled CPU kernel (csrc/cpu)."""

from __future__ import annotations

import torch

from tokenspeed.kernels.platform import CPU_DTYPES, compiled_cpu, require_cpu_module
from tokenspeed.kernels.registry import Band, Kernel, KernelContext, Solution


def build(_ctx: KernelContext) -> Kernel:
    kernel = require_cpu_module().linear

    def linear(
        x_TD: torch.Tensor, weight_ND: torch.Tensor, bias_N: torch.Tensor | None, out_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        num_rows, num_inputs = x_TD.shape
        num_outputs = weight_ND.shape[0]
        dtype = x_TD.dtype
        assert weight_ND.dtype is dtype, (weight_ND.dtype, dtype)
        assert weight_ND.shape[1] == num_inputs, (weight_ND.shape, x_TD.shape)
        assert x_TD.stride(1) == 1 or num_inputs == 1, x_TD.stride()
        out_TN = torch.empty((num_rows, num_outputs), dtype=out_dtype or dtype)
        kernel(
            x_TD.data_ptr(),
            weight_ND.data_ptr(),
            0 if bias_N is None else bias_N.data_ptr(),
            out_TN.data_ptr(),
            num_rows,
            num_outputs,
            num_inputs,
            x_TD.stride(0),
            weight_ND.stride(0),
            CPU_DTYPES[dtype],
            CPU_DTYPES[out_TN.dtype],
        )
        return out_TN

    return linear


SOLUTION = Solution("cpu", Band.PERFORMANT, compiled_cpu, build, batch_invariant=True)
