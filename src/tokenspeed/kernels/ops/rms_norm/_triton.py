# SPDX-License-Identifier: Apache-2.0
"""Device code of rms_norm: rows of a tile are normalised together, each read once. Knows no launch shapes.

Tile names end in their dimensions: R rows of a program, D the numbers of a row.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _row_offsets(rows_R, num_inner, outer_stride, inner_stride):
    """Where rows begin in memory: 64 bit, for pools of rows past 2**31 numbers."""
    rows_R = rows_R.to(tl.int64)
    return rows_R // num_inner * outer_stride + rows_R % num_inner * inner_stride


@triton.jit(do_not_specialize=["num_rows"])
def whole_rows(
    x,
    weight,
    residual,
    out,
    num_rows,
    num_inner,
    x_outer_stride,
    x_inner_stride,
    residual_outer_stride,
    residual_inner_stride,
    eps,
    weight_offset,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
):
    """ROWS rows a program, BLOCK >= SIZE. The tile does not depend on the number of rows: neither do a row's bits."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    rows_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    places_D = tl.arange(0, BLOCK)
    mask_RD = (rows_R < num_rows)[:, None] & (places_D < SIZE)[None, :]
    from_R = _row_offsets(rows_R, num_inner, x_outer_stride, x_inner_stride)
    x_RD = tl.load(x + from_R[:, None] + places_D[None, :], mask=mask_RD, other=0.0)
    if HAS_RESIDUAL:
        at_R = _row_offsets(rows_R, num_inner, residual_outer_stride, residual_inner_stride)
        stream = residual + at_R[:, None] + places_D[None, :]
        sum_RD = x_RD.to(tl.float32) + tl.load(stream, mask=mask_RD, other=0.0).to(tl.float32)
        x_RD = sum_RD.to(x_RD.dtype)
        tl.store(stream, x_RD, mask=mask_RD)
    y_RD = x_RD.to(tl.float32)
    scale_R = tl.rsqrt(tl.sum(y_RD * y_RD, 1) / SIZE + eps)
    weight_D = tl.load(weight + places_D, mask=places_D < SIZE, other=0.0).to(tl.float32) + weight_offset
    to_R = rows_R.to(tl.int64) * SIZE
    tl.store(out + to_R[:, None] + places_D[None, :], y_RD * scale_R[:, None] * weight_D[None, :], mask=mask_RD)


@triton.jit(do_not_specialize=["num_rows"])
def long_rows(
    x,
    weight,
    residual,
    out,
    num_rows,
    num_inner,
    x_outer_stride,
    x_inner_stride,
    residual_outer_stride,
    residual_inner_stride,
    eps,
    weight_offset,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row a program, too long for registers: read BLOCK by BLOCK, once for its sum and once to be scaled."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    blocks_D = tl.arange(0, BLOCK)
    x_row = x + row // num_inner * x_outer_stride + row % num_inner * x_inner_stride
    stream = residual + row // num_inner * residual_outer_stride + row % num_inner * residual_inner_stride
    squares_D = tl.zeros([BLOCK], tl.float32)
    for start in range(0, SIZE, BLOCK):
        places_D = start + blocks_D
        y_D = tl.load(x_row + places_D, mask=places_D < SIZE, other=0.0)
        if HAS_RESIDUAL:
            sum_D = y_D.to(tl.float32) + tl.load(stream + places_D, mask=places_D < SIZE, other=0.0).to(tl.float32)
            y_D = sum_D.to(y_D.dtype)
            tl.store(stream + places_D, y_D, mask=places_D < SIZE)
        squares_D += y_D.to(tl.float32) * y_D.to(tl.float32)
    scale = tl.rsqrt(tl.sum(squares_D, 0) / SIZE + eps)
    for start in range(0, SIZE, BLOCK):
        places_D = start + blocks_D
        y_row = stream if HAS_RESIDUAL else x_row  # a thread reads back what it wrote: the blocks are the same ones
        y_D = tl.load(y_row + places_D, mask=places_D < SIZE, other=0.0).to(tl.float32)
        weight_D = tl.load(weight + places_D, mask=places_D < SIZE, other=0.0).to(tl.float32) + weight_offset
        tl.store(out + row * SIZE + places_D, y_D * scale * weight_D, mask=places_D < SIZE)
