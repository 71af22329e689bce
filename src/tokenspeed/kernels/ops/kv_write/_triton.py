# SPDX-License-Identifier: Apache-2.0
"""Device code of kv_write. Knows no launch shapes. Tiles are (heads, dimensions of a head)."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _kept(x, pages):
    """x as the pages keep it. Their 8 bits know no infinity: what is beyond the largest number becomes that."""
    if pages.dtype.element_ty == tl.float8e4nv:
        wide = x.to(tl.float32)
        wide = tl.where(wide > 448.0, 448.0, tl.where(wide < -448.0, -448.0, wide))  # NaN stays
        return wide.to(tl.float8e4nv)
    else:
        return x.to(pages.dtype.element_ty)


@triton.jit
def _copy_heads(
    source,
    target,
    first_head,
    num_heads,
    source_head_stride,
    target_head_stride,
    HEAD_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    heads_H = first_head + tl.arange(0, HEADS)
    dims_K = tl.arange(0, BLOCK)
    mask_HK = (heads_H < num_heads)[:, None] & (dims_K < HEAD_DIM)[None, :]
    from_HK = source + heads_H[:, None] * source_head_stride + dims_K[None, :]
    to_HK = target + heads_H[:, None] * target_head_stride + dims_K[None, :]
    tl.store(to_HK, _kept(tl.load(from_HK, mask=mask_HK), target), mask=mask_HK)


@triton.jit
def write(
    k,
    v,
    k_pages,
    v_pages,
    slots,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    k_page_stride,
    k_slot_stride,
    k_page_head_stride,
    v_page_stride,
    v_slot_stride,
    v_page_head_stride,
    K_HEADS: tl.constexpr,
    V_HEADS: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    K_BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """HEADS heads of K and of V of one token a program. Pages lie further apart than 32 bits reach."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    first_head = tl.program_id(1) * HEADS
    slot = tl.load(slots + token)
    page, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    k_to = k_pages + page * k_page_stride + offset * k_slot_stride
    v_to = v_pages + page * v_page_stride + offset * v_slot_stride
    k_from, v_from = k + token * k_token_stride, v + token * v_token_stride
    _copy_heads(k_from, k_to, first_head, K_HEADS, k_head_stride, k_page_head_stride, K_DIM, HEADS, K_BLOCK)
    _copy_heads(v_from, v_to, first_head, V_HEADS, v_head_stride, v_page_head_stride, V_DIM, HEADS, V_BLOCK)
