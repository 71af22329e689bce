# SPDX-License-Identifier: Apache-2.0
"""The oracle, in torch."""

from __future__ import annotations

import torch

from tokenspeed.kernels.kv_pages import to_codes
from tokenspeed.kernels.ops.rotary_kv_write import BF16_PAGES, FP8_PAGES, INT8_PAGES
from tokenspeed.kernels.registry import Band, Ok, Solution

FP8_MAX = torch.finfo(torch.float8_e4m3fn).max


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
    if q_norm_K is not None and k_norm_K is not None:
        q_THK = _normalised(q_THK, q_norm_K.float() + weight_offset, eps)
        k_TGK = _normalised(k_TGK, k_norm_K.float() + weight_offset, eps)
    if table_PR is not None:
        cos_sin_TR = table_PR[positions_T]
        q_THK, k_TGK = _turned(q_THK, cos_sin_TR, interleaved), _turned(k_TGK, cos_sin_TR, interleaved)
    block_size = k_pages.shape[1]
    pages_T, offsets_T = slots_T // block_size, slots_T % block_size
    for pages, x_TGK in ((k_pages, k_TGK), (v_pages, v_TGK)):
        if pages.dtype is torch.float8_e4m3fn:
            pages.view(torch.uint8)[pages_T, offsets_T] = _as_fp8(x_TGK).view(torch.uint8)
        else:
            kept = to_codes(x_TGK) if pages.dtype is torch.int8 else x_TGK.to(pages.dtype)
            pages[pages_T, offsets_T] = kept
    return q_THK


def _normalised(x_THK: torch.Tensor, scale_K: torch.Tensor, eps: float) -> torch.Tensor:
    y_THK = x_THK.float()
    return (y_THK * torch.rsqrt(y_THK.square().mean(-1, keepdim=True) + eps) * scale_K).to(x_THK.dtype)


def _turned(x_THK: torch.Tensor, cos_sin_TR: torch.Tensor, interleaved: bool) -> torch.Tensor:
    cos, sin = cos_sin_TR.unsqueeze(1).chunk(2, dim=-1)
    rotary_dim = cos_sin_TR.shape[1]
    half = rotary_dim // 2
    firsts, seconds = (
        (slice(0, rotary_dim, 2), slice(1, rotary_dim, 2)) if interleaved else (slice(0, half), slice(half, rotary_dim))
    )
    first, second = x_THK[..., firsts].float(), x_THK[..., seconds].float()
    turned_THK = x_THK.clone()
    turned_THK[..., firsts], turned_THK[..., seconds] = first * cos - second * sin, second * cos + first * sin
    return turned_THK


def _as_fp8(x_TGK: torch.Tensor) -> torch.Tensor:
    return x_TGK.float().clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)


SOLUTION = Solution(
    "reference",
    Band.REFERENCE,
    lambda _ctx: Ok(),
    lambda _ctx: rotary_kv_write,
    batch_invariant=True,
    features=frozenset({BF16_PAGES, FP8_PAGES, INT8_PAGES}),
)
