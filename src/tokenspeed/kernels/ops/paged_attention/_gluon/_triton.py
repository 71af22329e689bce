# SPDX-License-Identifier: Apache-2.0
"""Device code of paged_attention for Hopper, in Gluon: one warpgroup brings K and V, two attend. Knows no launches.

Names are those of paged_attention/_triton.py. A unit is a tile of 2 * HALF_M packed queries of a K/V head; the
warpgroups that attend share out its queries. Where units are few, what each of them sees of K and V is cut into parts.
An item is a part of a unit; a program takes item after item. A step takes 2 * HALF_T tokens, from two places of the
pools. While a warpgroup turns scores into weights, the tensor cores are the other's. K and V of the next item are on
their way while an item ends.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma as mma
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait as mma_wait

LOG2E = gl.constexpr(1.4426950408889634)
PANEL = gl.constexpr(64)
"""Dimensions of a row that shared memory holds together."""
NUMBERS = gl.constexpr(8)
"""What the producer tells of an item: how many steps, the first of them, the row's first token, query_len and tokens
before these, tile, K/V head, and the place where a part is kept, -1 for a whole."""


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _barriers(num: gl.constexpr, count: gl.constexpr):
    """So many barriers, each for so many arrivals."""
    barriers = gl.allocate_shared_memory(gl.int64, [num, 1], mbarrier.MBarrierLayout())
    for place in gl.static_range(num):
        mbarrier.init(barriers.index(place), count=count)
    return barriers


@gluon.jit
def _zero():
    """Nothing, in the layout of a single number that every thread has."""
    return gl.zeros([1], gl.int32, gl.BlockedLayout([1], [32], [4], [0]))


@gluon.jit
def _tiles_of_rows(
    query_start, num_rows, shortest, longest, GROUP: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_R: gl.constexpr
):  # fmt: skip
    """Tiles of queries that each row has."""
    rows_R = gl.arange(0, BLOCK_R, layout=gl.BlockedLayout([1], [32], [4], [0]))
    mask_R = rows_R < num_rows
    begin_R = gl.load(query_start + rows_R, mask=mask_R, other=0)
    query_len_R = gl.load(query_start + rows_R + 1, mask=mask_R, other=0) - begin_R
    mine_R = (query_len_R >= shortest) & (query_len_R <= longest)
    return gl.where(mine_R, (query_len_R * GROUP + BLOCK_M - 1) // BLOCK_M, 0)


@gluon.jit
def _find(query_start, seq_lens, unit, tiles_R, ends_R, num_tiles):
    """(K/V head, row, its first token, query_len, tokens before these, tile of the row) of a unit: late tiles first,
    since they see most, and those of a head together, for the sake of the cache."""
    tile = num_tiles - 1 - unit % num_tiles
    is_before_R = ends_R <= tile
    row = gl.sum(is_before_R.to(gl.int32), 0)
    m_tile = tile - gl.sum(gl.where(is_before_R, tiles_R, 0), 0)
    begin = gl.load(query_start + row)
    query_len = gl.load(query_start + row + 1) - begin
    return unit // num_tiles, row, begin, query_len, gl.load(seq_lens + row) - query_len, m_tile


@gluon.jit
def _seen(context_len, query_len, m_tile, WINDOW: gl.constexpr, GROUP: gl.constexpr, BLOCK_M: gl.constexpr):
    """Positions of the tile's first and last query, and the first that it sees."""
    first = context_len + m_tile * BLOCK_M // GROUP
    last = context_len + gl.minimum((m_tile * BLOCK_M + BLOCK_M - 1) // GROUP, query_len - 1)
    low = gl.maximum(first - WINDOW + 1, 0) if WINDOW > 0 else 0
    return first, last, low


@gluon.jit
def _parts(num_units, num_programs):
    """Into how many parts the K and V that a unit sees are cut, so that few units occupy all programs."""
    return gl.maximum(num_programs // gl.maximum(num_units, 1), 1)


@gluon.jit
def _part_of(low, last, part, num_parts, BLOCK_T: gl.constexpr):
    """First step of a part and how many it has, maybe none."""
    first_step = low // BLOCK_T
    num_steps = last // BLOCK_T + 1 - first_step
    share = (num_steps + num_parts - 1) // num_parts
    begin = gl.minimum(part * share, num_steps)
    return first_step + begin, gl.minimum(share, num_steps - begin)


@gluon.jit
def _load(pool, low_row, high_row, barrier, boxes, stage, HEAD_DIM: gl.constexpr):
    """A step's rows of K or V, box by box: those of both halves that hold the same dimensions lie together."""
    PANELS: gl.constexpr = HEAD_DIM // PANEL
    for panel in gl.static_range(PANELS):
        box = 2 * (stage * PANELS + panel)
        tma.async_copy_global_to_shared(pool, [low_row, panel * PANEL], barrier, boxes.index(box))
        tma.async_copy_global_to_shared(pool, [high_row, panel * PANEL], barrier, boxes.index(box + 1))


@gluon.jit
def _bring(
    pools, boxes, barriers, board, inputs,
    WINDOW: gl.constexpr, KV_HEADS: gl.constexpr, GROUP: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    BLOCK_R: gl.constexpr, HEAD_DIM: gl.constexpr, HALF_M: gl.constexpr, HALF_T: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The producer: tells which item is next, and brings its K and V into their rings. Past the last position, the
    first half of a step comes again."""
    k_pool, v_pool = pools
    k_boxes, v_boxes = boxes
    k_full, k_empty, v_full, v_empty = barriers
    told, told_full, told_empty = board
    query_start, seq_lens, tables, table_stride, next_item, num_rows, shortest, longest = inputs
    num_bytes: gl.constexpr = 2 * HALF_T * HEAD_DIM * k_boxes.dtype.primitive_bitwidth // 8
    BLOCK_M: gl.constexpr = 2 * HALF_M
    tiles_R = _tiles_of_rows(query_start, num_rows, shortest, longest, GROUP, BLOCK_M, BLOCK_R)
    num_tiles = gl.sum(tiles_R, 0)
    ends_R = gl.associative_scan(tiles_R, 0, _add)
    num_units = num_tiles * KV_HEADS
    num_parts = _parts(num_units, gl.num_programs(0))
    item = gl.program_id(0)
    count = 0
    done = 0
    while item < num_units * num_parts:
        head, row, begin, query_len, context_len, m_tile = _find(
            query_start, seq_lens, item // num_parts, tiles_R, ends_R, num_tiles
        )
        _first, last, low = _seen(context_len, query_len, m_tile, WINDOW, GROUP, BLOCK_M)
        first_step, num_steps = _part_of(low, last, item % num_parts, num_parts, 2 * HALF_T)
        if num_steps > 0:
            place = count % 2
            mbarrier.wait(told_empty.index(place), (count // 2 & 1) ^ 1)
            kept = gl.where(num_parts > 1, item, -1)
            numbers = (num_steps, first_step, begin, query_len, context_len, m_tile, head, kept)
            for index in gl.static_range(NUMBERS):
                told.index(NUMBERS * place + index).store(_zero() + numbers[index])
            mbarrier.arrive(told_full.index(place))
            count += 1
        table = tables + row.to(gl.int64) * table_stride
        for step in range(num_steps):
            stage = (done + step) % STAGES
            parity = ((done + step) // STAGES & 1) ^ 1
            low_start = (first_step + step) * 2 * HALF_T
            high_start = gl.where(low_start + HALF_T <= last, low_start + HALF_T, low_start)
            low_page = gl.load(table + low_start // BLOCK_SIZE)
            high_page = gl.load(table + high_start // BLOCK_SIZE)
            low_row = (low_page * KV_HEADS + head) * BLOCK_SIZE + low_start % BLOCK_SIZE
            high_row = (high_page * KV_HEADS + head) * BLOCK_SIZE + high_start % BLOCK_SIZE
            mbarrier.wait(k_empty.index(stage), parity)
            mbarrier.expect(k_full.index(stage), num_bytes)
            _load(k_pool, low_row, high_row, k_full.index(stage), k_boxes, stage, HEAD_DIM)
            mbarrier.wait(v_empty.index(stage), parity)
            mbarrier.expect(v_full.index(stage), num_bytes)
            _load(v_pool, low_row, high_row, v_full.index(stage), v_boxes, stage, HEAD_DIM)
        done += num_steps
        item = gl.num_programs(0) + gl.atomic_add(next_item, 1, sem="relaxed")
    place = count % 2
    mbarrier.wait(told_empty.index(place), (count // 2 & 1) ^ 1)
    told.index(NUMBERS * place).store(_zero())
    mbarrier.arrive(told_full.index(place))


@gluon.jit
def _masked(scores_MT, start, position_M, WINDOW: gl.constexpr):
    layout: gl.constexpr = scores_MT.type.layout
    seen_T = start + gl.arange(0, scores_MT.shape[1], layout=gl.SliceLayout(0, layout))
    mask_MT = seen_T[None, :] <= position_M[:, None]
    if WINDOW > 0:
        mask_MT = mask_MT & (seen_T[None, :] > position_M[:, None] - WINDOW)
    return gl.where(mask_MT, scores_MT, float("-inf"))


@gluon.jit
def _clean(v_boxes, stage, start, low, last, HEAD_DIM: gl.constexpr, HALF_T: gl.constexpr):
    """Zero values of positions that no query of the tile sees: 0 * NaN is NaN. Both consumers do so, alike."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    for box in gl.static_range(2 * HEAD_DIM // PANEL):
        v_smem = v_boxes.index(stage * (2 * HEAD_DIM // PANEL) + box)
        seen_T = start + box % 2 * HALF_T + gl.arange(0, HALF_T, layout=gl.SliceLayout(1, layout))
        v_TK = v_smem.load(layout)
        v_smem.store(gl.where(((seen_T >= low) & (seen_T <= last))[:, None], v_TK, 0.0))
    fence_async_shared()


@gluon.jit
def _packed(weights_MT, dtype: gl.constexpr):
    """(M, T / 2) int32, two weights each: single 16-bit numbers would be taken apart wherever a loop goes round."""
    M: gl.constexpr = weights_MT.shape[0]
    T: gl.constexpr = weights_MT.shape[1]
    asm: gl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;" if dtype == gl.bfloat16 else "cvt.rn.f16x2.f32 $0, $2, $1;"
    even, odd = gl.split(gl.reshape(weights_MT, [M, T // 2, 2]))
    return gl.inline_asm_elementwise(asm, "=r,f,f", [even, odd], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _unpacked(packed, dtype: gl.constexpr, layout: gl.constexpr):
    """(M, T) of `_packed`."""
    M: gl.constexpr = packed.shape[0]
    T: gl.constexpr = 2 * packed.shape[1]
    even, odd = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [packed], dtype=(gl.int16, gl.int16), is_pure=True, pack=1
    )
    return gl.convert_layout(gl.reshape(gl.join(even, odd), [M, T]).to(dtype, bitcast=True), layout)


@gluon.jit
def _weights(scores_MT, max_M, scale):
    """Softmax of a step: (weights, decay of what came before, new maximum)."""
    top_M = gl.maximum(max_M, gl.max(scores_MT, 1) * scale)
    base_M = gl.where(top_M == float("-inf"), 0.0, top_M)
    return gl.exp2(scores_MT * scale - base_M[:, None]), gl.exp2(max_M - base_M), top_M


@gluon.jit
def _sums(weights_MT):
    """(M, 4): each thread's part of the sums along T, added up only when the tile ends."""
    M: gl.constexpr = weights_MT.shape[0]
    T: gl.constexpr = weights_MT.shape[1]
    return gl.sum(gl.sum(gl.reshape(weights_MT, [M, T // 8, 4, 2]), 3), 1)


@gluon.jit
def _factor(max_M, sum_M, sinks, head_M, SINKS: gl.constexpr):
    """What weighted values are multiplied by at last. A sink is one more score without a value."""
    base_M = max_M
    if SINKS:
        sink_M = gl.load(sinks + head_M) * LOG2E
        base_M = gl.maximum(max_M, sink_M)
        sum_M = sum_M * gl.exp2(max_M - base_M) + gl.exp2(sink_M - base_M)
    return gl.exp2(max_M - base_M) / gl.where(sum_M > 0.0, sum_M, 1.0)


@gluon.jit
def _scores(q_smem, k_smem, stage, BLOCK_T: gl.constexpr):
    """Begins a step's queries by K."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_T, 16])
    M: gl.constexpr = q_smem.shape[0]
    empty_MT = gl.zeros([M, BLOCK_T], gl.float32, layout)
    return mma(q_smem, k_smem.index(stage).permute((1, 0)), empty_MT, use_acc=False, is_async=True)


@gluon.jit
def _step(
    state, queries, work, step,
    MASKED: gl.constexpr, WINDOW: gl.constexpr, BLOCK_T: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """This step's queries by K and the last step's weights by V, and this step's softmax.

    The compiler lets only the softmax's maximum run beside V's product, the rest after it. That is as well: where power
    is the limit, to overlap all of it, or to have the warpgroups take turns, was slower."""
    max_M, sum_M4, acc_MK, packed = state
    q_smem, position_M = queries
    smem, barriers, done, start, scale = work
    k_smem, v_smem = smem
    k_full, k_empty, v_full, v_empty = barriers
    pv: gl.constexpr = acc_MK.type.layout
    p_MT = _unpacked(packed, q_smem.dtype, gl.DotOperandLayout(0, pv, 2))
    stage = (done + step) % STAGES
    before = (done + step - 1) % STAGES
    mbarrier.wait(k_full.index(stage), (done + step) // STAGES & 1)
    mbarrier.wait(v_full.index(before), (done + step - 1) // STAGES & 1)
    scores_MT = _scores(q_smem, k_smem, stage, BLOCK_T)
    acc_MK = mma(p_MT, v_smem.index(before), acc_MK, is_async=True)
    scores_MT = mma_wait(1, deps=[scores_MT])
    if MASKED:
        scores_MT = _masked(scores_MT, start + step * BLOCK_T, position_M, WINDOW)
    weights_MT, decay_M, max_M = _weights(scores_MT, max_M, scale)
    part_M4 = _sums(weights_MT)
    inner: gl.constexpr = gl.SliceLayout(1, sum_M4.type.layout)
    sum_M4 = sum_M4 * gl.convert_layout(decay_M, inner)[:, None] + part_M4
    acc_MK, p_MT = mma_wait(0, deps=[acc_MK, p_MT])
    mbarrier.arrive(v_empty.index(before))
    mbarrier.arrive(k_empty.index(stage))
    acc_MK = acc_MK * gl.convert_layout(decay_M, gl.SliceLayout(1, pv))[:, None]
    return max_M, sum_M4, acc_MK, _packed(weights_MT, q_smem.dtype)


@gluon.jit
def _attend_tile(
    part, q, out, partial, sinks, smem, barriers, tile, done, strides, scale,
    SINKS: gl.constexpr, WINDOW: gl.constexpr, HEAD_DIM: gl.constexpr, KV_HEADS: gl.constexpr, GROUP: gl.constexpr,
    HALF_M: gl.constexpr, HALF_T: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """HALF_M queries of the tile, the first or the second half of it. done: steps of tiles before. Returns its own."""
    q_room, v_boxes, k_smem, v_smem = smem
    k_full, k_empty, v_full, v_empty = barriers
    num_steps, first_step, begin, query_len, context_len, m_tile, head, item = tile
    first, last, low = _seen(context_len, query_len, m_tile, WINDOW, GROUP, 2 * HALF_M)
    BLOCK_T: gl.constexpr = 2 * HALF_T
    qk: gl.constexpr = gl.NVMMADistributedLayout([3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_T, 16])
    pv: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, HEAD_DIM, 16])
    rows: gl.constexpr = gl.SliceLayout(1, qk)
    plain: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    dtype: gl.constexpr = q.dtype.element_ty
    loaded_M = (2 * m_tile + part) * HALF_M + gl.arange(0, HALF_M, layout=gl.SliceLayout(1, plain))
    dims_K = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, plain))
    from_M = (begin + loaded_M // GROUP).to(gl.int64) * strides[0] + (head * GROUP + loaded_M % GROUP) * strides[1]
    valid_M = loaded_M < query_len * GROUP
    q_MK = gl.load(q + from_M[:, None] + dims_K[None, :], mask=valid_M[:, None], other=0.0)
    q_smem = q_room.index(part)  # of registers there are none to spare
    q_smem.store(q_MK)
    fence_async_shared()
    packed_M = (2 * m_tile + part) * HALF_M + gl.arange(0, HALF_M, layout=rows)
    position_M = gl.where(packed_M < query_len * GROUP, context_len + packed_M // GROUP, -1)
    acc_MK = gl.zeros([HALF_M, HEAD_DIM], gl.float32, pv)
    start = first_step * BLOCK_T
    stage = done % STAGES
    mbarrier.wait(k_full.index(stage), done // STAGES & 1)
    scores_MT = mma_wait(0, deps=[_scores(q_smem, k_smem, stage, BLOCK_T)])
    mbarrier.arrive(k_empty.index(stage))
    if (start + BLOCK_T > first + 1) | (WINDOW > 0):
        scores_MT = _masked(scores_MT, start, position_M, WINDOW)
    max_M = gl.full([HALF_M], float("-inf"), gl.float32, rows)
    weights_MT, _, max_M = _weights(scores_MT, max_M, scale)
    state = (max_M, _sums(weights_MT), acc_MK, _packed(weights_MT, dtype))

    full_end = gl.minimum(num_steps, (first + 1 - start) // BLOCK_T)
    full_begin = 1
    if WINDOW > 0:
        full_begin = gl.maximum(1, (gl.maximum(last - WINDOW + 1, 0) - start + BLOCK_T - 1) // BLOCK_T)
        full_begin = gl.minimum(full_begin, num_steps)
    full_end = gl.maximum(full_begin, full_end)
    queries = (q_smem, position_M)
    if (num_steps > 1) & (WINDOW > 0):
        mbarrier.wait(v_full.index(stage), done // STAGES & 1)
        _clean(v_boxes, stage, start, low, last, HEAD_DIM, HALF_T)
    work = ((k_smem, v_smem), barriers, done, start, scale)
    if WINDOW > 0:
        for step in range(1, full_begin):
            state = _step(state, queries, work, step, True, WINDOW, BLOCK_T, STAGES)
    for step in range(full_begin, full_end):
        state = _step(state, queries, work, step, False, WINDOW, BLOCK_T, STAGES)
    for step in range(full_end, num_steps):
        state = _step(state, queries, work, step, True, WINDOW, BLOCK_T, STAGES)
    max_M, sum_M4, acc_MK, packed = state
    p_MT = _unpacked(packed, dtype, gl.DotOperandLayout(0, pv, 2))

    done += num_steps
    before = (done - 1) % STAGES
    start += (num_steps - 1) * BLOCK_T
    mbarrier.wait(v_full.index(before), (done - 1) // STAGES & 1)
    if (start + BLOCK_T > last + 1) | (start < low):
        _clean(v_boxes, before, start, low, last, HEAD_DIM, HALF_T)
    acc_MK = mma(p_MT, v_smem.index(before), acc_MK, is_async=True)
    acc_MK, p_MT = mma_wait(0, deps=[acc_MK, p_MT])
    mbarrier.arrive(v_empty.index(before))

    sum_M = gl.convert_layout(gl.sum(sum_M4, 1), rows)
    if item >= 0:
        partial_acc, partial_stats = partial
        kept_M = (2 * item + part) * HALF_M + gl.arange(0, HALF_M, layout=rows)
        gl.store(partial_stats + 2 * kept_M, max_M)
        gl.store(partial_stats + 2 * kept_M + 1, sum_M)
        kept_M = gl.convert_layout(kept_M, gl.SliceLayout(1, pv))
        kept_K = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, pv))
        gl.store(partial_acc + kept_M[:, None] * HEAD_DIM + kept_K[None, :], acc_MK)
    else:
        factor_M = _factor(max_M, sum_M, sinks, head * GROUP + packed_M % GROUP, SINKS)
        acc_MK = acc_MK * gl.convert_layout(factor_M, gl.SliceLayout(1, pv))[:, None]
        out_MK = gl.convert_layout(acc_MK.to(dtype), plain)
        token_M = (begin + loaded_M // GROUP).to(gl.int64)
        to_M = (token_M * (KV_HEADS * GROUP) + head * GROUP + loaded_M % GROUP) * HEAD_DIM
        gl.store(out + to_M[:, None] + dims_K[None, :], out_MK, mask=valid_M[:, None])
    return done


@gluon.jit
def _told(told, place):
    """A number that the producer told."""
    return gl.max(told.index(place).load(gl.BlockedLayout([1], [32], [4], [0])), 0)


@gluon.jit
def _attend(
    part, shared, board,
    SINKS: gl.constexpr, WINDOW: gl.constexpr, HEAD_DIM: gl.constexpr, KV_HEADS: gl.constexpr, GROUP: gl.constexpr,
    HALF_M: gl.constexpr, HALF_T: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A consumer: its half of each item that the producer tells, until one has no steps."""
    q, out, partial, sinks, smem, barriers, strides, scale = shared
    told, told_full, told_empty = board
    mbarrier.wait(told_full.index(0), 0)
    num_steps = _told(told, 0)
    count = 0
    done = 0
    while num_steps > 0:
        at = NUMBERS * (count % 2)
        tile = (
            num_steps, _told(told, at + 1), _told(told, at + 2), _told(told, at + 3), _told(told, at + 4),
            _told(told, at + 5), _told(told, at + 6), _told(told, at + 7),
        )  # fmt: skip
        mbarrier.arrive(told_empty.index(count % 2))
        done = _attend_tile(
            part, q, out, partial, sinks, smem, barriers, tile, done, strides, scale,
            SINKS, WINDOW, HEAD_DIM, KV_HEADS, GROUP, HALF_M, HALF_T, STAGES,
        )  # fmt: skip
        count += 1
        mbarrier.wait(told_full.index(count % 2), count // 2 & 1)
        num_steps = _told(told, NUMBERS * (count % 2))


@gluon.jit(do_not_specialize=["num_rows", "shortest", "longest"])
def extend(
    q, k_pool, v_pool, out, partial_acc, partial_stats, next_item, query_start, seq_lens, tables, sinks, num_rows,
    shortest, longest, q_strides, table_stride, scale,
    SINKS: gl.constexpr, WINDOW: gl.constexpr, HEAD_DIM: gl.constexpr, KV_HEADS: gl.constexpr, GROUP: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, BLOCK_R: gl.constexpr, HALF_M: gl.constexpr, HALF_T: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Items, dealt to the programs as these come free. next_item: zero. partial_acc, partial_stats: room for parts.

    k_pool, v_pool: descriptors of the pools' rows (P * G * block_size, K), HALF_T by PANEL of them a load."""
    dtype: gl.constexpr = q.dtype.element_ty
    NUM_BOXES: gl.constexpr = 2 * STAGES * HEAD_DIM // PANEL
    k_boxes = gl.allocate_shared_memory(dtype, [NUM_BOXES, HALF_T, PANEL], k_pool.layout)
    v_boxes = gl.allocate_shared_memory(dtype, [NUM_BOXES, HALF_T, PANEL], v_pool.layout)
    k_smem = k_boxes._reinterpret(dtype, [STAGES, 2 * HALF_T, HEAD_DIM], k_pool.layout)
    v_smem = v_boxes._reinterpret(dtype, [STAGES, 2 * HALF_T, HEAD_DIM], v_pool.layout)
    told = gl.allocate_shared_memory(gl.int32, [2 * NUMBERS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    barriers = (_barriers(STAGES, 1), _barriers(STAGES, 2), _barriers(STAGES, 1), _barriers(STAGES, 2))
    board = (told, _barriers(2, 1), _barriers(2, 2))
    fence_async_shared()
    q_room = gl.allocate_shared_memory(dtype, [2, HALF_M, HEAD_DIM], k_pool.layout)
    inputs = (query_start, seq_lens, tables, table_stride, next_item, num_rows, shortest, longest)
    smem = (q_room, v_boxes, k_smem, v_smem)
    shared = (q, out, (partial_acc, partial_stats), sinks, smem, barriers, q_strides, scale)
    gl.warp_specialize(
        [
            (
                _bring,
                (
                    (k_pool, v_pool), (k_boxes, v_boxes), barriers, board, inputs,
                    WINDOW, KV_HEADS, GROUP, BLOCK_SIZE, BLOCK_R, HEAD_DIM, HALF_M, HALF_T, STAGES,
                ),
            ),
            (_attend, (0, shared, board, SINKS, WINDOW, HEAD_DIM, KV_HEADS, GROUP, HALF_M, HALF_T, STAGES)),
            (_attend, (1, shared, board, SINKS, WINDOW, HEAD_DIM, KV_HEADS, GROUP, HALF_M, HALF_T, STAGES)),
        ],
        [4, 4],
        [240, 240],
    )  # fmt: skip


@gluon.jit(do_not_specialize=["num_rows", "shortest", "longest", "num_programs"])
def merge(
    out, partial_acc, partial_stats, next_item, query_start, seq_lens, sinks, num_rows, num_programs, shortest, longest,
    SINKS: gl.constexpr, WINDOW: gl.constexpr, HEAD_DIM: gl.constexpr, KV_HEADS: gl.constexpr, GROUP: gl.constexpr,
    BLOCK_R: gl.constexpr, HALF_M: gl.constexpr, HALF_T: gl.constexpr, MERGE_M: gl.constexpr,
):  # fmt: skip
    """What `extend` left in parts. A program takes MERGE_M queries of a unit, part after part, and resets next_item."""
    if (gl.program_id(0) == 0) & (gl.program_id(1) == 0):
        gl.store(next_item, 0)
    BLOCK_M: gl.constexpr = 2 * HALF_M
    tiles_R = _tiles_of_rows(query_start, num_rows, shortest, longest, GROUP, BLOCK_M, BLOCK_R)
    num_tiles = gl.sum(tiles_R, 0)
    num_units = num_tiles * KV_HEADS
    num_parts = _parts(num_units, num_programs)
    unit = gl.program_id(0)
    if (num_parts == 1) | (unit >= num_units):
        return
    ends_R = gl.associative_scan(tiles_R, 0, _add)
    head, _row, begin, query_len, context_len, m_tile = _find(query_start, seq_lens, unit, tiles_R, ends_R, num_tiles)
    _first, last, low = _seen(context_len, query_len, m_tile, WINDOW, GROUP, BLOCK_M)
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [128 // HEAD_DIM, HEAD_DIM // 4], [4, 1], [1, 0])
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    inside_M = gl.program_id(1) * MERGE_M + gl.arange(0, MERGE_M, layout=rows)
    dims_K = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, layout))
    packed_M = m_tile * BLOCK_M + inside_M
    valid_M = packed_M < query_len * GROUP
    max_M = gl.full([MERGE_M], float("-inf"), gl.float32, rows)
    sum_M = gl.zeros([MERGE_M], gl.float32, rows)
    acc_MK = gl.zeros([MERGE_M, HEAD_DIM], gl.float32, layout)
    num_steps = last // (2 * HALF_T) + 1 - low // (2 * HALF_T)
    share = (num_steps + num_parts - 1) // num_parts
    num_parts_used = (num_steps + share - 1) // share
    for at in range(0, num_parts_used, 4):
        for part in gl.static_range(4):  # their loads are all on their way at once
            is_part = (at + part < num_parts_used) & (inside_M >= 0)
            kept_M = (unit * num_parts + at + part) * BLOCK_M + inside_M
            part_max_M = gl.load(partial_stats + 2 * kept_M, mask=is_part, other=float("-inf"))
            part_sum_M = gl.load(partial_stats + 2 * kept_M + 1, mask=is_part, other=0.0)
            from_MK = kept_M[:, None] * HEAD_DIM + dims_K[None, :]
            part_MK = gl.load(partial_acc + from_MK, mask=is_part[:, None], other=0.0)
            top_M = gl.maximum(max_M, part_max_M)
            base_M = gl.where(top_M == float("-inf"), 0.0, top_M)
            keep_M = gl.exp2(max_M - base_M)
            take_M = gl.exp2(part_max_M - base_M)
            sum_M = sum_M * keep_M + part_sum_M * take_M
            acc_MK = acc_MK * keep_M[:, None] + part_MK * take_M[:, None]
            max_M = top_M
    acc_MK = acc_MK * _factor(max_M, sum_M, sinks, head * GROUP + packed_M % GROUP, SINKS)[:, None]
    to_M = ((begin + packed_M // GROUP).to(gl.int64) * (KV_HEADS * GROUP) + head * GROUP + packed_M % GROUP) * HEAD_DIM
    gl.store(out + to_M[:, None] + dims_K[None, :], acc_MK.to(out.dtype.element_ty), mask=valid_M[:, None])
