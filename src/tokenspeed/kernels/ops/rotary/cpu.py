# SPDX-License-Identifier: Apache-2.0
"""The compiled CPU kernel (csrc/cpu)."""

from __future__ import annotations

import torch

from tokenspeed.kernels.platform import CPU_DTYPES, compiled_cpu, require_cpu_module
from tokenspeed.kernels.registry import Band, Kernel, KernelContext, Solution


def build(_ctx: KernelContext) -> Kernel:
    kernel = require_cpu_module().rotary

    def rotary(
        q_THK: torch.Tensor,
        k_TGK: torch.Tensor,
        positions_T: torch.Tensor,
        table_PR: torch.Tensor,
        interleaved: bool = False,
    ) -> None:
        assert table_PR.dtype is torch.float32, table_PR.dtype
        assert positions_T.dtype is torch.int64, positions_T.dtype
        for x in (q_THK, k_TGK):
            assert x.stride(2) == 1, x.stride()
            kernel(
                x.data_ptr(),
                positions_T.data_ptr(),
                table_PR.data_ptr(),
                x.shape[0],
                x.shape[1],
                table_PR.shape[1],
                x.stride(0),
                x.stride(1),
                table_PR.stride(0),
                interleaved,
                CPU_DTYPES[x.dtype],
            )

    return rotary


SOLUTION = Solution("cpu", Band.PERFORMANT, compiled_cpu, build, batch_invariant=True)
