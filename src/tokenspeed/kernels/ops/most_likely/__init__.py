# SPDX-License-Identifier: Apache-2.0
"""Contract of most_likely: the token of each row where nothing is drawn and nothing edited. What `sampling` does with
no parts, for hosts, on which a step is over sooner than a few calls of a tensor library.

logits_SV: (S, V) float32, last dimension contiguous, V >= 1. told_2S: (2, S) int64, contiguous, written: the most
likely token, the lowest id of equals; and 1 where the row is faulty, else 0. A row whose highest logit is not finite
(any NaN, any +inf, nothing but -inf) is faulty: its token is 0.
"""

from __future__ import annotations

from typing import Protocol

import torch


class MostLikely(Protocol):
    """Signature of the op."""

    def __call__(self, logits_SV: torch.Tensor, told_2S: torch.Tensor) -> None: ...
