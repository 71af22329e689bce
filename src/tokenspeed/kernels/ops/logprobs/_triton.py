# SPDX-License-Identifier: Apache-2.0
"""Device code of log-probabilities: survey reads each block of a row once, settle joins the blocks. Knows no tensors.

survey leaves fields of `facts`, (NUM_FACTS, S, N) float32 for N blocks a row, how many of the block are above the
row's token, (S, N) int32, and the block's own K most likely, (S, N, K): the row's K most likely are among those.
"""

import triton
import triton.language as tl

MAX: tl.constexpr = tl.constexpr(0)
EXP_SUM: tl.constexpr = tl.constexpr(1)  # of e^(logit − MAX)
INF: tl.constexpr = tl.constexpr(float("inf"))
NO_ID: tl.constexpr = tl.constexpr(0x7FFFFFFF)  # sorts behind every id


@triton.jit
def _next(logit, ids, last_logit, last_id):
    """The best of what comes after (last_logit, last_id): higher logits first, of equals lower ids first."""
    is_left = (ids != NO_ID) & ((logit < last_logit) | ((logit == last_logit) & (ids > last_id)))
    best = tl.max(tl.where(is_left, logit, -INF), 0)
    return best, tl.min(tl.where(is_left & (logit == best), ids, NO_ID), 0)


@triton.jit
def survey(
    logits_ptr, row_step, id_step, token_ids_ptr, facts_ptr, num_above_ptr, top_ptr, top_ids_ptr,
    VOCAB_SIZE: tl.constexpr, NUM_TOP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (block, row)."""
    block, row = tl.program_id(0), tl.program_id(1)
    num_blocks, num_rows = tl.num_programs(0), tl.num_programs(1)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    is_real = ids < VOCAB_SIZE
    row_ptr = logits_ptr + row.to(tl.int64) * row_step
    logit = tl.load(row_ptr + ids * id_step, mask=is_real, other=-INF)
    chosen = tl.load(row_ptr + tl.load(token_ids_ptr + row) * id_step)
    place = row * num_blocks + block
    top = tl.max(logit, 0)
    gap = logit - tl.where(top == -INF, 0.0, top)
    tl.store(facts_ptr + MAX * num_rows * num_blocks + place, top)
    tl.store(facts_ptr + EXP_SUM * num_rows * num_blocks + place, tl.sum(tl.exp(gap), 0))
    tl.store(num_above_ptr + place, tl.sum((logit > chosen).to(tl.int32), 0))
    if NUM_TOP > 0:
        ids = tl.where(is_real, ids, NO_ID)
        last, last_id = INF, -1
        for index in range(NUM_TOP):
            last, last_id = _next(logit, ids, last, last_id)
            tl.store(top_ptr + place * NUM_TOP + index, last)
            tl.store(top_ids_ptr + place * NUM_TOP + index, last_id)


@triton.jit
def settle(
    logits_ptr, row_step, id_step, token_ids_ptr, facts_ptr, num_above_ptr, top_ptr, top_ids_ptr, num_blocks,
    logprobs_ptr, ranks_ptr, row_top_ids_ptr, row_top_ptr,
    NUM_TOP: tl.constexpr, MAX_BLOCKS: tl.constexpr, MAX_TOPS: tl.constexpr,
):  # fmt: skip
    """Program (row)."""
    row, num_rows = tl.program_id(0), tl.num_programs(0)
    blocks = tl.arange(0, MAX_BLOCKS)
    is_real = blocks < num_blocks
    place = row * num_blocks + blocks
    block_top = tl.load(facts_ptr + MAX * num_rows * num_blocks + place, mask=is_real, other=-INF)
    block_sum = tl.load(facts_ptr + EXP_SUM * num_rows * num_blocks + place, mask=is_real, other=0.0)
    top = tl.max(block_top, 0)
    log_sum = tl.log(tl.sum(block_sum * tl.exp(block_top - top), 0))
    chosen = tl.load(logits_ptr + row.to(tl.int64) * row_step + tl.load(token_ids_ptr + row) * id_step)
    tl.store(logprobs_ptr + row, chosen - top - log_sum)
    num_above = tl.sum(tl.load(num_above_ptr + place, mask=is_real, other=0), 0)
    tl.store(ranks_ptr + row, num_above.to(tl.int64) + 1)
    if NUM_TOP > 0:
        tops = tl.arange(0, MAX_TOPS)
        num_tops = num_blocks * NUM_TOP
        logit = tl.load(top_ptr + row * num_tops + tops, mask=tops < num_tops, other=-INF)
        ids = tl.load(top_ids_ptr + row * num_tops + tops, mask=tops < num_tops, other=NO_ID)
        last, last_id = INF, -1
        for index in range(NUM_TOP):
            last, last_id = _next(logit, ids, last, last_id)
            tl.store(row_top_ptr + row * NUM_TOP + index, last - top - log_sum)
            tl.store(row_top_ids_ptr + row * NUM_TOP + index, last_id.to(tl.int64))
