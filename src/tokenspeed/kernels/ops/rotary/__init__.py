# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding. Rotate-half (NeoX) pairing: dimension i turns with dimension i + rotary_dim / 2.
interleaved (GPT-J) pairing: dimension 2 i turns with dimension 2 i + 1, by the same angle.

q_THK: (T, H, K), k_TGK: (T, G, K), both mutated in place, last dimension contiguous, other strides free.
positions_T: (T,) int64. table_PR: (P, rotary_dim) float32, row p holds rotary_dim / 2 cosines, then as many sines.
Dimensions from rotary_dim on are left alone. Computed in float32. T = 0 does nothing.
"""

from __future__ import annotations

from typing import Protocol

import torch


class Rotary(Protocol):
    """Signature of the op."""

    def __call__(
        self,
        q_THK: torch.Tensor,
        k_TGK: torch.Tensor,
        positions_T: torch.Tensor,
        table_PR: torch.Tensor,
        interleaved: bool = False,
    ) -> None: ...
