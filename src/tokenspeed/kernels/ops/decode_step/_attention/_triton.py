# SPDX-License-Identifier: Apache-2.0
"""Device code of the attention of a decode step, norm, rotation and the write of K and V included.

Loads and waits in the order that the chain's other kernels keep; knows none of them.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def product(a, b, acc, EXACT: tl.constexpr):
    """acc + a b; EXACT: of float32."""
    if EXACT:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    return tl.dot(a, b, acc)


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
            k_pages_ptr, v_pages_ptr, table_ptr, tl.minimum(begin, position // TILE),
            tl.where(begin < end, position, 0), lowest, page_stride, token_stride, HEAD_DIM, BLOCK_SIZE, TILE, True,
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
