# SPDX-License-Identifier: Apache-2.0
"""One launch in Triton: a program has some heads of one token. q is changed in place."""

from __future__ import annotations

import torch

from tokenspeed.kernels.ops.rotary_kv_write import FP8_PAGES
from tokenspeed.kernels.platform import has_dependent_launch, triton_on_cuda
from tokenspeed.kernels.registry import Band, Kernel, KernelContext, Solution

HEADS_MAX = 8
"""Of a program. Not more for many tokens: the order in which a head is summed must not depend on their number."""


def build(ctx: KernelContext) -> Kernel:
    from tokenspeed.kernels.ops.rotary_kv_write import _triton

    pdl = has_dependent_launch(ctx.device)
    launch = {"launch_pdl": True} if pdl else {}

    def rotary_kv_write(
        q_THK: torch.Tensor,
        k_TGK: torch.Tensor,
        v_TGK: torch.Tensor,
        k_pages: torch.Tensor,
        v_pages: torch.Tensor,
        *,
        slots_T: torch.Tensor,
        positions_T: torch.Tensor,
        table_PR: torch.Tensor | None,
        interleaved: bool = False,
        q_norm_K: torch.Tensor | None = None,
        k_norm_K: torch.Tensor | None = None,
        eps: float = 0.0,
        weight_offset: float = 0.0,
    ) -> torch.Tensor:
        num_tokens, q_heads, head_dim = q_THK.shape
        kv_heads, rotary_dim = k_TGK.shape[1], 0 if table_PR is None else table_PR.shape[1]
        _check(q_THK, k_TGK, v_TGK, k_pages, v_pages)
        assert slots_T.dtype is positions_T.dtype is torch.int64, (slots_T.dtype, positions_T.dtype)
        assert table_PR is None or (table_PR.dtype is torch.float32 and table_PR.stride(1) == 1), table_PR
        assert (q_norm_K is None) == (k_norm_K is None), "a norm for one of q and k"
        if num_tokens == 0:
            return q_THK
        heads = min(HEADS_MAX, _power(max(q_heads, kv_heads)))
        _triton.turn_and_write[(num_tokens, -(-q_heads // heads) - (-kv_heads // heads))](
            q_THK,
            k_TGK,
            v_TGK,
            k_pages,
            v_pages,
            slots_T,
            positions_T,
            q_THK if table_PR is None else table_PR,
            q_THK if q_norm_K is None else q_norm_K,
            k_TGK if k_norm_K is None else k_norm_K,
            *q_THK.stride()[:2],
            *k_TGK.stride()[:2],
            *v_TGK.stride()[:2],
            *k_pages.stride()[:3],
            *v_pages.stride()[:3],
            0 if table_PR is None else table_PR.stride(0),
            eps,
            weight_offset,
            Q_HEADS=q_heads,
            KV_HEADS=kv_heads,
            HEAD_DIM=head_dim,
            HALF=rotary_dim // 2,
            BLOCK_SIZE=k_pages.shape[1],
            HEADS=heads,
            PAIRS=_power(rotary_dim // 2),
            REST=_power(head_dim - rotary_dim),
            WHOLE=_power(head_dim),
            INTERLEAVED=interleaved,
            HAS_NORM=q_norm_K is not None,
            PDL=pdl,
            num_warps=max(1, min(4, heads * _power(head_dim) // 256)),
            **launch,
        )
        return q_THK

    return rotary_kv_write


def _check(
    q_THK: torch.Tensor, k_TGK: torch.Tensor, v_TGK: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor
) -> None:
    assert k_TGK.shape == v_TGK.shape, (k_TGK.shape, v_TGK.shape)
    assert k_TGK.shape[1:] == k_pages.shape[2:] == v_pages.shape[2:], (k_TGK.shape, k_pages.shape, v_pages.shape)
    assert q_THK.shape[2] == k_TGK.shape[2], (q_THK.shape, k_TGK.shape)
    for tensor in (q_THK, k_TGK, v_TGK, k_pages, v_pages):
        assert tensor.stride(-1) == 1, tensor.stride()


def _power(number: int) -> int:
    """The power of two that is not below it, zero for zero."""
    return 0 if number == 0 else 1 << (number - 1).bit_length()


SOLUTION = Solution(
    "triton",
    Band.PERFORMANT,
    triton_on_cuda,
    build,
    graph_safe=True,
    batch_invariant=True,
    features=frozenset({FP8_PAGES}),
)
