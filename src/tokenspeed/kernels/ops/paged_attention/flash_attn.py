# SPDX-License-Identifier: Apache-2.0
"""Long rows by FlashAttention-4, an optional library.

It takes pages of any size and strides, and finds them and the rows' lengths on the device. It compiles at the first
call of each head size and kind of score.
"""

from __future__ import annotations

import torch

from tokenspeed.kernels.ops.paged_attention import SINKS, _library
from tokenspeed.kernels.ops.paged_attention._library import Rows
from tokenspeed.kernels.registry import Band, Kernel, KernelContext, Solution, Support

VERSION = "4.0.0b36"
"""A pre-release: the interface of the next may differ."""
HEAD_DIMS = (64, 96, 128, 256)


def supports(ctx: KernelContext) -> Support:
    return _library.supports(ctx, "flash-attn-4", VERSION, "flash-attn")


def build(ctx: KernelContext) -> Kernel:
    from flash_attn.cute import flash_attn_varlen_func

    def attend(rows: Rows) -> torch.Tensor:
        query_lens_R = rows.query_start.diff()
        out_THK, _ = flash_attn_varlen_func(
            rows.q_THK,
            rows.k_pages,
            rows.v_pages,
            cu_seqlens_q=rows.query_start,
            seqused_q=torch.threshold(query_lens_R, rows.few, 0),  # others would each keep a multiprocessor for long
            seqused_k=rows.seq_lens_R,
            page_table=rows.block_tables_RB,
            softmax_scale=rows.scale,
            causal=True,  # aligned to a row's end
            learnable_sink=rows.sinks_H,
            softcap=rows.soft_cap or 0.0,
        )
        assert isinstance(out_THK, torch.Tensor)
        return out_THK

    return _library.attention(ctx, takes, attend)


def takes(rows: Rows) -> bool:
    return rows.q_THK.shape[2] in HEAD_DIMS


# Below ours, bound until this is measured faster. Not captured until a captured launch was held to the oracle.
SOLUTION = Solution("flash_attn", Band.PORTABLE, supports, build, features=frozenset({SINKS}))
