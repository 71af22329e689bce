# SPDX-License-Identifier: Apache-2.0
"""Device code of the chain of kernels that is one decode step.

Every kernel first issues the loads that do not depend on the kernel before it (weights, old K and V), lets the next one
start, and only then waits for the one before (programmatic dependent launch, under PDL). Nothing is written before that
wait, and the first kernel of a step lets nobody start before its own wait is over: so what a step reads before a wait
was complete when the step began.

The residual stream x is float32. Whoever adds to it also writes h = x * gain of the next norm, unnormalised, and sums
of squares, a row of partial sums for each program; whoever reads h scales its products by 1 / rms in the end. A row's
sums are added in a fixed order, so equal inputs give equal bits.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tokenspeed.kernels.ops.decode_step._attention._triton import attend, product

__all__ = ["attend", "embed_rows", "gemm", "gemv"]


@triton.jit
def prefetch_l2(address, num_bytes):
    """Pull num_bytes (a multiple of 16) from each address into L2."""
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,r",
        [address.to(tl.int64), num_bytes],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def activated(gate, GELU: tl.constexpr):
    """gelu(x) in its tanh form is x * sigmoid(2 z), since (1 + tanh z) / 2 = sigmoid(2 z)."""
    if GELU:
        return gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    return gate * tl.sigmoid(gate)


@triton.jit
def embed_rows(
    token_ids_ptr, embed_ptr, gain_ptr, x_ptr, h_ptr, squares_ptr, scale, gain_offset,
    D: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program a row: x (R, D), h (R, D) and squares (1, rows)."""
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    gain = tl.load(gain_ptr + columns, mask=columns < D, other=0.0).to(tl.float32) + gain_offset
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    token = tl.load(token_ids_ptr + row)
    x = tl.load(embed_ptr + token * D + columns, mask=columns < D, other=0.0).to(tl.float32) * scale
    tl.store(x_ptr + row * D + columns, x, mask=columns < D)
    tl.store(h_ptr + row * D + columns, x * gain, mask=columns < D)
    tl.store(squares_ptr + row, tl.sum(x * x, 0))


@triton.jit
def weight_tile(w_ptr, tile, BN: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, EVICT: tl.constexpr):
    """Tile number `tile` of BN rows of weights; w_ptr: where the rows begin. Weights are read once: past L1."""
    CACHE: tl.constexpr = ".cg" if EVICT == "" else ""
    columns = tile * BK + tl.arange(0, BK)
    at = w_ptr + tl.arange(0, BN)[:, None] * K + columns[None, :]
    if K % BK == 0:
        return tl.load(at, cache_modifier=CACHE, eviction_policy=EVICT)
    return tl.load(at, mask=columns[None, :] < K, other=0.0, cache_modifier=CACHE, eviction_policy=EVICT)


@triton.jit
def row_dot(
    h_ptr, w_ptr, w0, w1, w2, w3,
    K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRELOAD: tl.constexpr, EVICT: tl.constexpr,
):  # fmt: skip
    """Products (BN,) of BN rows of weights with h; w0 ... are the tiles that are there already."""
    acc = tl.zeros([BN, BK], tl.float32)
    for tile in tl.static_range((K + BK - 1) // BK):
        at = tile * BK + tl.arange(0, BK)
        if K % BK == 0:
            h = tl.load(h_ptr + at)
        else:
            h = tl.load(h_ptr + at, mask=at < K, other=0.0)
        if tile == 0:
            w = w0
        elif tile == 1 and PRELOAD > 1:
            w = w1
        elif tile == 2 and PRELOAD > 2:
            w = w2
        elif tile == 3 and PRELOAD > 3:
            w = w3
        else:
            w = weight_tile(w_ptr, tile, BN, K, BK, EVICT)
        acc += w.to(tl.float32) * h.to(tl.float32)[None, :]
    return tl.sum(acc, 1)


@triton.jit
def first_tiles(w_ptr, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRELOAD: tl.constexpr, EVICT: tl.constexpr):
    """The first PRELOAD tiles; what is past them repeats the first."""
    w0 = weight_tile(w_ptr, 0, BN, K, BK, EVICT)
    w1, w2, w3 = w0, w0, w0
    if PRELOAD > 1:
        w1 = weight_tile(w_ptr, 1, BN, K, BK, EVICT)
    if PRELOAD > 2:
        w2 = weight_tile(w_ptr, 2, BN, K, BK, EVICT)
    if PRELOAD > 3:
        w3 = weight_tile(w_ptr, 3, BN, K, BK, EVICT)
    return w0, w1, w2, w3


@triton.jit
def gemv(
    h_ptr, squares_ptr, w_ptr, bias_ptr, y_ptr, gain_ptr, next_h_ptr, next_squares_ptr, eps, gain_offset,
    N: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRELOAD: tl.constexpr,
    NUM_SQUARES: tl.constexpr, SQUARES_BLOCK: tl.constexpr, NORM: tl.constexpr, GLU: tl.constexpr,
    RESIDUAL: tl.constexpr, BIAS: tl.constexpr, GELU: tl.constexpr, EVICT: tl.constexpr, EARLY: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """y (N,) of one row h (K,), BN outputs a program, the first PRELOAD tiles of weights loaded before the wait.

    NORM: h is unnormalised. GLU: w is (2 N, K), gate then up. RESIDUAL: y is x, and h and squares of the next norm are
    written. EARLY: the next kernel may start before this one's wait.
    """
    program = tl.program_id(0)
    outputs = program * BN + tl.arange(0, BN)
    w_ptr += program.to(tl.int64) * (BN * K)
    w0, w1, w2, w3 = first_tiles(w_ptr, K, BN, BK, PRELOAD, EVICT)
    if GLU:
        u0, u1, u2, u3 = first_tiles(w_ptr + N * K, K, BN, BK, PRELOAD, EVICT)
    sums = tl.arange(0, SQUARES_BLOCK)
    if BIAS:
        bias = tl.load(bias_ptr + outputs).to(tl.float32)
        if GLU:
            bias_up = tl.load(bias_ptr + N + outputs).to(tl.float32)
    if RESIDUAL:
        gain = tl.load(gain_ptr + outputs).to(tl.float32) + gain_offset
    if PDL:
        if EARLY:
            gdc_launch_dependents()
        gdc_wait()
        if not EARLY:
            gdc_launch_dependents()
    # Loads are issued in this order and waited for where they are used: all that a program needs, it asks for at once.
    if NORM:
        squares = tl.load(squares_ptr + sums, mask=sums < NUM_SQUARES, other=0.0)
    if RESIDUAL:
        x = tl.load(y_ptr + outputs)
    y = row_dot(h_ptr, w_ptr, w0, w1, w2, w3, K, BN, BK, PRELOAD, EVICT)
    if GLU:
        up = row_dot(h_ptr, w_ptr + N * K, u0, u1, u2, u3, K, BN, BK, PRELOAD, EVICT)
    if NORM:
        scale = tl.rsqrt(tl.sum(squares, 0) / K + eps)
        y *= scale
        if GLU:
            up *= scale
    if BIAS:
        y += bias
        if GLU:
            up += bias_up
    if GLU:
        y = activated(y, GELU) * up
    if RESIDUAL:
        y += x
        tl.store(next_h_ptr + outputs, y * gain)
        tl.store(next_squares_ptr + program, tl.sum(y * y, 0))
    tl.store(y_ptr + outputs, y)


@triton.jit
def prefetch_rows(w_ptr, BN: tl.constexpr, K: tl.constexpr, PREFETCH: tl.constexpr, THREADS: tl.constexpr):
    """Pull the first PREFETCH bytes of BN rows of 16-bit weights into L2."""
    PER_ROW: tl.constexpr = THREADS // BN
    CHUNK: tl.constexpr = PREFETCH // PER_ROW
    lane = tl.arange(0, THREADS)
    prefetch_l2(w_ptr + (lane // PER_ROW) * K + (lane % PER_ROW) * (CHUNK // 2), tl.full([THREADS], CHUNK, tl.int32))


@triton.jit
def gemm(
    h_ptr, squares_ptr, w_ptr, bias_ptr, y_ptr, gain_ptr, next_h_ptr, next_squares_ptr, parts_ptr, arrived_ptr,
    num_rows, eps, gain_offset,
    N: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLITS: tl.constexpr,
    STAGES: tl.constexpr, PREFETCH: tl.constexpr, NUM_SQUARES: tl.constexpr, SQUARES_BLOCK: tl.constexpr,
    NORM: tl.constexpr, GLU: tl.constexpr, RESIDUAL: tl.constexpr, BIAS: tl.constexpr, GELU: tl.constexpr,
    EVICT: tl.constexpr, EXACT: tl.constexpr, THREADS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y (num_rows, N) of h (ROWS, K); what lies in rows from num_rows on is multiplied and not stored. The weights are
    the tall side of the matrix instruction. SPLITS: programs that share K; the last to arrive adds up. PREFETCH: bytes
    of each weight row pulled into L2 before the wait."""
    program, split = tl.program_id(0), tl.program_id(1)
    rows, ks = tl.arange(0, ROWS), tl.arange(0, BK)
    w_ptr += program.to(tl.int64) * (BN * K) + split * (K // SPLITS)
    w_at = w_ptr + tl.arange(0, BN)[:, None] * K + ks[None, :]
    h_at = h_ptr + split * (K // SPLITS) + rows[None, :] * K + ks[:, None]
    if PREFETCH > 0:
        prefetch_rows(w_ptr, BN, K, PREFETCH, THREADS)
        if GLU:
            prefetch_rows(w_ptr + N * K, BN, K, PREFETCH, THREADS)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    acc, up = tl.zeros([BN, ROWS], tl.float32), tl.zeros([BN, ROWS], tl.float32)
    for k in tl.range(0, K // SPLITS, BK, num_stages=STAGES):
        w, h = tl.load(w_at + k, eviction_policy=EVICT), tl.load(h_at + k)
        acc = product(w, h, acc, EXACT)
        if GLU:
            up = product(tl.load(w_at + N * K + k, eviction_policy=EVICT), h, up, EXACT)
    if SPLITS == 1:
        finish_tile(
            acc, up, squares_ptr, bias_ptr, y_ptr, gain_ptr, next_h_ptr, next_squares_ptr, num_rows, eps, gain_offset,
            N, K, ROWS, BN, NUM_SQUARES, SQUARES_BLOCK, NORM, GLU, RESIDUAL, BIAS, GELU,
        )  # fmt: skip
    else:
        part_at = parts_ptr + program * (SPLITS * BN * ROWS) + tl.arange(0, BN)[:, None] * ROWS + rows[None, :]
        tl.store(part_at + split * (BN * ROWS), acc)
        tl.debug_barrier()
        if tl.atomic_add(arrived_ptr + program, 1, sem="acq_rel") == SPLITS - 1:
            acc = tl.zeros([BN, ROWS], tl.float32)
            for other in tl.static_range(SPLITS):
                acc += tl.load(part_at + other * (BN * ROWS), cache_modifier=".cg")
            tl.store(arrived_ptr + program, 0)
            finish_tile(
                acc, up, squares_ptr, bias_ptr, y_ptr, gain_ptr, next_h_ptr, next_squares_ptr, num_rows, eps,
                gain_offset, N, K, ROWS, BN, NUM_SQUARES, SQUARES_BLOCK, NORM, GLU, RESIDUAL, BIAS, GELU,
            )  # fmt: skip


@triton.jit
def finish_tile(
    acc, up, squares_ptr, bias_ptr, y_ptr, gain_ptr, next_h_ptr, next_squares_ptr, num_rows, eps, gain_offset,
    N: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, BN: tl.constexpr, NUM_SQUARES: tl.constexpr,
    SQUARES_BLOCK: tl.constexpr, NORM: tl.constexpr, GLU: tl.constexpr, RESIDUAL: tl.constexpr, BIAS: tl.constexpr,
    GELU: tl.constexpr,
):  # fmt: skip
    """What follows the products (BN, ROWS) of a program."""
    program, rows = tl.program_id(0), tl.arange(0, ROWS)
    outputs = program * BN + tl.arange(0, BN)
    if NORM:
        sums = tl.arange(0, SQUARES_BLOCK)
        squares_at = squares_ptr + sums[:, None] * ROWS + rows[None, :]
        squares = tl.sum(tl.load(squares_at, mask=sums[:, None] < NUM_SQUARES, other=0.0), 0)
        scale = tl.rsqrt(squares / K + eps)[None, :]
        acc, up = acc * scale, up * scale
    if BIAS:
        acc += tl.load(bias_ptr + outputs).to(tl.float32)[:, None]
        if GLU:
            up += tl.load(bias_ptr + N + outputs).to(tl.float32)[:, None]
    if GLU:
        acc = activated(acc, GELU) * up
    at, stored = rows[None, :] * N + outputs[:, None], (rows[None, :] < num_rows) & (outputs[:, None] >= 0)
    if RESIDUAL:
        acc += tl.load(y_ptr + at, mask=stored, other=0.0)
        gain = tl.load(gain_ptr + outputs).to(tl.float32) + gain_offset
        tl.store(next_h_ptr + at, acc * gain[:, None], mask=stored)
        tl.store(next_squares_ptr + program * ROWS + rows, tl.sum(acc * acc, 0))
    tl.store(y_ptr + at, acc, mask=stored)
