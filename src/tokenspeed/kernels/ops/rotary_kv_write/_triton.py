# SPDX-License-Identifier: Apache-2.0
"""Device code of rotary_kv_write. Knows no launch shapes.

Tiles are (heads, numbers): a head is cut into the firsts and the seconds of its pairs, and the rest that does not turn.
Every number is read and written by one thread, so that changing q in place is safe.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _scaled(x_HI, weight, places_I, mask_I, scale_H, weight_offset):
    """Normalised, and rounded as a norm of its own would be. x_HI: of the dtype to round to."""
    weight_I = tl.load(weight + places_I, mask=mask_I, other=0.0).to(tl.float32) + weight_offset
    return (x_HI.to(tl.float32) * scale_H[:, None] * weight_I[None, :]).to(x_HI.dtype)


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
def _turn_heads(
    source,
    target,
    weight,
    cos_sin,
    first_head,
    source_head_stride,
    target_head_stride,
    eps,
    weight_offset,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
    REST: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_NORM: tl.constexpr,
    IN_PLACE: tl.constexpr,
):
    """PAIRS >= HALF and REST >= HEAD_DIM - 2 HALF are powers of two, or zero where there is nothing."""
    heads_H = first_head + tl.arange(0, HEADS)
    is_head_H = heads_H < NUM_HEADS
    squares_H = tl.zeros([HEADS], tl.float32)
    if PAIRS > 0:
        pairs_I = tl.arange(0, PAIRS)
        mask_I = pairs_I < HALF
        mask_HI = is_head_H[:, None] & mask_I[None, :]
        firsts_I = pairs_I * 2 if INTERLEAVED else pairs_I
        seconds_I = firsts_I + (1 if INTERLEAVED else HALF)
        from_HI = source + heads_H[:, None] * source_head_stride
        first_HI = tl.load(from_HI + firsts_I[None, :], mask=mask_HI, other=0.0)
        second_HI = tl.load(from_HI + seconds_I[None, :], mask=mask_HI, other=0.0)
        if HAS_NORM:
            squares_H += tl.sum(first_HI.to(tl.float32) * first_HI.to(tl.float32), 1)
            squares_H += tl.sum(second_HI.to(tl.float32) * second_HI.to(tl.float32), 1)
    if REST > 0:
        rest_I = 2 * HALF + tl.arange(0, REST)
        mask_rest_HI = is_head_H[:, None] & (rest_I < HEAD_DIM)[None, :]
        from_rest_HI = source + heads_H[:, None] * source_head_stride + rest_I[None, :]
        rest_HI = tl.load(from_rest_HI, mask=mask_rest_HI, other=0.0)
        if HAS_NORM:
            squares_H += tl.sum(rest_HI.to(tl.float32) * rest_HI.to(tl.float32), 1)
    scale_H = tl.rsqrt(squares_H / HEAD_DIM + eps)
    if PAIRS > 0:
        if HAS_NORM:
            first_HI = _scaled(first_HI, weight, firsts_I, mask_I, scale_H, weight_offset)
            second_HI = _scaled(second_HI, weight, seconds_I, mask_I, scale_H, weight_offset)
        cos_I = tl.load(cos_sin + pairs_I, mask=mask_I, other=0.0)
        sin_I = tl.load(cos_sin + HALF + pairs_I, mask=mask_I, other=0.0)
        one_HI, two_HI = first_HI.to(tl.float32), second_HI.to(tl.float32)
        to_HI = target + heads_H[:, None] * target_head_stride
        dtype = first_HI.dtype
        turned_HI = (one_HI * cos_I[None, :] - two_HI * sin_I[None, :]).to(dtype)
        tl.store(to_HI + firsts_I[None, :], _kept(turned_HI, target), mask=mask_HI)
        turned_HI = (two_HI * cos_I[None, :] + one_HI * sin_I[None, :]).to(dtype)
        tl.store(to_HI + seconds_I[None, :], _kept(turned_HI, target), mask=mask_HI)
    if REST > 0:
        if HAS_NORM:
            rest_HI = _scaled(rest_HI, weight, rest_I, rest_I < HEAD_DIM, scale_H, weight_offset)
        if HAS_NORM or not IN_PLACE:
            to_rest_HI = target + heads_H[:, None] * target_head_stride + rest_I[None, :]
            tl.store(to_rest_HI, _kept(rest_HI, target), mask=mask_rest_HI)


@triton.jit
def turn_and_write(
    q,
    k,
    v,
    k_pages,
    v_pages,
    slots,
    positions,
    table,
    q_norm,
    k_norm,
    q_token_stride,
    q_head_stride,
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
    table_stride,
    eps,
    weight_offset,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
    REST: tl.constexpr,
    WHOLE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    """HEADS heads of one token a program: first those of q, in place, then those of k and v, into pages, which lie
    further apart than 32 bits reach. WHOLE >= HEAD_DIM is a power of two."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    cos_sin = table
    if PAIRS > 0:
        cos_sin = table + tl.load(positions + token) * table_stride
    num_q_blocks: tl.constexpr = (Q_HEADS + HEADS - 1) // HEADS
    if block < num_q_blocks:
        q_token = q + token * q_token_stride
        _turn_heads(
            q_token, q_token, q_norm, cos_sin, block * HEADS, q_head_stride, q_head_stride, eps, weight_offset,
            Q_HEADS, HEAD_DIM, HALF, HEADS, PAIRS, REST, INTERLEAVED, HAS_NORM, True,
        )  # fmt: skip
    else:
        first_head = (block - num_q_blocks) * HEADS
        slot = tl.load(slots + token)
        page, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
        k_to = k_pages + page * k_page_stride + offset * k_slot_stride
        v_to = v_pages + page * v_page_stride + offset * v_slot_stride
        heads_H = first_head + tl.arange(0, HEADS)
        dims_K = tl.arange(0, WHOLE)
        mask_HK = (heads_H < KV_HEADS)[:, None] & (dims_K < HEAD_DIM)[None, :]
        v_from_HK = v + token * v_token_stride + heads_H[:, None] * v_head_stride + dims_K[None, :]
        v_HK = tl.load(v_from_HK, mask=mask_HK)
        _turn_heads(
            k + token * k_token_stride, k_to, k_norm, cos_sin, first_head, k_head_stride, k_page_head_stride, eps,
            weight_offset, KV_HEADS, HEAD_DIM, HALF, HEADS, PAIRS, REST, INTERLEAVED, HAS_NORM, False,
        )  # fmt: skip
        v_to_HK = v_to + heads_H[:, None] * v_page_head_stride + dims_K[None, :]
        tl.store(v_to_HK, _kept(v_HK, v_to), mask=mask_HK)
