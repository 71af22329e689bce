# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of given tokens and of the most likely ones.

They are those of the model itself: log-softmax of the raw logits, before penalties, biases, temperature and filters.
Knows neither seats nor rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tokenspeed.core.request import TokenLogprobs

LOGPROB_MIN = -9999.0
"""Stands for minus infinity, which JSON cannot carry."""
_CHUNK_VALUES = 1 << 24


def token_logprobs(logits_NV: torch.Tensor, token_ids_N: torch.Tensor, num_top_N: Sequence[int]) -> list[TokenLogprobs]:
    """One entry a row, with num_top_N[n] alternatives, best first. rank is 1 + the number of tokens that are strictly
    more likely. Rows are taken in chunks, so that memory stays bounded."""
    vocab_size = logits_NV.shape[-1]
    step = max(1, _CHUNK_VALUES // vocab_size)
    entries: list[TokenLogprobs] = []
    for start in range(0, len(num_top_N), step):
        part = slice(start, start + step)
        entries.extend(_chunk(logits_NV[part], token_ids_N[part], num_top_N[part]))
    return entries


def rows_per_chunk(vocab_size: int) -> int:
    """How many rows of logits fit the memory bound."""
    return max(1, _CHUNK_VALUES // vocab_size)


def _chunk(logits_NV: torch.Tensor, token_ids_N: torch.Tensor, num_top_N: Sequence[int]) -> list[TokenLogprobs]:
    logprobs_NV = torch.log_softmax(logits_NV.float(), dim=-1)
    chosen_N1 = logprobs_NV.gather(-1, token_ids_N.unsqueeze(-1))
    ranks = ((logprobs_NV > chosen_N1).sum(dim=-1) + 1).tolist()
    width = min(max(num_top_N), logprobs_NV.shape[-1])
    top_NK, top_ids_NK = logprobs_NV.topk(width, dim=-1)
    chosen = chosen_N1.squeeze(-1).clamp_(LOGPROB_MIN, 0.0).tolist()
    top, top_ids = top_NK.clamp_(LOGPROB_MIN, 0.0).tolist(), top_ids_NK.tolist()
    return [
        TokenLogprobs(
            token_id, chosen[n], ranks[n], tuple(zip(top_ids[n][: num_top_N[n]], top[n][: num_top_N[n]], strict=True))
        )
        for n, token_id in enumerate(token_ids_N.tolist())
    ]
