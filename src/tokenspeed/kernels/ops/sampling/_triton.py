# SPDX-License-Identifier: Apache-2.0
"""Device code of sampling: `survey` reads the logits once, `settle` makes a token of what it found. Knows no tensors.

survey: one program for a block of B tokens of a row. It edits the logits, adds the noise of the draw and leaves a few
numbers: fields of `facts`, (NUM_FACTS, S, N) float32, and the best token, (S, N) int32, for N blocks a row. Rows that
are filtered leave more: what a softmax needs, and the maximum of each group of G tokens.

settle: one program a row. A greedy or open row's token is the best of its blocks' best. A filtered row goes on:
1. a bound that what is kept, or matters, reaches: min-p's own; for top-k one that about k of the group maxima reach,
   and so k tokens at least; for top-p alone what is above the winner of the open draw. The tokens that reach it are
   listed; only groups whose maximum does are read. A list that overflows is no list: the row is read in its place.
2. the least likely of top-k, by bisection, and the mass of what top-k and min-p keep.
3. the draw. A kept set holds each token that is more likely than one in it. So the winner of the open draw, where it
   is kept, is the winner of the filtered draw; where it is not, neither is any token as likely or less, and the next
   winner is looked for among the more likely ones. Each look drops a random part of what remains.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait, libdevice

RAW_MAX: tl.constexpr = tl.constexpr(0)  # of the logits as they came, +inf for NaN
BEST: tl.constexpr = tl.constexpr(1)  # the score that decides: edited logit, or scaled logit and noise
LOGIT_MAX: tl.constexpr = tl.constexpr(2)  # filtered rows: of the edited logits
EXP_SUM: tl.constexpr = tl.constexpr(3)  # filtered rows: of e^(scaled logit − scaled LOGIT_MAX)
INF: tl.constexpr = tl.constexpr(float("inf"))


@triton.jit
def _ln(x, FAST: tl.constexpr):
    """Natural logarithm; FAST is the processor's own, off by 2⁻²² at most (absolute in ½…2, else relative)."""
    if FAST:
        return libdevice.fast_logf(x)
    return tl.log(x)


@triton.jit
def _mix64(x):
    x = x + 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _mix32(x):
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def _row_key(seed_ptr, position_ptr, row):
    """What the noise of a row hashes, uint64."""
    seed = tl.load(seed_ptr + row).to(tl.uint64)
    return _mix64(_mix64(seed) ^ tl.load(position_ptr + row).to(tl.uint64))


@triton.jit
def _gumbel(ids, key, FAST: tl.constexpr):
    """−ln(E) for E = −ln(1 − u), the noise of the reference. E is what decides, most of all where it is small; there
    1 − u would round it away, so a series stands for the logarithm (u < 1/16: off by 1e-8 of E)."""
    bits = _mix32(ids.to(tl.uint32) * 0x9E3779B1 + key.to(tl.uint32))
    bits = _mix32(bits ^ (key >> 32).to(tl.uint32)) & 0x7FFFFFFF
    u = tl.minimum((bits.to(tl.int32).to(tl.float32) + 0.5) * (2.0**-31), 1.0 - 2.0**-24)
    series = u * (1.0 + u * (1.0 / 2 + u * (1.0 / 3 + u * (1.0 / 4 + u * (1.0 / 5 + u * (1.0 / 6))))))
    return -_ln(tl.where(u < 0.0625, series, -_ln(1.0 - u, FAST)), FAST)


@triton.jit
def _rate(temperature):
    """What a logit is multiplied by; never 0, which would make NaN of −inf."""
    return tl.maximum(1.0 / temperature, 1e-37)


@triton.jit
def _index_of(rows_ptr, num, row):
    """Where row stands in rows_ptr, (num,) int64; −1 where it does not."""
    found = -1
    for start in range(0, num, 64):
        index = start + tl.arange(0, 64)
        is_it = tl.load(rows_ptr + index, mask=index < num, other=-1) == row
        found = tl.maximum(found, tl.max(tl.where(is_it, index, -1), 0))
    return found


@triton.jit
def _penalised(
    logit, ids, is_real, row, rows_ptr, num, counts_ptr, counts_step, prompt_ptr, prompt_step,
    presence_ptr, frequency_ptr, repetition_ptr, HAS_PROMPT: tl.constexpr,
):  # fmt: skip
    """The logits of a block after penalties."""
    index = _index_of(rows_ptr, num, row)
    if index >= 0:
        counts = tl.load(counts_ptr + index.to(tl.int64) * counts_step + ids, mask=is_real, other=0)
        if HAS_PROMPT:
            is_prompt = tl.load(prompt_ptr + index.to(tl.int64) * prompt_step + ids, mask=is_real, other=0) != 0
            factor = tl.load(repetition_ptr + index)
            repeated = tl.where(logit > 0, tl.div_rn(logit, factor), logit * factor)
            logit = tl.where(is_prompt | (counts > 0), repeated, logit)
        logit = logit - tl.load(frequency_ptr + index) * counts.to(tl.float32)
        logit = tl.where(counts > 0, logit - tl.load(presence_ptr + index), logit)
    return logit


@triton.jit
def _with_edits(logit, ids, first_id, row, rows_ptr, ids_ptr, values_ptr, num, BLOCK: tl.constexpr):
    """The logits of a block with the values of its edits added, in their order."""
    for start in range(0, num, 64):
        index = start + tl.arange(0, 64)
        is_row = tl.load(rows_ptr + index, mask=index < num, other=-1) == row
        edited_id = tl.load(ids_ptr + index, mask=is_row, other=-1)
        is_here = is_row & (edited_id >= first_id) & (edited_id < first_id + BLOCK)
        left = tl.sum(is_here.to(tl.int32), 0)
        last = -1
        while left > 0:  # few of a row's edits lie in one block
            last = tl.min(tl.where(is_here & (index > last), index, 0x7FFFFFFF), 0)
            logit = tl.where(ids == tl.load(ids_ptr + last), logit + tl.load(values_ptr + last), logit)
            left -= 1
    return logit


@triton.jit
def _masked(logit, ids, is_real, row, rows_ptr, bits_ptr, bits_step, num):
    """The logits of a block, −inf where the row's mask has no bit."""
    index = _index_of(rows_ptr, num, row)
    if index >= 0:
        words = tl.load(bits_ptr + index.to(tl.int64) * bits_step + ids // 32, mask=is_real, other=0)
        logit = tl.where(((words >> (ids % 32)) & 1) != 0, logit, -INF)
    return logit


@triton.jit
def _is_filtered(row, top_k_ptr, top_p_ptr, min_p_ptr):
    return (tl.load(top_k_ptr + row) > 0) | (tl.load(top_p_ptr + row) < 1.0) | (tl.load(min_p_ptr + row) > 0.0)


@triton.jit
def survey(
    logits_ptr, row_step, id_step, first_row,
    penalty_rows_ptr, num_penalties, counts_ptr, counts_step, prompt_ptr, prompt_step,
    presence_ptr, frequency_ptr, repetition_ptr,
    edit_rows_ptr, edit_ids_ptr, edit_values_ptr, num_edits,
    mask_rows_ptr, mask_bits_ptr, mask_step, num_masks,
    temperature_ptr, seed_ptr, position_ptr, top_k_ptr, top_p_ptr, min_p_ptr,
    facts_ptr, best_ids_ptr, group_max_ptr, edited_ptr,
    VOCAB_SIZE: tl.constexpr, GREEDY_BELOW: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
    HAS_PENALTIES: tl.constexpr, HAS_PROMPT: tl.constexpr, HAS_EDITS: tl.constexpr, HAS_MASKS: tl.constexpr,
    HAS_DRAWS: tl.constexpr, HAS_FILTERS: tl.constexpr, FAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (block, row). first_row: the row of the whole call that row 0 of this launch is."""
    block, row = tl.program_id(0), tl.program_id(1)
    num_blocks, num_rows = tl.num_programs(0), tl.num_programs(1)
    if PDL:
        gdc_launch_dependents()
    first_id = block * BLOCK
    ids = first_id + tl.arange(0, BLOCK)
    is_real = ids < VOCAB_SIZE
    logit = tl.load(logits_ptr + row.to(tl.int64) * row_step + ids * id_step, mask=is_real, other=-INF)
    facts_ptr += row * num_blocks + block
    field_step = num_rows * num_blocks
    tl.store(facts_ptr + RAW_MAX * field_step, tl.max(tl.where(logit == logit, logit, INF), 0))  # noqa: PLR0124

    call_row = first_row + row
    if HAS_PENALTIES:
        logit = _penalised(
            logit, ids, is_real, call_row, penalty_rows_ptr, num_penalties, counts_ptr, counts_step,
            prompt_ptr, prompt_step, presence_ptr, frequency_ptr, repetition_ptr, HAS_PROMPT,
        )  # fmt: skip
    if HAS_EDITS:
        logit = _with_edits(
            logit, ids, first_id, call_row, edit_rows_ptr, edit_ids_ptr, edit_values_ptr, num_edits, BLOCK
        )
    if HAS_MASKS:
        logit = _masked(logit, ids, is_real, call_row, mask_rows_ptr, mask_bits_ptr, mask_step, num_masks)

    score = logit
    if HAS_DRAWS:
        temperature = tl.load(temperature_ptr + row)
        if temperature >= GREEDY_BELOW:
            scaled = logit * _rate(temperature)
            score = scaled + _gumbel(ids, _row_key(seed_ptr, position_ptr, row), FAST)
            if HAS_FILTERS:
                if _is_filtered(row, top_k_ptr, top_p_ptr, min_p_ptr):
                    top = tl.max(logit, 0)
                    gap = (logit - tl.where(top == -INF, 0.0, top)) * _rate(temperature)
                    tl.store(facts_ptr + LOGIT_MAX * field_step, top)
                    tl.store(facts_ptr + EXP_SUM * field_step, tl.sum(tl.exp(gap), 0))
                    groups = (row * num_blocks + block) * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
                    tl.store(group_max_ptr + groups, tl.max(tl.reshape(logit, (BLOCK // GROUP, GROUP)), 1))
                    if HAS_PENALTIES or HAS_EDITS or HAS_MASKS:
                        tl.store(edited_ptr + row.to(tl.int64) * VOCAB_SIZE + ids, logit, mask=is_real)
    best, offset = tl.max(score, 0, return_indices=True)
    tl.store(facts_ptr + BEST * field_step, best)
    tl.store(best_ids_ptr + row * num_blocks + block, first_id + offset)


@triton.jit
def _order(value):
    """int32 that sorts like value; the same bits twice over give value back."""
    bits = value.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _value(order):
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _threshold(source_ptr, step, num, low, high, count, k, slack, TILE: tl.constexpr):
    """A number that k of source_ptr[: num] reach, and at most `slack` more unless they are equals.

    low: a number that `count` of them reach. high: the highest of them. A quarter of the range is left by each look:
    how many reach each of the three numbers between is counted at once, in 20 bits each of one sum.
    """
    reached = _order(low).to(tl.int64)
    missed = _order(high).to(tl.int64) + 1
    count = tl.full([], 0, tl.int32) + count  # a tensor even where the compiler knows the number
    while (count > k + slack) & (missed - reached > 1):
        middle = reached + (missed - reached + 1) // 2
        lower = reached + (middle - reached + 1) // 2
        upper = middle + (missed - middle) // 2
        reaching = tl.zeros([TILE], tl.int64)
        for start in range(0, num, TILE):
            index = start + tl.arange(0, TILE)
            order = _order(tl.load(source_ptr + index.to(tl.int64) * step, mask=index < num, other=-INF))
            reaching += (order >= lower).to(tl.int64) + ((order >= middle).to(tl.int64) << 20)
            reaching += (order >= upper).to(tl.int64) << 40
        counts = tl.sum(reaching, 0)
        at_lower = (counts & 0xFFFFF).to(tl.int32)
        at_middle = ((counts >> 20) & 0xFFFFF).to(tl.int32)
        at_upper = (counts >> 40).to(tl.int32)
        missed = tl.where(at_lower < k, lower, tl.where(at_middle < k, middle, tl.where(at_upper < k, upper, missed)))
        if at_lower >= k:
            reached = tl.where(at_upper >= k, upper, tl.where(at_middle >= k, middle, lower))
            count = tl.where(at_upper >= k, at_upper, tl.where(at_middle >= k, at_middle, at_lower))
    return _value(reached.to(tl.int32))


@triton.jit
def _listed(
    row_ptr, step, group_max_ptr, num_groups, low, groups_ptr, list_ptr, list_ids_ptr,
    VOCAB_SIZE: tl.constexpr, MAX_GROUPS: tl.constexpr, GROUP: tl.constexpr, CAPACITY: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """How many tokens have a logit ≥ low, or some number above CAPACITY; those tokens make the list, by id."""
    groups = tl.arange(0, MAX_GROUPS)
    highest = tl.load(group_max_ptr + groups, mask=groups < num_groups, other=-INF)
    is_open = (highest >= low) & (highest > -INF)
    tl.store(groups_ptr + tl.cumsum(is_open.to(tl.int32), 0) - 1, groups, mask=is_open)
    num_open = tl.sum(is_open.to(tl.int32), 0)
    tl.debug_barrier()  # what one thread wrote, others read
    num = 0
    start = 0
    while (start < num_open) & (num <= CAPACITY):
        place = start + tl.arange(0, TILE // GROUP)
        group = tl.load(groups_ptr + place, mask=place < num_open, other=num_groups)
        ids = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        logit = tl.load(row_ptr + ids.to(tl.int64) * step, mask=ids < VOCAB_SIZE, other=-INF)
        is_in = (logit >= low) & (logit > -INF)
        counts = tl.sum(is_in.to(tl.int32), 1)
        before = num + tl.cumsum(counts, 0) - counts
        slot = before[:, None] + tl.cumsum(is_in.to(tl.int32), 1) - 1
        is_stored = is_in & (slot < CAPACITY)
        tl.store(list_ptr + slot, logit, mask=is_stored)
        tl.store(list_ids_ptr + slot, ids, mask=is_stored)
        num += tl.sum(counts, 0)
        start += TILE // GROUP
    tl.debug_barrier()
    return num


@triton.jit
def _mass(source_ptr, step, num, rate, top, low, low_gap, above, TILE: tl.constexpr):
    """Σ e^gap over the kept tokens whose logit is above `above`, and how many they are."""
    mass = tl.zeros([TILE], tl.float32)
    count = tl.zeros([TILE], tl.int32)
    for start in range(0, num, TILE):
        index = start + tl.arange(0, TILE)
        logit = tl.load(source_ptr + index.to(tl.int64) * step, mask=index < num, other=-INF)
        gap = (logit - top) * rate
        is_in = (logit > above) & (logit >= low) & (gap >= low_gap)
        mass += tl.where(is_in, tl.exp(gap), 0.0)
        count += is_in.to(tl.int32)
    return tl.sum(mass, 0), tl.sum(count, 0)


@triton.jit
def _drawn(
    source_ptr, step, num, ids_ptr, rate, top, low, low_gap, above, key,
    IS_LIST: tl.constexpr, FAST: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The draw among the kept tokens whose logit is above `above`: its id and its logit."""
    best = tl.full([TILE], -INF, tl.float32)
    best_index = tl.arange(0, TILE)
    for start in range(0, num, TILE):
        index = start + tl.arange(0, TILE)
        logit = tl.load(source_ptr + index.to(tl.int64) * step, mask=index < num, other=-INF)
        ids = index
        if IS_LIST:
            ids = tl.load(ids_ptr + index, mask=index < num, other=0)
        gap = (logit - top) * rate
        is_in = (logit > above) & (logit >= low) & (gap >= low_gap)
        score = tl.where(is_in, gap + _gumbel(ids, key, FAST), -INF)
        best_index = tl.where(score > best, index, best_index)
        best = tl.maximum(best, score)
    # Of equal scores the lowest place, and so the lowest id.
    place = tl.min(tl.where(best == tl.max(best, 0), best_index, 0x7FFFFFFF), 0)
    place = tl.minimum(place, num - 1)
    token_id = place
    if IS_LIST:
        token_id = tl.load(ids_ptr + place)
    return token_id, tl.load(source_ptr + place.to(tl.int64) * step)


@triton.jit
def _chosen(
    token_id, drawn_logit, source_ptr, step, num, num_in, ids_ptr, rate, key, top, exp_sum, low, low_gap,
    top_k, top_p, is_narrowed, IS_LIST: tl.constexpr, FAST: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Steps 2 and 3 over a list or a row. num_in: how many of its num tokens reach low, at most."""
    lowest = tl.full([], float("-inf"), tl.float32)
    if (top_k > 0) & (top_k < num_in):
        low = _threshold(source_ptr, step, num, low, top, num_in, top_k.to(tl.int32), 0, TILE)
    if (drawn_logit < low) | ((drawn_logit - top) * rate < low_gap):
        token_id, drawn_logit = _drawn(
            source_ptr, step, num, ids_ptr, rate, top, low, low_gap, lowest, key, IS_LIST, FAST, TILE
        )
    if top_p < 1.0:
        total = exp_sum
        if is_narrowed:
            total, _ = _mass(source_ptr, step, num, rate, top, low, low_gap, lowest, TILE)
        is_settled = False
        while not is_settled:
            mass, count = _mass(source_ptr, step, num, rate, top, low, low_gap, drawn_logit, TILE)
            is_settled = (count == 0) | (mass < top_p * total)
            if not is_settled:
                next_id, next_logit = _drawn(
                    source_ptr, step, num, ids_ptr, rate, top, low, low_gap, drawn_logit, key, IS_LIST, FAST, TILE
                )
                is_settled = not (next_logit > drawn_logit)  # always it is; were it not, this would go on for ever
                token_id = next_id
                drawn_logit = next_logit
    return token_id


@triton.jit
def _filtered(
    token_id, drawn_logit, row_ptr, step, temperature, key, top, exp_sum, top_k, top_p, min_p,
    group_max_ptr, num_groups, groups_ptr, list_ptr, list_ids_ptr,
    VOCAB_SIZE: tl.constexpr, MAX_GROUPS: tl.constexpr, GROUP: tl.constexpr, CAPACITY: tl.constexpr,
    LIST_TILE: tl.constexpr, ROW_TILE: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """The token of a filtered row, given the one of the open draw. top: the highest logit."""
    rate = _rate(temperature)
    lowest = tl.full([], float("-inf"), tl.float32)
    is_narrowed = (top_k > 0) | (min_p > 0.0)
    low = lowest  # a kept token's logit reaches it
    low_gap = lowest  # and its scaled logit comes as near to the top
    if min_p > 0.0:
        low_gap = tl.minimum(tl.log(min_p), 0.0)  # the most likely token always stays
        low = top + low_gap / rate - 1e-6 * (tl.abs(top) - low_gap / rate)
    if (top_k > 0) & (top_k <= num_groups):
        groups = tl.arange(0, MAX_GROUPS)
        least = tl.min(tl.load(group_max_ptr + groups, mask=groups < num_groups, other=INF), 0)
        k = top_k.to(tl.int32)
        bound = _threshold(group_max_ptr, 1, num_groups, least, top, num_groups, k, 4 + k // 8, LIST_TILE)
        low = tl.maximum(low, bound)
    list_low = low
    if not is_narrowed:
        list_low = _value(_order(drawn_logit) + 1)
    num = _listed(
        row_ptr, step, group_max_ptr, num_groups, list_low, groups_ptr, list_ptr, list_ids_ptr,
        VOCAB_SIZE, MAX_GROUPS, GROUP, CAPACITY, LIST_TILE,
    )  # fmt: skip
    if num <= CAPACITY:
        token_id = _chosen(
            token_id, drawn_logit, list_ptr, 1, num, num, list_ids_ptr, rate, key, top, exp_sum, low, low_gap,
            top_k, top_p, is_narrowed, True, FAST, LIST_TILE,
        )  # fmt: skip
    else:
        token_id = _chosen(
            token_id, drawn_logit, row_ptr, step, VOCAB_SIZE, VOCAB_SIZE, list_ids_ptr, rate, key, top, exp_sum, low,
            low_gap, top_k, top_p, is_narrowed, False, FAST, ROW_TILE,
        )  # fmt: skip
    return token_id


@triton.jit
def settle(
    logits_ptr, row_step, id_step, num_blocks,
    temperature_ptr, seed_ptr, position_ptr, top_k_ptr, top_p_ptr, min_p_ptr,
    facts_ptr, best_ids_ptr, group_max_ptr, groups_ptr, list_ptr, list_ids_ptr, token_ids_ptr, is_faulty_ptr,
    VOCAB_SIZE: tl.constexpr, GREEDY_BELOW: tl.constexpr, MAX_BLOCKS: tl.constexpr, MAX_GROUPS: tl.constexpr,
    GROUP: tl.constexpr, GROUPS_A_BLOCK: tl.constexpr, CAPACITY: tl.constexpr, LIST_TILE: tl.constexpr,
    ROW_TILE: tl.constexpr, HAS_FILTERS: tl.constexpr, FAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row). logits_ptr: the edited logits where rows have edits."""
    row, num_rows = tl.program_id(0), tl.num_programs(0)
    if PDL:
        gdc_wait()
    blocks = tl.arange(0, MAX_BLOCKS)
    is_real = blocks < num_blocks
    field_step = num_rows * num_blocks
    facts_ptr += row * num_blocks + blocks
    raw_max = tl.max(tl.load(facts_ptr + RAW_MAX * field_step, mask=is_real, other=-INF), 0)
    is_faulty = (raw_max == INF) | (raw_max == -INF)
    best, block = tl.max(tl.load(facts_ptr + BEST * field_step, mask=is_real, other=-INF), 0, return_indices=True)
    # Where nothing is above −inf the first block is as good as any; a faulty row may name one that is not there.
    block = tl.where(block < num_blocks, block, 0)
    token_id = tl.load(best_ids_ptr + row * num_blocks + block)
    if HAS_FILTERS:
        temperature = tl.load(temperature_ptr + row)
        is_drawn = (temperature >= GREEDY_BELOW) & (best > -INF) & (not is_faulty)
        if is_drawn & _is_filtered(row, top_k_ptr, top_p_ptr, min_p_ptr):
            block_top = tl.load(facts_ptr + LOGIT_MAX * field_step, mask=is_real, other=-INF)
            block_sum = tl.load(facts_ptr + EXP_SUM * field_step, mask=is_real, other=0.0)
            top = tl.max(block_top, 0)
            exp_sum = tl.sum(block_sum * tl.exp((block_top - top) * _rate(temperature)), 0)
            num_groups = num_blocks * GROUPS_A_BLOCK
            row_ptr = logits_ptr + row.to(tl.int64) * row_step
            token_id = _filtered(
                token_id, tl.load(row_ptr + token_id.to(tl.int64) * id_step), row_ptr, id_step, temperature,
                _row_key(seed_ptr, position_ptr, row), top, exp_sum,
                tl.load(top_k_ptr + row), tl.load(top_p_ptr + row), tl.load(min_p_ptr + row),
                group_max_ptr + row * num_groups, num_groups, groups_ptr + row * num_groups,
                list_ptr + row * CAPACITY, list_ids_ptr + row * CAPACITY,
                VOCAB_SIZE, MAX_GROUPS, GROUP, CAPACITY, LIST_TILE, ROW_TILE, FAST,
            )  # fmt: skip
    tl.store(token_ids_ptr + row, tl.where(is_faulty, 0, token_id).to(tl.int64))
    tl.store(is_faulty_ptr + row, is_faulty)
