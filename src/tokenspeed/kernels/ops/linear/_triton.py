# SPDX-License-Identifier: Apache-2.0
"""Device code of linear for few rows: the weights are streamed once and stand on the long side of the tensor cores'
product. Knows no shapes to choose tiles for.

Tile names end in their dimensions: N outputs (rows of the weights), D inputs, R rows of x.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _prefetch(weight, first, weight_stride, num_outputs, ROWS: tl.constexpr, NUM_BYTES: tl.constexpr):
    """Ask for the first bytes of the program's weights to come to the L2 cache. They do not depend on the kernel
    before, so they may come while it still runs."""
    rows_N = tl.minimum(first + tl.arange(0, ROWS), num_outputs - 1)
    addresses_N = (weight + rows_N.to(tl.int64) * weight_stride).to(tl.int64)
    num_bytes_N = tl.full([ROWS], NUM_BYTES, tl.int32)
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,r",
        [addresses_N, num_bytes_N],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _sum_of_splits(acc_NR, partials, arrivals, tile, split, num_splits, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr):
    """(whether this program was the tile's last to arrive, the sum of all in the order of the splits if so)."""
    at_NR = tl.arange(0, BLOCK_N)[:, None] * BLOCK_R + tl.arange(0, BLOCK_R)[None, :]
    parts = partials + tile.to(tl.int64) * num_splits * (BLOCK_N * BLOCK_R)
    tl.store(parts + split * (BLOCK_N * BLOCK_R) + at_NR, acc_NR)
    tl.debug_barrier()  # all threads' parts are written before one of them says so
    is_last = tl.atomic_add(arrivals + tile, 1, sem="acq_rel") == num_splits - 1
    if is_last:
        acc_NR = tl.zeros([BLOCK_N, BLOCK_R], tl.float32)
        for other in range(num_splits):
            acc_NR += tl.load(parts + other * (BLOCK_N * BLOCK_R) + at_NR, cache_modifier=".cg")
        tl.store(arrivals + tile, 0)
    return is_last, acc_NR


@triton.jit
def _tile_of(program):
    """(tile of outputs, tile of rows): eight tiles of rows share the weights that one after another reads."""
    num_tiles_n, num_tiles_r = tl.num_programs(0), tl.num_programs(1)
    first_r = program // (8 * num_tiles_n) * 8
    together = tl.minimum(num_tiles_r - first_r, 8)
    place = program - first_r * num_tiles_n
    return place // together, first_r + place % together


@triton.jit
def _part_of_product(
    weight_N, x_R, part, blocks, num_inputs,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr, STAGES: tl.constexpr, EVEN: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    """Over so many blocks of inputs, the part's."""
    start, stop = part * blocks * BLOCK_D, tl.minimum((part + 1) * blocks * BLOCK_D, num_inputs)
    inputs_D = tl.arange(0, BLOCK_D)
    acc_NR = tl.zeros([BLOCK_N, BLOCK_R], tl.float32)
    for place in tl.range(start, stop, BLOCK_D, num_stages=STAGES):
        places_D = place + inputs_D
        if EVEN:
            weight_ND = tl.load(weight_N[:, None] + places_D[None, :])
            x_DR = tl.load(x_R[None, :] + places_D[:, None])
        else:
            weight_ND = tl.load(weight_N[:, None] + places_D[None, :], mask=places_D[None, :] < stop, other=0.0)
            x_DR = tl.load(x_R[None, :] + places_D[:, None], mask=places_D[:, None] < stop, other=0.0)
        if WIDEN:
            weight_ND, x_DR = weight_ND.to(tl.float32), x_DR.to(tl.float32)
        acc_NR = tl.dot(weight_ND, x_DR, acc_NR, input_precision="ieee")
    return acc_NR


@triton.jit(do_not_specialize=["num_rows", "num_splits"])
def few_rows(
    x,
    weight,
    bias,
    out,
    partials,
    arrivals,
    num_rows,
    num_outputs,
    num_inputs,
    x_stride,
    weight_stride,
    num_splits,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    STAGES: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN: tl.constexpr,
    PREFETCH: tl.constexpr,
    WIDEN: tl.constexpr,
    FOLD: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program: BLOCK_N outputs of BLOCK_R rows over one of num_splits parts of the inputs.

    EVEN: the inputs are whole blocks. WIDEN: multiply in float32, for the interpreter, which has no product of shorter
    numbers. FOLD: a program takes all parts itself, one after the other, and adds them up as programs do that share
    them. partials: float32, a tile for each program. arrivals: int32 zeros, one a tile, zeros again afterwards."""
    tile_n, tile_r = _tile_of(tl.program_id(1) * tl.num_programs(0) + tl.program_id(0))
    split = tl.program_id(2)
    blocks = tl.cdiv(tl.cdiv(num_inputs, BLOCK_D), num_splits)
    if PREFETCH > 0:
        _prefetch(weight + split * blocks * BLOCK_D, tile_n * BLOCK_N, weight_stride, num_outputs, BLOCK_N, PREFETCH)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    outputs_N = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    rows_R = tile_r * BLOCK_R + tl.arange(0, BLOCK_R)
    # Outputs and rows past the end read the last one again: only what is stored needs a mask.
    weight_N = weight + tl.minimum(outputs_N, num_outputs - 1).to(tl.int64) * weight_stride
    x_R = x + tl.minimum(rows_R, num_rows - 1).to(tl.int64) * x_stride
    if FOLD:
        acc_NR = tl.zeros([BLOCK_N, BLOCK_R], tl.float32)
        for part in range(num_splits):
            acc_NR += _part_of_product(
                weight_N, x_R, part, blocks, num_inputs, BLOCK_N, BLOCK_D, BLOCK_R, STAGES, EVEN, WIDEN
            )
    else:
        acc_NR = _part_of_product(
            weight_N, x_R, split, blocks, num_inputs, BLOCK_N, BLOCK_D, BLOCK_R, STAGES, EVEN, WIDEN
        )
    is_last = True
    if IS_SPLIT:
        tile = tile_r * tl.num_programs(0) + tile_n
        is_last, acc_NR = _sum_of_splits(acc_NR, partials, arrivals, tile, split, num_splits, BLOCK_N, BLOCK_R)
    if is_last:
        if HAS_BIAS:
            bias_N = tl.load(bias + outputs_N, mask=outputs_N < num_outputs, other=0.0).to(tl.float32)
            acc_NR += bias_N[:, None]
        at_NR = rows_R[None, :].to(tl.int64) * num_outputs + outputs_N[:, None]
        tl.store(out + at_NR, acc_NR, mask=(outputs_N < num_outputs)[:, None] & (rows_R < num_rows)[None, :])


@triton.jit(do_not_specialize=["num_outputs"])
def one_row(
    x,
    weight,
    bias,
    out,
    num_outputs,
    weight_stride,
    NUM_INPUTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK_N outputs of one row a program, by sums of products rather than tensor cores. The program's first weights
    are on their way to registers before the kernel that makes x has ended."""
    outputs_N = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inputs_D = tl.arange(0, BLOCK_D)
    # Outputs past the end read the last one again: only what is stored needs a mask.
    weight_N = weight + tl.minimum(outputs_N, num_outputs - 1).to(tl.int64) * weight_stride
    mask_D = inputs_D < NUM_INPUTS
    if NUM_INPUTS % BLOCK_D == 0:
        first_ND = tl.load(weight_N[:, None] + inputs_D[None, :])
    else:
        first_ND = tl.load(weight_N[:, None] + inputs_D[None, :], mask=mask_D[None, :], other=0.0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    x_D = tl.load(x + inputs_D, mask=mask_D, other=0.0).to(tl.float32)
    acc_ND = first_ND.to(tl.float32) * x_D[None, :]
    for start in tl.static_range(BLOCK_D, NUM_INPUTS, BLOCK_D):
        places_D = start + inputs_D
        mask_D = places_D < NUM_INPUTS
        if NUM_INPUTS % BLOCK_D == 0:
            weight_ND = tl.load(weight_N[:, None] + places_D[None, :])
        else:
            weight_ND = tl.load(weight_N[:, None] + places_D[None, :], mask=mask_D[None, :], other=0.0)
        x_D = tl.load(x + places_D, mask=mask_D, other=0.0).to(tl.float32)
        acc_ND += weight_ND.to(tl.float32) * x_D[None, :]
    sum_N = tl.sum(acc_ND, 1)
    mask_N = outputs_N < num_outputs
    if HAS_BIAS:
        sum_N += tl.load(bias + outputs_N, mask=mask_N, other=0.0).to(tl.float32)
    tl.store(out + outputs_N, sum_N, mask=mask_N)
