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
def product(a, b, acc, EXACT: tl.constexpr):
    """acc + a b; EXACT: of float32."""
    if EXACT:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    return tl.dot(a, b, acc)


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


@triton.jit
def turned(
    x_ptr, at, gain_ptr, cos, sin, dims, partners, valid, eps, gain_offset,
    HEAD_DIM: tl.constexpr, QK_NORM: tl.constexpr,
):  # fmt: skip
    """Heads at x_ptr + at (heads, 1), normalised and turned, in float32. The other part of a dimension's pair is read
    again rather than exchanged between threads. sin carries the sign."""
    x = tl.load(x_ptr + at + dims[None, :], mask=valid, other=0.0)
    partner = tl.load(x_ptr + at + partners[None, :], mask=valid, other=0.0)
    if QK_NORM:
        scale = tl.rsqrt(tl.sum(x * x, 1) / HEAD_DIM + eps)[:, None]
        x *= scale * (tl.load(gain_ptr + dims).to(tl.float32) + gain_offset)[None, :]
        partner *= scale * (tl.load(gain_ptr + partners).to(tl.float32) + gain_offset)[None, :]
    return x * cos[None, :] + partner * sin[None, :]


@triton.jit
def rotation(table_ptr, position, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Of each dimension: the other one of its pair, the cosine, and the sine with its sign."""
    dims = tl.arange(0, HEAD_DIM)
    HALF: tl.constexpr = ROTARY_DIM // 2
    if INTERLEAVED:
        is_first, partners, angle = dims % 2 == 0, dims ^ 1, dims // 2
    else:
        is_first = dims < HALF
        partners, angle = tl.where(is_first, dims + HALF, dims - HALF), tl.where(is_first, dims, dims - HALF)
    turns = dims < ROTARY_DIM
    at = table_ptr + position * ROTARY_DIM + angle
    cos = tl.load(at, mask=turns, other=1.0)
    sin = tl.load(at + HALF, mask=turns, other=0.0)
    return tl.where(turns, partners, dims), cos, tl.where(is_first, -sin, sin)


@triton.jit
def load_tile(
    k_pages_ptr, v_pages_ptr, table_ptr, tile, position, lowest, page_stride, token_stride,
    HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """K and V (TILE, K) of a tile, and which of its tokens are attended. MASKED: not all are; what lies in the others'
    places may be NaN, and is not loaded."""
    in_tile, dims = tl.arange(0, TILE), tl.arange(0, HEAD_DIM)
    tokens = tile * TILE + in_tile
    seen = (tokens >= lowest) & (tokens < position)
    if BLOCK_SIZE % TILE == 0:
        page = tl.load(table_ptr + (tile * TILE) // BLOCK_SIZE).to(tl.int64)
        begin = page * page_stride + ((tile * TILE) % BLOCK_SIZE) * token_stride
        k_at = k_pages_ptr + begin + (in_tile[:, None] * token_stride + dims[None, :])
        v_at = v_pages_ptr + begin + (in_tile[:, None] * token_stride + dims[None, :])
    else:
        pages = tl.load(table_ptr + tokens // BLOCK_SIZE, mask=tokens < position, other=0).to(tl.int64)
        begins = pages * page_stride + (tokens % BLOCK_SIZE) * token_stride
        k_at = k_pages_ptr + begins[:, None] + dims[None, :]
        v_at = v_pages_ptr + begins[:, None] + dims[None, :]
    if MASKED:
        return tl.load(k_at, mask=seen[:, None], other=0.0), tl.load(v_at, mask=seen[:, None], other=0.0), seen
    return tl.load(k_at), tl.load(v_at), seen


@triton.jit
def softmax_step(q, k, v, seen, highest, total, acc, MASKED: tl.constexpr, EXACT: tl.constexpr):
    """One tile of a running softmax, scores in base 2."""
    scores = product(q, tl.trans(k), tl.zeros([q.shape[0], k.shape[0]], tl.float32), EXACT)
    if MASKED:
        scores = tl.where(seen[None, :], scores, -1e30)
    higher = tl.maximum(highest, tl.max(scores, 1))
    weights = tl.exp2(scores - higher[:, None])
    if MASKED:
        weights = tl.where(seen[None, :], weights, 0.0)
    shrink = tl.exp2(highest - higher)
    acc = product(weights.to(v.dtype), v, acc * shrink[:, None], EXACT)
    return higher, total * shrink + tl.sum(weights, 1), acc


@triton.jit
def attend_tile(
    q, k_pages_ptr, v_pages_ptr, table_ptr, tile, position, lowest, page_stride, token_stride, highest, total, acc,
    HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Load a tile and take it into the softmax."""
    k, v, seen = load_tile(
        k_pages_ptr, v_pages_ptr, table_ptr, tile, position, lowest, page_stride, token_stride,
        HEAD_DIM, BLOCK_SIZE, TILE, MASKED,
    )  # fmt: skip
    return softmax_step(q, k, v, seen, highest, total, acc, MASKED, EXACT)


@triton.jit
def merge(parts_ptr, stats_ptr, out_ptr, used, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, SPLITS_BLOCK: tl.constexpr):
    """Join the parts of `used` splits, as many heads at a time as fit into registers: a pass takes about 2 us."""
    if SPLITS_BLOCK <= 16:
        merge_heads(parts_ptr, stats_ptr, out_ptr, used, GROUP, HEAD_DIM, SPLITS_BLOCK)
    elif used <= 16:
        merge_heads(parts_ptr, stats_ptr, out_ptr, used, GROUP, HEAD_DIM, 16)
    else:
        merge_heads(parts_ptr, stats_ptr, out_ptr, used, GROUP, HEAD_DIM, SPLITS_BLOCK)


@triton.jit
def merge_heads(
    parts_ptr, stats_ptr, out_ptr, used, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, SPLITS_BLOCK: tl.constexpr
):
    FIT: tl.constexpr = 8192 // (SPLITS_BLOCK * HEAD_DIM)
    HEADS_BLOCK: tl.constexpr = 1 if FIT < 1 else (4 if FIT > 4 else FIT)
    splits, dims = tl.arange(0, SPLITS_BLOCK), tl.arange(0, HEAD_DIM)
    for first in tl.static_range(0, GROUP, HEADS_BLOCK):
        heads = first + tl.arange(0, HEADS_BLOCK)
        valid = (splits < used)[:, None] & (heads < GROUP)[None, :]
        at = splits[:, None] * (2 * GROUP) + heads[None, :]
        highest = tl.load(stats_ptr + at, mask=valid, other=-1e30, cache_modifier=".cg")
        total = tl.load(stats_ptr + GROUP + at, mask=valid, other=0.0, cache_modifier=".cg")
        part_at = (splits[:, None] * GROUP + heads[None, :])[:, :, None] * HEAD_DIM + dims[None, None, :]
        parts = tl.load(parts_ptr + part_at, mask=valid[:, :, None], other=0.0, cache_modifier=".cg")
        weights = tl.exp2(highest - tl.max(highest, 0)[None, :])
        joined = tl.sum(parts * weights[:, :, None], 0) / tl.maximum(tl.sum(weights * total, 0), 1e-30)[:, None]
        tl.store(out_ptr + heads[:, None] * HEAD_DIM + dims[None, :], joined, mask=(heads < GROUP)[:, None])


@triton.jit
def split_range(position, window, split, TILE: tl.constexpr, SPLITS: tl.constexpr, MIN_TILES: tl.constexpr):
    """(first tile, tile after the last, splits in use, first position that is attended) for the old tokens."""
    lowest = tl.maximum(position - window + 1, 0)
    first = lowest // TILE
    num_tiles = tl.cdiv(position, TILE) - first
    each = tl.maximum(tl.cdiv(num_tiles, SPLITS), MIN_TILES)
    used = tl.maximum(tl.cdiv(num_tiles, each), 1)
    begin = first + split * each
    return begin, tl.minimum(begin + each, first + num_tiles), used, lowest


@triton.jit
def attend(
    qkv_ptr, q_gain_ptr, k_gain_ptr, rotary_ptr, k_pages_ptr, v_pages_ptr, tables_ptr, positions_ptr, out_ptr,
    parts_ptr, stats_ptr, arrived_ptr, scale, eps, gain_offset, window, table_stride, page_stride, token_stride,
    head_stride,
    H: tl.constexpr, G: tl.constexpr, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, INTERLEAVED: tl.constexpr,
    QK_NORM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr,
    SPLITS_BLOCK: tl.constexpr, MIN_TILES: tl.constexpr, STAGES: tl.constexpr, FIRST: tl.constexpr,
    EXACT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """q and k of one token normalised and turned, K and V written, and attention over the row's pages by SPLITS
    programs of a (row, K/V head), of which those take part that have tiles; the last to arrive joins their parts.
    FIRST: a program's first tile is loaded before the wait. scale: of scores in base 2."""
    row, kv_head, split = tl.program_id(0) // G, tl.program_id(0) % G, tl.program_id(1)
    position = tl.load(positions_ptr + row).to(tl.int32)
    begin, end, used, lowest = split_range(position, window, split, TILE, SPLITS, MIN_TILES)
    if split < used:
        total, acc, highest = attend_split(
            qkv_ptr + row * ((H + 2 * G) * HEAD_DIM), q_gain_ptr, k_gain_ptr, rotary_ptr,
            k_pages_ptr + kv_head * head_stride, v_pages_ptr + kv_head * head_stride, tables_ptr + row * table_stride,
            scale, eps, gain_offset, page_stride, token_stride, position, begin, end, lowest, kv_head, split,
            H, G, HEAD_DIM, ROTARY_DIM, INTERLEAVED, QK_NORM, BLOCK_SIZE, TILE, STAGES, FIRST, EXACT, PDL,
        )  # fmt: skip
        GROUP: tl.constexpr = H // G
        heads, dims = tl.arange(0, 16), tl.arange(0, HEAD_DIM)
        at, valid = heads[:, None] * HEAD_DIM + dims[None, :], (heads < GROUP)[:, None]
        out_ptr += (row * H + kv_head * GROUP) * HEAD_DIM
        if used == 1:
            tl.store(out_ptr + at, acc / total[:, None], mask=valid)
        else:
            parts_ptr += tl.program_id(0) * (SPLITS * GROUP * HEAD_DIM)
            stats_ptr += tl.program_id(0) * (SPLITS * 2 * GROUP)
            tl.store(parts_ptr + split * (GROUP * HEAD_DIM) + at, acc, mask=valid)
            tl.store(stats_ptr + split * (2 * GROUP) + heads, highest, mask=heads < GROUP)
            tl.store(stats_ptr + split * (2 * GROUP) + GROUP + heads, total, mask=heads < GROUP)
            tl.debug_barrier()
            if tl.atomic_add(arrived_ptr + tl.program_id(0), 1, sem="acq_rel") == used - 1:
                merge(parts_ptr, stats_ptr, out_ptr, used, GROUP, HEAD_DIM, SPLITS_BLOCK)
                tl.store(arrived_ptr + tl.program_id(0), 0)


@triton.jit
def attend_split(
    qkv_ptr, q_gain_ptr, k_gain_ptr, rotary_ptr, k_pages_ptr, v_pages_ptr, table_ptr,
    scale, eps, gain_offset, page_stride, token_stride, position, begin, end, lowest, kv_head, split,
    H: tl.constexpr, G: tl.constexpr, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, INTERLEAVED: tl.constexpr,
    QK_NORM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr, FIRST: tl.constexpr,
    EXACT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program's part: (sum of weights, weighted values, highest score), with the new token in split 0, which also
    writes its K and V. Pointers are to the row's token and table and to the head's pages."""
    GROUP: tl.constexpr = H // G
    dims, heads = tl.arange(0, HEAD_DIM), tl.arange(0, 16)
    if FIRST:
        # A split without a tile loads none, and looks up the page of the last block that there is.
        k_first, v_first, first_seen = load_tile(
            k_pages_ptr, v_pages_ptr, table_ptr, tl.minimum(begin, position // TILE), tl.where(begin < end, position, 0),
            lowest, page_stride, token_stride, HEAD_DIM, BLOCK_SIZE, TILE, True,
        )  # fmt: skip
    new_page = tl.load(table_ptr + position // BLOCK_SIZE).to(tl.int64)
    partners, cos, sin = dims, tl.full([HEAD_DIM], 1.0, tl.float32), tl.full([HEAD_DIM], 0.0, tl.float32)
    if ROTARY_DIM > 0:
        partners, cos, sin = rotation(rotary_ptr, position, HEAD_DIM, ROTARY_DIM, INTERLEAVED)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    dtype = k_pages_ptr.dtype.element_ty
    q_at = (kv_head * GROUP + heads)[:, None] * HEAD_DIM
    valid = (heads < GROUP)[:, None]
    q = turned(qkv_ptr, q_at, q_gain_ptr, cos, sin, dims, partners, valid, eps, gain_offset, HEAD_DIM, QK_NORM)
    q = (q * scale).to(dtype)
    highest = tl.full([16], -1e30, tl.float32)
    total, acc = tl.zeros([16], tl.float32), tl.zeros([16, HEAD_DIM], tl.float32)
    if split == 0:  # the new token opens the softmax
        k_at = (H + kv_head + tl.arange(0, 1))[:, None] * HEAD_DIM
        one = tl.full([1, 1], 1, tl.int1)
        new_k = turned(qkv_ptr, k_at, k_gain_ptr, cos, sin, dims, partners, one, eps, gain_offset, HEAD_DIM, QK_NORM)
        new_k = new_k.to(dtype)
        new_v = tl.load(qkv_ptr + (H + G + kv_head) * HEAD_DIM + dims).to(dtype)
        new_at = new_page * page_stride + (position % BLOCK_SIZE) * token_stride + dims
        tl.store(k_pages_ptr + new_at[None, :], new_k)
        tl.store(v_pages_ptr + new_at, new_v)
        highest = tl.sum(q.to(tl.float32) * new_k.to(tl.float32), 1)
        total += 1.0
        acc += new_v.to(tl.float32)[None, :]
    if FIRST:
        if begin < end:
            highest, total, acc = softmax_step(q, k_first, v_first, first_seen, highest, total, acc, True, EXACT)
    # Tiles that are attended in part stand at the ends.
    has_head = FIRST | (begin * TILE < lowest)
    full_begin = begin + has_head.to(tl.int32)
    full_end = end - (end * TILE > position).to(tl.int32)
    tile = full_begin
    if STAGES == 0:  # Triton's interpreter takes no bounds of a range from memory
        while tile < full_end:
            highest, total, acc = attend_tile(
                q, k_pages_ptr, v_pages_ptr, table_ptr, tile, position, lowest, page_stride, token_stride,
                highest, total, acc, HEAD_DIM, BLOCK_SIZE, TILE, False, EXACT,
            )  # fmt: skip
            tile += 1
    else:
        for full in tl.range(full_begin, full_end, num_stages=STAGES):
            highest, total, acc = attend_tile(
                q, k_pages_ptr, v_pages_ptr, table_ptr, full, position, lowest, page_stride, token_stride,
                highest, total, acc, HEAD_DIM, BLOCK_SIZE, TILE, False, EXACT,
            )  # fmt: skip
    if not FIRST:
        if has_head & (begin < end):
            highest, total, acc = attend_tile(
                q, k_pages_ptr, v_pages_ptr, table_ptr, begin, position, lowest, page_stride, token_stride,
                highest, total, acc, HEAD_DIM, BLOCK_SIZE, TILE, True, EXACT,
            )  # fmt: skip
    if (full_end < end) & (full_end >= full_begin):
        highest, total, acc = attend_tile(
            q, k_pages_ptr, v_pages_ptr, table_ptr, full_end, position, lowest, page_stride, token_stride,
            highest, total, acc, HEAD_DIM, BLOCK_SIZE, TILE, True, EXACT,
        )  # fmt: skip
    return total, acc, highest
