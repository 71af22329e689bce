# SPDX-License-Identifier: Apache-2.0
"""The compiled CPU kernel (csrc/cpu)."""

from __future__ import annotations

import torch

from tokenspeed.kernels.kv_pages import page_dim
from tokenspeed.kernels.ops.paged_attention import BF16_PAGES, INT8_PAGES, SINKS
from tokenspeed.kernels.platform import CPU_DTYPES, CPU_PAGE_DTYPES, compiled_cpu, require_cpu_module
from tokenspeed.kernels.registry import Band, Kernel, KernelContext, Solution


def build(_ctx: KernelContext) -> Kernel:
    kernel = require_cpu_module().paged_attention

    def paged_attention(
        q_THK: torch.Tensor,
        k_pages: torch.Tensor,
        v_pages: torch.Tensor,
        *,
        query_start: torch.Tensor,
        seq_lens_R: torch.Tensor,
        block_tables_RB: torch.Tensor,
        scale: float,
        window: int | None,
        soft_cap: float | None,
        sinks_H: torch.Tensor | None = None,
        max_query_len: int | None = None,
    ) -> torch.Tensor:
        num_tokens, num_heads, head_dim = q_THK.shape
        num_kv_heads = k_pages.shape[2]
        assert num_heads % num_kv_heads == 0, (num_heads, num_kv_heads)
        assert k_pages.dtype is v_pages.dtype, (k_pages.dtype, v_pages.dtype)
        assert k_pages.dtype in (q_THK.dtype, torch.bfloat16, torch.int8), (q_THK.dtype, k_pages.dtype)
        assert k_pages.shape[3] == v_pages.shape[3] == page_dim(head_dim, k_pages.dtype), (head_dim, k_pages.shape)
        assert query_start.dtype == seq_lens_R.dtype == block_tables_RB.dtype == torch.int32
        assert q_THK.stride(2) == k_pages.stride(3) == v_pages.stride(3) == 1
        assert sinks_H is None or (sinks_H.dtype is torch.float32 and sinks_H.shape == (num_heads,))
        out_THK = torch.empty((num_tokens, num_heads, head_dim), dtype=q_THK.dtype)
        kernel(
            q_THK.data_ptr(),
            k_pages.data_ptr(),
            v_pages.data_ptr(),
            out_THK.data_ptr(),
            query_start.data_ptr(),
            seq_lens_R.data_ptr(),
            block_tables_RB.data_ptr(),
            0 if sinks_H is None else sinks_H.data_ptr(),
            seq_lens_R.shape[0],
            num_tokens,
            num_heads,
            num_kv_heads,
            head_dim,
            k_pages.shape[1],
            q_THK.stride(0),
            q_THK.stride(1),
            *k_pages.stride()[:3],
            *v_pages.stride()[:3],
            block_tables_RB.stride(0),
            scale,
            window or 0,
            soft_cap or 0.0,
            CPU_DTYPES[q_THK.dtype],
            CPU_PAGE_DTYPES[k_pages.dtype],
        )
        return out_THK

    return paged_attention


SOLUTION = Solution(
    "cpu",
    Band.PERFORMANT,
    compiled_cpu,
    build,
    batch_invariant=True,
    features=frozenset({SINKS, BF16_PAGES, INT8_PAGES}),
)
