# SPDX-License-Identifier: Apache-2.0
"""The compiled CPU kernel (csrc/cpu)."""

from __future__ import annotations

import torch

from tokenspeed.kernels.ops.most_likely import MostLikely
from tokenspeed.kernels.platform import compiled_cpu, require_cpu_module
from tokenspeed.kernels.registry import Band, KernelContext, Solution


def build(_ctx: KernelContext) -> MostLikely:
    kernel = require_cpu_module().most_likely

    def most_likely(logits_SV: torch.Tensor, told_2S: torch.Tensor) -> None:
        num_rows, size = logits_SV.shape
        row_stride, stride = logits_SV.stride()
        assert stride == 1, (row_stride, stride)
        told = told_2S.data_ptr()
        kernel(logits_SV.data_ptr(), told, told + 8 * num_rows, num_rows, size, row_stride)

    return most_likely


SOLUTION = Solution("cpu", Band.PERFORMANT, compiled_cpu, build, batch_invariant=True)
