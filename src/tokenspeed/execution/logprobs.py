# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of given tokens and of the most likely ones.

They are those of the model itself: log-softmax of the raw logits, before penalties, biases, temperature and filters.
Knows neither seats nor rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tokenspeed.core.request import TokenLogprobs
from tokenspeed.execution.host_copies import Download
from tokenspeed.kernels.ops.logprobs import MAX_TOP, LogprobsFn

LOGPROB_MIN = -9999.0
"""Stands for minus infinity, which JSON cannot carry."""
_CHUNK_VALUES = 1 << 24
_NUM_TOP = (0, 1, 5, MAX_TOP)
"""A kernel is compiled for each, so that others take the next of them."""


class ScoredTokens:
    """Log-probabilities of one token a row, with num_top_N[n] alternatives, best first, at most MAX_TOP. Rows are taken
    in chunks, so that memory stays bounded. Computed at once; read later, without a wait in between."""

    def __init__(
        self, op: LogprobsFn, logits_NV: torch.Tensor, token_ids_N: torch.Tensor, num_top_N: Sequence[int]
    ) -> None:
        step = rows_per_chunk(logits_NV.shape[-1])
        parts = [slice(start, start + step) for start in range(0, len(num_top_N), step)]
        self._num_top_N = num_top_N
        self._chunks = [_scored(op, logits_NV[part], token_ids_N[part], max(num_top_N[part])) for part in parts]

    def entries(self) -> list[TokenLogprobs]:
        """One a row. rank is 1 + the number of tokens that are strictly more likely."""
        most = max(self._num_top_N)
        rows = [row for chunk in self._chunks for row in zip(*(_finite(x, most) for x in chunk.wait()), strict=True)]
        return [
            TokenLogprobs(token_id, chosen, rank, tuple(zip(top_ids[:num], top[:num], strict=True)))
            for (token_id, chosen, rank, top_ids, top), num in zip(rows, self._num_top_N, strict=True)
        ]


def token_logprobs(
    op: LogprobsFn, logits_NV: torch.Tensor, token_ids_N: torch.Tensor, num_top_N: Sequence[int]
) -> list[TokenLogprobs]:
    """The entries of ScoredTokens, waited for."""
    return ScoredTokens(op, logits_NV, token_ids_N, num_top_N).entries()


def touch(op: LogprobsFn, vocab_size: int, device: torch.device) -> None:
    """Call the op in every way in which it is called later."""
    logits_1V = torch.zeros(1, vocab_size, device=device)
    for num_top in _NUM_TOP:
        op(logits_1V, torch.zeros(1, dtype=torch.int64, device=device), num_top)


def rows_per_chunk(vocab_size: int) -> int:
    """How many rows of logits fit the memory bound."""
    return max(1, _CHUNK_VALUES // vocab_size)


def _scored(op: LogprobsFn, logits_NV: torch.Tensor, token_ids_N: torch.Tensor, num_top: int) -> Download:
    found = op(logits_NV.float(), token_ids_N, next(most for most in _NUM_TOP if most >= num_top))
    return Download(token_ids_N, found.logprobs_S, found.ranks_S, found.top_ids_SK, found.top_logprobs_SK)


def _finite(column: NDArray[Any], most: int) -> list[Any]:
    """most: entries that are wanted of a row that has several."""
    column = column if column.ndim == 1 else column[:, :most]
    values: list[Any] = (column.clip(LOGPROB_MIN, 0.0) if column.dtype == np.float32 else column).tolist()
    return values
