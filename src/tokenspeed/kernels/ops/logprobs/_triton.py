# SPDX-License-Identifier: Apache-2.0
"""Device code of log-probabilities: survey reads each block of a row once, settle joins the blocks. Knows no tensors.

survey leaves fields of `facts`, (NUM_FACTS, S, N) float32 for N blocks a row, how many of the block are above the
row's token, (S, N) int32, and the maximum of each group of G tokens. settle takes the most likely one after the other:
the best group has it, and gives its next best instead.
"""

import triton
import triton.language as tl

MAX: tl.constexpr = tl.constexpr(0)
EXP_SUM: tl.constexpr = tl.constexpr(1)  # of e^(logit − MAX)
INF: tl.constexpr = tl.constexpr(float("inf"))
NOTHING: tl.constexpr = tl.constexpr(-(1 << 63))  # sorts behind every key


@triton.jit
def _key(logit, ids, is_real):
    """int64 that sorts tokens, the best last: by logit, of equals the highest id first."""
    bits = tl.where(logit == 0.0, 0.0, logit).to(tl.int32, bitcast=True)  # −0 equals 0
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(is_real, (order.to(tl.int64) << 32) | (0x7FFFFFFF - ids).to(tl.int64), NOTHING)


@triton.jit
def _id(key):
    return 0x7FFFFFFF - (key & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def survey(
    logits_ptr, row_step, id_step, token_ids_ptr, facts_ptr, num_above_ptr, group_max_ptr,
    VOCAB_SIZE: tl.constexpr, NUM_TOP: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
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
        groups = place * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
        tl.store(group_max_ptr + groups, tl.max(tl.reshape(logit, (BLOCK // GROUP, GROUP)), 1))


@triton.jit
def settle(
    logits_ptr, row_step, id_step, token_ids_ptr, facts_ptr, num_above_ptr, group_max_ptr, num_blocks,
    logprobs_ptr, ranks_ptr, top_ids_ptr, top_logprobs_ptr,
    VOCAB_SIZE: tl.constexpr, NUM_TOP: tl.constexpr, MAX_BLOCKS: tl.constexpr, MAX_GROUPS: tl.constexpr,
    GROUPS_A_BLOCK: tl.constexpr, GROUP: tl.constexpr,
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
    row_ptr = logits_ptr + row.to(tl.int64) * row_step
    chosen = tl.load(row_ptr + tl.load(token_ids_ptr + row) * id_step)
    tl.store(logprobs_ptr + row, chosen - top - log_sum)
    num_above = tl.sum(tl.load(num_above_ptr + place, mask=is_real, other=0), 0)
    tl.store(ranks_ptr + row, num_above.to(tl.int64) + 1)
    if NUM_TOP > 0:
        groups = tl.arange(0, MAX_GROUPS)
        num_groups = num_blocks * GROUPS_A_BLOCK
        best = tl.load(group_max_ptr + row * num_groups + groups, mask=groups < num_groups, other=-INF)
        # Of equals in several groups the first group has the lowest id, so its first id can stand for the one it has.
        best = _key(best, groups * GROUP, groups < num_groups)
        last = tl.full([], 0x7FFFFFFFFFFFFFFF, tl.int64)
        for index in range(NUM_TOP):
            group = _id(tl.max(best, 0)) // GROUP
            ids = group * GROUP + tl.arange(0, GROUP)
            logit = tl.load(row_ptr + ids.to(tl.int64) * id_step, mask=ids < VOCAB_SIZE, other=-INF)
            keys = _key(logit, ids, ids < VOCAB_SIZE)
            last = tl.max(tl.where(keys < last, keys, NOTHING), 0)
            following = tl.max(tl.where(keys < last, keys, NOTHING), 0)
            best = tl.where(groups == group, following, best)
            token_id = tl.minimum(_id(last), VOCAB_SIZE - 1)  # among NaN there may be nothing left
            value = tl.load(row_ptr + token_id.to(tl.int64) * id_step)
            tl.store(top_logprobs_ptr + row * NUM_TOP + index, value - top - log_sum)
            tl.store(top_ids_ptr + row * NUM_TOP + index, token_id.to(tl.int64))
