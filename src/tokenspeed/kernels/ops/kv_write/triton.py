# SPDX-License-Identifier: Apache-2.0
"""One launch in Triton: a program copies some heads of one token."""

from __future__ import annotations

import torch

from tokenspeed.kernels.ops.kv_write import FP8_PAGES
from tokenspeed.kernels.platform import has_dependent_launch, triton_on_cuda
from tokenspeed.kernels.registry import Band, Kernel, KernelContext, Solution

TILE = 1024


def build(ctx: KernelContext) -> Kernel:
    from tokenspeed.kernels.ops.kv_write import _triton

    pdl = has_dependent_launch(ctx.device)
    launch = {"launch_pdl": True} if pdl else {}

    def kv_write(
        k_TGK: torch.Tensor, v_TGK: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, slots_T: torch.Tensor
    ) -> None:
        assert slots_T.dtype is torch.int64, slots_T.dtype
        for source, pages in ((k_TGK, k_pages), (v_TGK, v_pages)):
            assert source.shape[1:] == pages.shape[2:], (source.shape, pages.shape)
            assert source.shape[2] == 1 or source.stride(2) == pages.stride(3) == 1, (source.stride(), pages.stride())
        num_tokens, k_heads, k_dim = k_TGK.shape
        _, v_heads, v_dim = v_TGK.shape
        if num_tokens == 0:
            return
        k_block, v_block = _power(k_dim), _power(v_dim)
        num_heads = max(k_heads, v_heads)
        heads = min(_power(num_heads), max(1, TILE // max(k_block, v_block)))
        _triton.write[(num_tokens, -(-num_heads // heads))](
            k_TGK,
            v_TGK,
            k_pages,
            v_pages,
            slots_T,
            *k_TGK.stride()[:2],
            *v_TGK.stride()[:2],
            *k_pages.stride()[:3],
            *v_pages.stride()[:3],
            K_HEADS=k_heads,
            V_HEADS=v_heads,
            K_DIM=k_dim,
            V_DIM=v_dim,
            BLOCK_SIZE=k_pages.shape[1],
            HEADS=heads,
            K_BLOCK=k_block,
            V_BLOCK=v_block,
            PDL=pdl,
            num_warps=4 if heads * k_block >= 512 else 1,
            **launch,
        )

    return kv_write


def _power(number: int) -> int:
    """The power of two that is not below it."""
    return 1 << (number - 1).bit_length()


SOLUTION = Solution(
    "triton",
    Band.PERFORMANT,
    triton_on_cuda,
    build,
    graph_safe=True,
    batch_invariant=True,
    features=frozenset({FP8_PAGES}),
)
