# SPDX-License-Identifier: Apache-2.0
"""Device code of paged_attention: query tokens x heads of one K/V head folded into the M side of a tile, K and V read
page by page. Knows no launch shapes.

Tile names end in their dimensions: M packed queries (m is head m % GROUP of token m // GROUP), T cached tokens, K the
head dimension, R rows of the batch, S parts of a split. Scores are in units of log2: softmax takes exp2.
A row's queries make tiles of BLOCK_M, its K and V tiles of BLOCK_T at multiples of BLOCK_T. Where a range of K and V is
full, every query of the tile attends all of it, and no mask is made.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _row_tiles(
    query_start, seq_lens, rows_R, num_rows, shortest, longest,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, WINDOW: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Tiles of rows, of queries and of K and V, and pairs of them; none unless shortest <= query_len <= longest."""
    mask_R = rows_R < num_rows
    begin_R = tl.load(query_start + rows_R, mask=mask_R, other=0)
    query_len_R = tl.load(query_start + rows_R + 1, mask=mask_R, other=0) - begin_R
    seq_len_R = tl.load(seq_lens + rows_R, mask=mask_R, other=0)
    mine_R = (query_len_R >= shortest) & (query_len_R <= longest)
    m_tiles_R = tl.where(mine_R, (query_len_R * GROUP + BLOCK_M - 1) // BLOCK_M, 0)
    kv_tiles_R = (seq_len_R + BLOCK_T - 1) // BLOCK_T
    if WINDOW > 0:
        kv_tiles_R -= tl.maximum(seq_len_R - query_len_R - WINDOW + 1, 0) // BLOCK_T
    kv_tiles_R = tl.maximum(kv_tiles_R, 1)
    return m_tiles_R, kv_tiles_R, m_tiles_R * kv_tiles_R * KV_HEADS


@triton.jit
def _row_of_tile(m_tiles_R, m_tile):
    """(row, tile of the row) of a tile of queries among all."""
    is_before_R = tl.cumsum(m_tiles_R, 0) <= m_tile
    return tl.sum(is_before_R.to(tl.int32), 0), m_tile - tl.sum(tl.where(is_before_R, m_tiles_R, 0), 0)


@triton.jit
def _unit(
    query_start, seq_lens, num_rows, shortest, longest,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """(tiles of queries, K/V head, row, tile of the row) of a program that has one tile of one head, if it has one."""
    m_tiles_R, _, _ = _row_tiles(
        query_start, seq_lens, tl.arange(0, BLOCK_R), num_rows, shortest, longest, 1, GROUP, 0, BLOCK_M, 1
    )
    m_tiles = tl.sum(m_tiles_R, 0)
    among = tl.maximum(m_tiles, 1)
    row, m_tile = _row_of_tile(m_tiles_R, among - 1 - tl.program_id(0) % among)
    return m_tiles, tl.program_id(0) // among, tl.minimum(row, num_rows - 1), m_tile


@triton.jit
def _row(query_start, seq_lens, row):
    """(first token, query_len, tokens before these) of a row."""
    begin = tl.load(query_start + row)
    query_len = tl.load(query_start + row + 1) - begin
    return begin, query_len, tl.load(seq_lens + row) - query_len


@triton.jit
def _positions_of_tile(context_len, query_len, m_tile, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """Positions of the first and the last query of a row's tile."""
    last = tl.minimum((m_tile * BLOCK_M + BLOCK_M - 1) // GROUP, query_len - 1)
    return context_len + m_tile * BLOCK_M // GROUP, context_len + last


@triton.jit
def _nothing(M: tl.constexpr, K: tl.constexpr):
    """The state of a softmax that has seen nothing."""
    return tl.full([M], float("-inf"), tl.float32), tl.zeros([M], tl.float32), tl.zeros([M, K], tl.float32)


@triton.jit
def _queries(
    q, begin, query_len, m_tile, head, strides,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """A tile of queries (M, K), each one's token in its row, query head, and whether it is one."""
    packed_M = m_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    valid_M = packed_M < query_len * GROUP
    token_M = packed_M // GROUP
    head_M = head * GROUP + packed_M % GROUP
    dims_K = tl.arange(0, BLOCK_K)
    from_M = (begin + token_M).to(tl.int64) * strides[0] + head_M * strides[1]
    mask_MK = valid_M[:, None] & (dims_K < HEAD_DIM)[None, :]
    q_MK = tl.load(q + from_M[:, None] + dims_K[None, :], mask=mask_MK, other=0.0)
    if WIDE:
        q_MK = q_MK.to(tl.float32)
    return q_MK, token_M, head_M, valid_M


@triton.jit
def _kv_tile(pages, at_T, row, HEAD_DIM: tl.constexpr, BLOCK_K: tl.constexpr, TMA: tl.constexpr):
    """A tile of K or V (T, K): by a descriptor of the pool's rows from one row on, else from where each token lies."""
    if TMA:
        tile_TK = pages.load([row, 0])
    else:
        dims_K = tl.arange(0, BLOCK_K)
        if HEAD_DIM == BLOCK_K:
            tile_TK = tl.load(pages + at_T[:, None] + dims_K[None, :])
        else:
            tile_TK = tl.load(pages + at_T[:, None] + dims_K[None, :], mask=(dims_K < HEAD_DIM)[None, :], other=0.0)
    return tile_TK


@triton.jit
def _attend(
    state, queries, kv, strides, bounds, begin, end, scale, inner_scale,
    MASKED: tl.constexpr, SOFT_CAP: tl.constexpr, WINDOW: tl.constexpr, HEAD_DIM: tl.constexpr,
    KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
    TMA: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Take positions begin ... end - 1 into the softmax's state (maximum, sum, weighted values).

    bounds: what the row holds of positions that the tile sees, low ... high - 1; nothing else is looked at.
    """
    max_M, sum_M, acc_MK = state
    q_MK, position_M = queries
    k_pages, v_pages, table, head = kv
    k_page_stride, k_slot_stride, k_head_stride, v_page_stride, v_slot_stride, v_head_stride = strides
    low, high = bounds
    for start in tl.range(begin, end, BLOCK_T, num_stages=STAGES):
        seen_T = start + tl.arange(0, BLOCK_T)
        row = 0
        if TMA:
            page = tl.load(table + start // BLOCK_SIZE)
            row = (page * KV_HEADS + head) * BLOCK_SIZE + start % BLOCK_SIZE
            k_at_T = seen_T
            v_at_T = seen_T
        elif BLOCK_SIZE % BLOCK_T == 0:
            page = tl.load(table + start // BLOCK_SIZE).to(tl.int64)
            slot_T = start % BLOCK_SIZE + tl.arange(0, BLOCK_T)
            k_at_T = page * k_page_stride + head * k_head_stride + slot_T * k_slot_stride
            v_at_T = page * v_page_stride + head * v_head_stride + slot_T * v_slot_stride
        else:
            has_page_T = (seen_T >= low) & (seen_T < high)
            page_T = tl.load(table + seen_T // BLOCK_SIZE, mask=has_page_T, other=0).to(tl.int64)
            slot_T = seen_T % BLOCK_SIZE
            k_at_T = page_T * k_page_stride + head * k_head_stride + slot_T * k_slot_stride
            v_at_T = page_T * v_page_stride + head * v_head_stride + slot_T * v_slot_stride
        k_TK = _kv_tile(k_pages, k_at_T, row, HEAD_DIM, BLOCK_K, TMA).to(q_MK.dtype)
        scores_MT = tl.dot(q_MK, tl.trans(k_TK), input_precision="ieee")
        multiplier = scale
        if SOFT_CAP:
            scores_MT = scale * (1.0 - 2.0 / (tl.exp2(scores_MT * inner_scale) + 1.0))
            multiplier = 1.0
        if MASKED:
            mask_MT = seen_T[None, :] <= position_M[:, None]
            if WINDOW > 0:
                mask_MT &= seen_T[None, :] > position_M[:, None] - WINDOW
            scores_MT = tl.where(mask_MT, scores_MT, float("-inf"))
        top_M = tl.maximum(max_M, tl.max(scores_MT, 1) * multiplier)
        base_M = tl.where(top_M == float("-inf"), 0.0, top_M) if MASKED else top_M
        weights_MT = tl.exp2(scores_MT * multiplier - base_M[:, None])
        decay_M = tl.exp2(max_M - base_M)
        sum_M = sum_M * decay_M + tl.sum(weights_MT, 1)
        acc_MK = acc_MK * decay_M[:, None]
        max_M = top_M
        v_TK = _kv_tile(v_pages, v_at_T, row, HEAD_DIM, BLOCK_K, TMA).to(q_MK.dtype)
        if MASKED:  # 0 * NaN is NaN: what lies past the row's tokens must not be multiplied
            v_TK = tl.where(((seen_T >= low) & (seen_T < high))[:, None], v_TK, 0.0)
        acc_MK = tl.dot(weights_MT.to(q_MK.dtype), v_TK, acc_MK, input_precision="ieee")
    return max_M, sum_M, acc_MK


@triton.jit
def _attend_span(
    state, queries, kv, strides, seen, begin, end, scale, inner_scale,
    SOFT_CAP: tl.constexpr, WINDOW: tl.constexpr, HEAD_DIM: tl.constexpr, KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, TMA: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Take what a tile whose queries sit at seen = (first, last) sees of positions begin ... end - 1 into its state.

    begin and end are multiples of BLOCK_T.
    """
    first, last = seen
    low = tl.maximum(first - WINDOW + 1, 0) if WINDOW > 0 else 0
    high = last + 1
    begin = tl.maximum(begin, low // BLOCK_T * BLOCK_T)
    end = tl.minimum(end, high)
    full_end = tl.minimum(end, (first + 1) // BLOCK_T * BLOCK_T)
    full_begin = begin
    if WINDOW > 0:
        full_begin = tl.maximum(begin, (tl.maximum(last - WINDOW + 1, 0) + BLOCK_T - 1) // BLOCK_T * BLOCK_T)
        full_begin = tl.minimum(full_begin, end)
        state = _attend(
            state, queries, kv, strides, (low, high), begin, full_begin, scale, inner_scale, True, SOFT_CAP, WINDOW,
            HEAD_DIM, KV_HEADS, BLOCK_SIZE, BLOCK_T, BLOCK_K, TMA, STAGES,
        )  # fmt: skip
    full_end = tl.maximum(full_begin, full_end)
    state = _attend(
        state, queries, kv, strides, (low, high), full_begin, full_end, scale, inner_scale, False, SOFT_CAP, WINDOW,
        HEAD_DIM, KV_HEADS, BLOCK_SIZE, BLOCK_T, BLOCK_K, TMA, STAGES,
    )  # fmt: skip
    return _attend(
        state, queries, kv, strides, (low, high), full_end, end, scale, inner_scale, True, SOFT_CAP, WINDOW,
        HEAD_DIM, KV_HEADS, BLOCK_SIZE, BLOCK_T, BLOCK_K, TMA, STAGES,
    )  # fmt: skip


@triton.jit
def _with_sinks(max_M, sum_M, sinks, head_M, valid_M, SINKS: tl.constexpr):
    """(factor of the weighted values, divisor): a sink is one more score without a value."""
    base_M = tl.where(max_M == float("-inf"), 0.0, max_M)
    if SINKS:
        sink_M = tl.load(sinks + head_M, mask=valid_M, other=0.0) * 1.4426950408889634
        base_M = tl.maximum(max_M, sink_M)
        sum_M = sum_M * tl.exp2(max_M - base_M) + tl.exp2(sink_M - base_M)
    factor_M = tl.exp2(max_M - base_M)
    return factor_M, tl.where(sum_M > 0.0, sum_M, 1.0)


@triton.jit
def _store_result(
    out, state, sinks, begin, token_M, head_M, valid_M,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_K: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Normalise and write a tile to out (T, H, K); zeros where nothing was attended."""
    max_M, sum_M, acc_MK = state
    factor_M, divisor_M = _with_sinks(max_M, sum_M, sinks, head_M, valid_M, SINKS)
    out_MK = acc_MK * (factor_M / divisor_M)[:, None]
    dims_K = tl.arange(0, BLOCK_K)
    to_M = ((begin + token_M).to(tl.int64) * HEADS + head_M) * HEAD_DIM
    mask_MK = valid_M[:, None] & (dims_K < HEAD_DIM)[None, :]
    tl.store(out + to_M[:, None] + dims_K[None, :], out_MK.to(out.dtype.element_ty), mask=mask_MK)


@triton.jit
def _keep(partial_acc, partial_stats, state, part_M, mask_M, BLOCK_K: tl.constexpr):
    max_M, sum_M, acc_MK = state
    tl.store(partial_stats + 2 * part_M, max_M, mask=mask_M)
    tl.store(partial_stats + 2 * part_M + 1, sum_M, mask=mask_M)
    to_MK = part_M[:, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    tl.store(partial_acc + to_MK, acc_MK, mask=mask_M[:, None])


@triton.jit
def _fill(out, first_token, num_tokens, SIZE: tl.constexpr, BLOCK_OUT: tl.constexpr):
    """Zeros for every so many tokens as there are programs, from the first on."""
    numbers = tl.arange(0, BLOCK_OUT)
    for token in range(first_token, num_tokens, tl.num_programs(0)):
        to = (token + tl.zeros([BLOCK_OUT], tl.int64)) * SIZE + numbers
        tl.store(out + to, tl.zeros([BLOCK_OUT], out.dtype.element_ty), mask=numbers < SIZE)


@triton.jit(do_not_specialize=["num_rows", "shortest", "longest", "num_tokens"])
def split(
    q, k_pages, v_pages, out, partial_acc, partial_stats, query_start, seq_lens, tables, sinks, num_rows,
    num_tokens, shortest, longest, q_strides, kv_strides, table_stride, scale, inner_scale,
    SOFT_CAP: tl.constexpr, SINKS: tl.constexpr, WINDOW: tl.constexpr, HEAD_DIM: tl.constexpr,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_OUT: tl.constexpr, TMA: tl.constexpr,
    WIDE: tl.constexpr, STAGES: tl.constexpr, FILL: tl.constexpr, AFTER_TILES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The tiles of K and V that the rows' tiles of queries see, laid end to end, dealt to the programs in equal runs.

    A tile of queries that lies in one program's run is done there. Of one that is cut, the program where it begins
    keeps its part in place 2 * program + 1, and each other program in 2 * program, for `merge`.
    FILL: write zeros to the tokens past the last row. AFTER_TILES: the launch ahead is `tiles` of the same call,
    which began after this call's inputs were written: do not wait for its end before the work but after it.
    """
    if PDL:
        if not AFTER_TILES:
            gdc_wait()
        gdc_launch_dependents()
    program = tl.program_id(0)
    rows_R = tl.arange(0, BLOCK_R)
    _, kv_tiles_R, work_R = _row_tiles(
        query_start, seq_lens, rows_R, num_rows, shortest, longest, KV_HEADS, GROUP, WINDOW, BLOCK_M, BLOCK_T
    )
    ends_R = tl.cumsum(work_R, 0)
    work = tl.sum(work_R, 0)
    share = tl.maximum((work + tl.num_programs(0) - 1) // tl.num_programs(0), 1)
    place = program * share
    run_end = tl.minimum(place + share, work)
    while place < run_end:
        is_before_R = ends_R <= place
        row = tl.sum(is_before_R.to(tl.int32), 0)
        inside = place - tl.sum(tl.where(is_before_R, work_R, 0), 0)
        begin, query_len, context_len = _row(query_start, seq_lens, row)
        first_tile = tl.maximum(context_len - WINDOW + 1, 0) // BLOCK_T if WINDOW > 0 else 0
        kv_tiles = tl.sum(tl.where(rows_R == row, kv_tiles_R, 0), 0)
        tile = inside % kv_tiles
        head = inside // kv_tiles % KV_HEADS
        m_tile = inside // kv_tiles // KV_HEADS
        count = tl.minimum(kv_tiles - tile, run_end - place)
        q_MK, token_M, head_M, valid_M = _queries(
            q, begin, query_len, m_tile, head, q_strides, GROUP, HEAD_DIM, BLOCK_M, BLOCK_K, WIDE
        )
        position_M = tl.where(valid_M, context_len + token_M, -1)
        first, last = _positions_of_tile(context_len, query_len, m_tile, GROUP, BLOCK_M)
        state = _nothing(BLOCK_M, BLOCK_K)
        state = _attend_span(
            state,
            (q_MK, position_M),
            (k_pages, v_pages, tables + row.to(tl.int64) * table_stride, head),
            kv_strides,
            (first, last),
            (first_tile + tile) * BLOCK_T,
            (first_tile + tile + count) * BLOCK_T,
            scale, inner_scale, SOFT_CAP, WINDOW, HEAD_DIM, KV_HEADS, BLOCK_SIZE, BLOCK_T, BLOCK_K, TMA, STAGES,
        )  # fmt: skip
        if count == kv_tiles:
            _store_result(
                out, state, sinks, begin, token_M, head_M, valid_M, KV_HEADS * GROUP, HEAD_DIM, BLOCK_K, SINKS
            )
        else:
            part_M = (2 * program + (tile == 0).to(tl.int32)).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
            _keep(partial_acc, partial_stats, state, part_M, valid_M, BLOCK_K)
        place += count
    if FILL:
        _fill(out, tl.load(query_start + num_rows) + program, num_tokens, KV_HEADS * GROUP * HEAD_DIM, BLOCK_OUT)
    if PDL and AFTER_TILES:
        gdc_wait()


@triton.jit(do_not_specialize=["num_rows", "shortest", "longest", "num_programs"])
def merge(
    out, partial_acc, partial_stats, query_start, seq_lens, sinks, num_rows, num_programs, shortest, longest,
    SINKS: tl.constexpr, WINDOW: tl.constexpr, HEAD_DIM: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
    MERGE_M: tl.constexpr, MERGE_S: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """What `split` left in parts. A program takes MERGE_M queries of a tile, MERGE_S parts at a time, in order."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    rows_R = tl.arange(0, BLOCK_R)
    m_tiles_R, kv_tiles_R, work_R = _row_tiles(
        query_start, seq_lens, rows_R, num_rows, shortest, longest, KV_HEADS, GROUP, WINDOW, BLOCK_M, BLOCK_T
    )
    work = tl.sum(work_R, 0)
    share = tl.maximum((work + num_programs - 1) // num_programs, 1)
    m_tile = tl.program_id(0)
    if m_tile >= tl.sum(m_tiles_R, 0):
        return
    row, m_tile = _row_of_tile(m_tiles_R, m_tile)
    kv_tiles = tl.sum(tl.where(rows_R == row, kv_tiles_R, 0), 0)
    head = tl.program_id(1)
    place = tl.sum(tl.where(rows_R < row, work_R, 0), 0) + (m_tile * KV_HEADS + head) * kv_tiles
    first_program = place // share
    last_program = (place + kv_tiles - 1) // share
    begin, query_len, _ = _row(query_start, seq_lens, row)
    inside_M = tl.program_id(2) * MERGE_M + tl.arange(0, MERGE_M)
    packed_M = m_tile * BLOCK_M + inside_M
    valid_M = packed_M < query_len * GROUP
    if (first_program == last_program) | (m_tile * BLOCK_M + tl.program_id(2) * MERGE_M >= query_len * GROUP):
        return
    max_M = tl.full([MERGE_M], float("-inf"), tl.float32)
    sum_M = tl.zeros([MERGE_M], tl.float32)
    acc_MK = tl.zeros([MERGE_M, BLOCK_K], tl.float32)
    dims_K = tl.arange(0, BLOCK_K)
    for first_part in range(first_program, last_program + 1, MERGE_S):
        program_S = first_part + tl.arange(0, MERGE_S)
        mask_SM = (program_S <= last_program)[:, None] & valid_M[None, :]
        part_S = (2 * program_S + (program_S == first_program).to(tl.int32)).to(tl.int64)
        part_SM = part_S[:, None] * BLOCK_M + inside_M[None, :]
        parts_max_SM = tl.load(partial_stats + 2 * part_SM, mask=mask_SM, other=float("-inf"))
        parts_sum_SM = tl.load(partial_stats + 2 * part_SM + 1, mask=mask_SM, other=0.0)
        from_SMK = part_SM[:, :, None] * BLOCK_K + dims_K[None, None, :]
        parts_SMK = tl.load(partial_acc + from_SMK, mask=mask_SM[:, :, None], other=0.0)
        top_M = tl.maximum(max_M, tl.max(parts_max_SM, 0))
        base_M = tl.where(top_M == float("-inf"), 0.0, top_M)
        decay_M = tl.exp2(max_M - base_M)
        weight_SM = tl.exp2(parts_max_SM - base_M[None, :])
        sum_M = sum_M * decay_M + tl.sum(parts_sum_SM * weight_SM, 0)
        acc_MK = acc_MK * decay_M[:, None] + tl.sum(parts_SMK * weight_SM[:, :, None], 0)
        max_M = top_M
    _store_result(
        out,
        (max_M, sum_M, acc_MK),
        sinks, begin, packed_M // GROUP, head * GROUP + packed_M % GROUP, valid_M,
        KV_HEADS * GROUP, HEAD_DIM, BLOCK_K, SINKS,
    )  # fmt: skip


@triton.jit
def _fold(state, part):
    """Add a part to a softmax's state. The fused steps are spelt out, so that every kernel rounds alike."""
    max_M, sum_M, acc_MK = state
    part_max_M, part_sum_M, part_acc_MK = part
    top_M = tl.maximum(max_M, part_max_M)
    base_M = tl.where(top_M == float("-inf"), 0.0, top_M)
    keep_M = tl.exp2(max_M - base_M)
    take_M = tl.exp2(part_max_M - base_M)
    keep_MK = tl.broadcast_to(keep_M[:, None], acc_MK.shape)
    sum_M = tl.fma(sum_M, keep_M, part_sum_M * take_M)
    return top_M, sum_M, tl.fma(acc_MK, keep_MK, part_acc_MK * take_M[:, None])


@triton.jit(do_not_specialize=["num_rows", "num_tokens", "shortest", "longest", "num_chunks"])
def tiles(
    q, k_pages, v_pages, out, partial_acc, partial_stats, query_start, seq_lens, tables, sinks, num_rows, num_tokens,
    shortest, longest, num_chunks, q_strides, kv_strides, table_stride, scale, inner_scale,
    SOFT_CAP: tl.constexpr, SINKS: tl.constexpr, WINDOW: tl.constexpr, HEAD_DIM: tl.constexpr, KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_OUT: tl.constexpr, CHUNK: tl.constexpr, KEPT_M: tl.constexpr, SPLIT: tl.constexpr,
    FILL: tl.constexpr, TMA: tl.constexpr, WIDE: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One tile of queries of one K/V head a program. Late tiles see most and so come first; neighbours in time share a
    head, for the sake of the cache.

    CHUNK: 0, or K and V are taken in chunks of so many positions from the row's first on, each alone, and then folded
    in order: what a token's numbers are depends on its position and nothing else. SPLIT: each chunk is a program's,
    which keeps KEPT_M queries of its tile for `fold`. FILL: write zeros to the tokens past the last row."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    m_tiles, head, row, m_tile = _unit(query_start, seq_lens, num_rows, shortest, longest, GROUP, BLOCK_M, BLOCK_R)
    unit, chunk = tl.program_id(0), tl.program_id(1)
    if FILL and chunk == 0:
        _fill(out, tl.load(query_start + num_rows) + unit, num_tokens, KV_HEADS * GROUP * HEAD_DIM, BLOCK_OUT)
    if unit >= m_tiles * KV_HEADS:
        return
    begin, query_len, context_len = _row(query_start, seq_lens, row)
    first, last = _positions_of_tile(context_len, query_len, m_tile, GROUP, BLOCK_M)
    size = CHUNK if CHUNK > 0 else (last // BLOCK_T + 1) * BLOCK_T
    first_chunk = tl.maximum(first - WINDOW + 1, 0) // size if WINDOW > 0 and CHUNK > 0 else 0
    end_chunk = last // size + 1 if CHUNK > 0 else 1
    if SPLIT:
        first_chunk = tl.maximum(first_chunk, chunk)
        end_chunk = tl.minimum(end_chunk, chunk + 1)
        if first_chunk >= end_chunk:
            return
    q_MK, token_M, head_M, valid_M = _queries(
        q, begin, query_len, m_tile, head, q_strides, GROUP, HEAD_DIM, BLOCK_M, BLOCK_K, WIDE
    )
    position_M = tl.where(valid_M, context_len + token_M, -1)
    state = _nothing(BLOCK_M, BLOCK_K)
    for at in range(first_chunk, end_chunk):
        part = _attend_span(
            _nothing(BLOCK_M, BLOCK_K),
            (q_MK, position_M),
            (k_pages, v_pages, tables + row.to(tl.int64) * table_stride, head),
            kv_strides,
            (first, last), at * size, at * size + size,
            scale, inner_scale, SOFT_CAP, WINDOW, HEAD_DIM, KV_HEADS, BLOCK_SIZE, BLOCK_T, BLOCK_K, TMA, STAGES,
        )  # fmt: skip
        state = _fold(state, part) if CHUNK > 0 else part
    if SPLIT:
        kept_M = tl.arange(0, BLOCK_M)
        part_M = (unit.to(tl.int64) * num_chunks + chunk) * KEPT_M + kept_M
        _keep(partial_acc, partial_stats, state, part_M, kept_M < KEPT_M, BLOCK_K)
    else:
        _store_result(out, state, sinks, begin, token_M, head_M, valid_M, KV_HEADS * GROUP, HEAD_DIM, BLOCK_K, SINKS)


@triton.jit(do_not_specialize=["num_rows", "longest", "num_chunks"])
def fold(
    out, partial_acc, partial_stats, query_start, seq_lens, sinks, num_rows, longest, num_chunks,
    SINKS: tl.constexpr, WINDOW: tl.constexpr, HEAD_DIM: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, CHUNK: tl.constexpr,
    KEPT_M: tl.constexpr, MERGE_M: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """What `tiles` left chunk by chunk, in their order. A program takes MERGE_M queries of a tile."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    m_tiles, head, row, m_tile = _unit(query_start, seq_lens, num_rows, 1, longest, GROUP, BLOCK_M, BLOCK_R)
    unit = tl.program_id(0)
    if unit >= m_tiles * KV_HEADS:
        return
    begin, query_len, context_len = _row(query_start, seq_lens, row)
    first, last = _positions_of_tile(context_len, query_len, m_tile, GROUP, BLOCK_M)
    first_chunk = tl.maximum(first - WINDOW + 1, 0) // CHUNK if WINDOW > 0 else 0
    inside_M = tl.program_id(1) * MERGE_M + tl.arange(0, MERGE_M)
    packed_M = m_tile * BLOCK_M + inside_M
    valid_M = packed_M < query_len * GROUP
    dims_K = tl.arange(0, BLOCK_K)
    state = _nothing(MERGE_M, BLOCK_K)
    for chunk in tl.range(first_chunk, last // CHUNK + 1, 1, num_stages=3):
        part_M = (unit.to(tl.int64) * num_chunks + chunk) * KEPT_M + inside_M
        part = (
            tl.load(partial_stats + 2 * part_M, mask=valid_M, other=float("-inf")),
            tl.load(partial_stats + 2 * part_M + 1, mask=valid_M, other=0.0),
            tl.load(partial_acc + part_M[:, None] * BLOCK_K + dims_K[None, :], mask=valid_M[:, None], other=0.0),
        )
        state = _fold(state, part)
    _store_result(
        out, state, sinks, begin, packed_M // GROUP, head * GROUP + packed_M % GROUP, valid_M,
        KV_HEADS * GROUP, HEAD_DIM, BLOCK_K, SINKS,
    )  # fmt: skip
