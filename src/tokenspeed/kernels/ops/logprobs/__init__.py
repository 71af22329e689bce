# SPDX-License-Identifier: Apache-2.0
"""Contract of the log-probabilities op: of one token a row, and of the row's most likely. Knows no request.

Shapes: S rows, V vocabulary, K = min(num_top, V).

`logprobs(logits_SV, token_ids_S, num_top) -> Logprobs`
* logits_SV: (S, V) float32 on any device, any strides; S may be 0. Never changed.
* token_ids_S: (S,) int64, in 0…V − 1. num_top: 0…MAX_TOP, the host's choice, the same for all rows.
* A log-probability is that of the softmax over the row as it is. A token of −inf has −inf.
* A rank is 1 + the number of tokens of the row with a higher logit. The most likely come best first, of equals the
  lowest id first.
* A row with a NaN, with +inf or with nothing but −inf has no meaning; it gives numbers, and the others are right.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

MAX_TOP = 20
"""Most likely tokens of a row at most."""


@dataclass(frozen=True, slots=True)
class Logprobs:
    """logprobs_S float32 and ranks_S int64 of the tokens; top_ids_SK int64 and top_logprobs_SK float32, (S, K)."""

    logprobs_S: torch.Tensor
    ranks_S: torch.Tensor
    top_ids_SK: torch.Tensor
    top_logprobs_SK: torch.Tensor


class LogprobsFn(Protocol):
    """A solution of this op."""

    def __call__(self, logits_SV: torch.Tensor, token_ids_S: torch.Tensor, num_top: int) -> Logprobs: ...
