# SPDX-License-Identifier: Apache-2.0
"""The compiled CPU kernel (csrc/cpu)."""

from __future__ import annotations

import torch

from tokenspeed.kernels.kv_pages import page_dim
from tokenspeed.kernels.ops.kv_write import BF16_PAGES, INT8_PAGES
from tokenspeed.kernels.platform import CPU_DTYPES, CPU_PAGE_DTYPES, compiled_cpu, require_cpu_module
from tokenspeed.kernels.registry import Band, Kernel, KernelContext, Solution


def build(_ctx: KernelContext) -> Kernel:
    kernel = require_cpu_module().kv_write

    def kv_write(
        k_TGK: torch.Tensor, v_TGK: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, slots_T: torch.Tensor
    ) -> None:
        assert slots_T.dtype is torch.int64, slots_T.dtype
        for source, pages in ((k_TGK, k_pages), (v_TGK, v_pages)):
            assert pages.dtype in (source.dtype, torch.bfloat16, torch.int8), (source.dtype, pages.dtype)
            assert pages.shape[3] == page_dim(source.shape[2], pages.dtype), (source.shape, pages.shape)
            assert source.stride(2) == pages.stride(3) == 1, (source.stride(), pages.stride())
            kernel(
                source.data_ptr(),
                pages.data_ptr(),
                slots_T.data_ptr(),
                source.shape[0],
                source.shape[1],
                source.shape[2],
                pages.shape[1],
                source.stride(0),
                source.stride(1),
                pages.stride(0),
                pages.stride(1),
                pages.stride(2),
                CPU_DTYPES[source.dtype],
                CPU_PAGE_DTYPES[pages.dtype],
            )

    return kv_write


SOLUTION = Solution(
    "cpu", Band.PERFORMANT, compiled_cpu, build, batch_invariant=True, features=frozenset({BF16_PAGES, INT8_PAGES})
)
