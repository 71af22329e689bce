# SPDX-License-Identifier: Apache-2.0
"""One launch in Triton: a program turns some heads of one token."""

from __future__ import annotations

import torch

from tokenspeed.kernels.platform import has_dependent_launch, triton_on_cuda
from tokenspeed.kernels.registry import Band, Kernel, KernelContext, Solution

FEW_TOKENS = 64
"""Up to so many tokens, small programs: there are processors for all of them."""


def build(ctx: KernelContext) -> Kernel:
    from tokenspeed.kernels.ops.rotary import _triton

    pdl = has_dependent_launch(ctx.device)
    launch = {"launch_pdl": True} if pdl else {}

    def rotary(
        q_THK: torch.Tensor,
        k_TGK: torch.Tensor,
        positions_T: torch.Tensor,
        table_PR: torch.Tensor,
        interleaved: bool = False,
    ) -> None:
        assert table_PR.dtype is torch.float32, table_PR.dtype
        assert table_PR.stride(1) == 1, table_PR.stride()
        assert positions_T.dtype is torch.int64, positions_T.dtype
        assert q_THK.stride(2) == k_TGK.stride(2) == 1, (q_THK.stride(), k_TGK.stride())
        num_tokens, q_heads, _ = q_THK.shape
        k_heads = k_TGK.shape[1]
        if num_tokens == 0:
            return
        half = table_PR.shape[1] // 2
        pairs = 1 << (half - 1).bit_length()
        heads = max(1, (128 if num_tokens <= FEW_TOKENS else 1024) // pairs)
        heads = min(heads, 1 << (max(q_heads, k_heads) - 1).bit_length())
        _triton.turn[(num_tokens, -(-q_heads // heads) - (-k_heads // heads))](
            q_THK,
            k_TGK,
            positions_T,
            table_PR,
            *q_THK.stride()[:2],
            *k_TGK.stride()[:2],
            table_PR.stride(0),
            Q_HEADS=q_heads,
            K_HEADS=k_heads,
            HALF=half,
            HEADS=heads,
            PAIRS=pairs,
            INTERLEAVED=interleaved,
            PDL=pdl,
            num_warps=1 if num_tokens <= FEW_TOKENS else 4,
            **launch,
        )

    return rotary


SOLUTION = Solution("triton", Band.PERFORMANT, triton_on_cuda, build, graph_safe=True, batch_invariant=True)
