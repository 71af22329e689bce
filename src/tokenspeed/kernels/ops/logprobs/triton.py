# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities in Triton: two launches over the logits as they are, no softmax written, nothing waits.

Knows the shapes and the memory in between; the device code is in the file beside it.
"""

from __future__ import annotations

import torch

from tokenspeed.kernels.ops.logprobs import MAX_TOP, Logprobs, LogprobsFn
from tokenspeed.kernels.platform import triton_on_cuda
from tokenspeed.kernels.registry import Band, KernelContext, Solution

BLOCK = 2048
"""Tokens that a program of the first launch reads."""
GROUP = 128
"""Tokens of a group: what is read again for each of the most likely."""
NUM_FACTS = 2


def build(ctx: KernelContext) -> LogprobsFn:
    """The op on one device. On the CPU Triton interprets it."""
    from tokenspeed.kernels.ops.logprobs import _triton

    del ctx

    def logprobs(logits_SV: torch.Tensor, token_ids_S: torch.Tensor, num_top: int) -> Logprobs:
        assert logits_SV.dtype is torch.float32, logits_SV.dtype
        assert 0 <= num_top <= MAX_TOP, num_top
        num_rows, vocab_size = logits_SV.shape
        num_top = min(num_top, vocab_size)
        logprobs_S = logits_SV.new_empty(num_rows)
        ranks_S = logits_SV.new_empty(num_rows, dtype=torch.int64)
        top_ids_SK = logits_SV.new_empty(num_rows, num_top, dtype=torch.int64)
        top_SK = logits_SV.new_empty(num_rows, num_top)
        if num_rows == 0:
            return Logprobs(logprobs_S, ranks_S, top_ids_SK, top_SK)
        num_blocks = -(-vocab_size // BLOCK)
        num_groups = num_blocks * (BLOCK // GROUP)
        between = (
            logits_SV.new_empty(NUM_FACTS, num_rows, num_blocks),
            logits_SV.new_empty(num_rows, num_blocks, dtype=torch.int32),
            logits_SV.new_empty(num_rows, num_groups),
        )
        given = (logits_SV, *logits_SV.stride(), token_ids_S.contiguous())
        _triton.survey[num_blocks, num_rows](
            *given, *between, VOCAB_SIZE=vocab_size, NUM_TOP=num_top, BLOCK=BLOCK, GROUP=GROUP, num_warps=8
        )
        _triton.settle[(num_rows,)](
            *given,
            *between,
            num_blocks,
            logprobs_S,
            ranks_S,
            top_ids_SK,
            top_SK,
            VOCAB_SIZE=vocab_size,
            NUM_TOP=num_top,
            MAX_BLOCKS=1 << (num_blocks - 1).bit_length(),
            MAX_GROUPS=1 << (num_groups - 1).bit_length(),
            GROUPS_A_BLOCK=BLOCK // GROUP,
            GROUP=GROUP,
            num_warps=4,
        )
        return Logprobs(logprobs_S, ranks_S, top_ids_SK, top_SK)

    return logprobs


SOLUTION = Solution("triton", Band.PERFORMANT, triton_on_cuda, build, graph_safe=True, batch_invariant=True)
