# SPDX-License-Identifier: Apache-2.0
"""The compiled CPU kernel (csrc/cpu)."""

from __future__ import annotations

import torch

from tokenspeed.kernels.ops.most_likely import MostLikely
from tokenspeed.kernels.platform import compiled_cpu, require_cpu_module
from tokenspeed.kernels.registry import Band, KernelContext, Solution


class _MostLikely:
    """Most calls are of the tensors of the call before, whose places are known."""

    def __init__(self) -> None:
        self._kernel = require_cpu_module().most_likely
        self._tensors: tuple[torch.Tensor | None, torch.Tensor | None] = None, None
        self._arguments: tuple[int, ...] = ()

    def __call__(self, logits_SV: torch.Tensor, told_2S: torch.Tensor) -> None:
        known, known_told = self._tensors
        if logits_SV is not known or told_2S is not known_told:
            self._arguments = _arguments(logits_SV, told_2S)
            self._tensors = logits_SV, told_2S
        self._kernel(*self._arguments)


def _arguments(logits_SV: torch.Tensor, told_2S: torch.Tensor) -> tuple[int, ...]:
    num_rows, size = logits_SV.shape
    row_stride, stride = logits_SV.stride()
    dtypes = logits_SV.dtype, told_2S.dtype
    assert dtypes == (torch.float32, torch.int64), dtypes
    assert stride == 1, (row_stride, stride)
    assert told_2S.shape == (2, num_rows), (told_2S.shape, num_rows)
    assert told_2S.is_contiguous(), told_2S.stride()
    told = told_2S.data_ptr()
    return logits_SV.data_ptr(), told, told + told_2S.itemsize * num_rows, num_rows, size, row_stride


def _build(_ctx: KernelContext) -> MostLikely:
    return _MostLikely()


SOLUTION = Solution("cpu", Band.PERFORMANT, compiled_cpu, _build, batch_invariant=True)
