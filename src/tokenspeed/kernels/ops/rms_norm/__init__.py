# SPDX-License-Identifier: Apache-2.0
"""Root-mean-square normalisation, with the residual addition before it when there is one.

    y = x + residual (or x);  normed = y / sqrt(mean(y ** 2) + eps) * (weight + weight_offset)

x, residual: (..., D), last dimension contiguous; the sum, the mean and the scaling are computed in float32 and rounded
once to x's dtype (y is rounded to x's dtype before it is normalised). weight: (D,), any float dtype.
Mutated: residual becomes y in place. Returned: (normed, y); without a residual y is x itself.
An empty x gives an empty result.
"""

from __future__ import annotations

from typing import Protocol

import torch


class RmsNorm(Protocol):
    """Signature of the op."""

    def __call__(
        self,
        x: torch.Tensor,
        weight_D: torch.Tensor,
        residual: torch.Tensor | None,
        *,
        eps: float,
        weight_offset: float,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...
