# SPDX-License-Identifier: Apache-2.0
"""Device code of rotary. Knows no launch shapes. Tiles are (heads, pairs of dimensions that turn together)."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _turn_heads(
    x,
    first_head,
    head_stride,
    cos_I,
    sin_I,
    NUM_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Both numbers of a pair are read and written by one thread, so that turning in place is safe."""
    heads_H = first_head + tl.arange(0, HEADS)
    pairs_I = tl.arange(0, PAIRS)
    mask_HI = (heads_H < NUM_HEADS)[:, None] & (pairs_I < HALF)[None, :]
    firsts_I = pairs_I * 2 if INTERLEAVED else pairs_I
    first = x + heads_H[:, None] * head_stride + firsts_I[None, :]
    second = first + (1 if INTERLEAVED else HALF)
    first_HI = tl.load(first, mask=mask_HI, other=0.0).to(tl.float32)
    second_HI = tl.load(second, mask=mask_HI, other=0.0).to(tl.float32)
    tl.store(first, first_HI * cos_I[None, :] - second_HI * sin_I[None, :], mask=mask_HI)
    tl.store(second, second_HI * cos_I[None, :] + first_HI * sin_I[None, :], mask=mask_HI)


@triton.jit
def turn(
    q,
    k,
    positions,
    table,
    q_token_stride,
    q_head_stride,
    k_token_stride,
    k_head_stride,
    table_stride,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PDL: tl.constexpr,
):
    """HEADS heads of one token a program: first those of q, then those of k."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    pairs_I = tl.arange(0, PAIRS)
    row = table + tl.load(positions + token) * table_stride + pairs_I
    cos_I = tl.load(row, mask=pairs_I < HALF, other=0.0)
    sin_I = tl.load(row + HALF, mask=pairs_I < HALF, other=0.0)
    num_q_blocks: tl.constexpr = (Q_HEADS + HEADS - 1) // HEADS
    if block < num_q_blocks:
        q_token, q_head = q + token * q_token_stride, block * HEADS
        _turn_heads(q_token, q_head, q_head_stride, cos_I, sin_I, Q_HEADS, HALF, HEADS, PAIRS, INTERLEAVED)
    else:
        k_token, k_head = k + token * k_token_stride, (block - num_q_blocks) * HEADS
        _turn_heads(k_token, k_head, k_head_stride, cos_I, sin_I, K_HEADS, HALF, HEADS, PAIRS, INTERLEAVED)
