# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of given tokens and of the most likely ones.

They are those of the model itself: log-softmax of the raw logits, before penalties, biases, temperature and filters.
Knows neither seats nor rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tokenspeed.core.request import TokenLogprobs
from tokenspeed.execution.host_copies import Download

LOGPROB_MIN = -9999.0
"""Stands for minus infinity, which JSON cannot carry."""
_CHUNK_VALUES = 1 << 24


class ScoredTokens:
    """Log-probabilities of one token a row, with num_top_N[n] alternatives, best first. Rows are taken in chunks, so
    that memory stays bounded. Computed at once; read later, without a wait in between."""

    def __init__(self, logits_NV: torch.Tensor, token_ids_N: torch.Tensor, num_top_N: Sequence[int]) -> None:
        step = rows_per_chunk(logits_NV.shape[-1])
        parts = [slice(start, start + step) for start in range(0, len(num_top_N), step)]
        self._num_top_N = num_top_N
        self._chunks = [_scored(logits_NV[part], token_ids_N[part], max(num_top_N[part])) for part in parts]

    def entries(self) -> list[TokenLogprobs]:
        """One a row. rank is 1 + the number of tokens that are strictly more likely."""
        rows = [row for chunk in self._chunks for row in zip(*(x.tolist() for x in chunk.wait()), strict=True)]
        return [
            TokenLogprobs(token_id, chosen, rank, tuple(zip(top_ids[:num], top[:num], strict=True)))
            for (token_id, chosen, rank, top_ids, top), num in zip(rows, self._num_top_N, strict=True)
        ]


def token_logprobs(logits_NV: torch.Tensor, token_ids_N: torch.Tensor, num_top_N: Sequence[int]) -> list[TokenLogprobs]:
    """The entries of ScoredTokens, waited for."""
    return ScoredTokens(logits_NV, token_ids_N, num_top_N).entries()


def rows_per_chunk(vocab_size: int) -> int:
    """How many rows of logits fit the memory bound."""
    return max(1, _CHUNK_VALUES // vocab_size)


def _scored(logits_NV: torch.Tensor, token_ids_N: torch.Tensor, num_top: int) -> Download:
    logprobs_NV = torch.log_softmax(logits_NV.float(), dim=-1)
    chosen_N1 = logprobs_NV.gather(-1, token_ids_N.unsqueeze(-1))
    ranks_N = (logprobs_NV > chosen_N1).sum(dim=-1) + 1
    top_NK, top_ids_NK = logprobs_NV.topk(min(num_top, logprobs_NV.shape[-1]), dim=-1)
    chosen_N = chosen_N1.squeeze(-1).clamp_(LOGPROB_MIN, 0.0)
    return Download(token_ids_N, chosen_N, ranks_N, top_ids_NK, top_NK.clamp_(LOGPROB_MIN, 0.0))
