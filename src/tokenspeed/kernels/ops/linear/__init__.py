# SPDX-License-Identifier: Apache-2.0
"""y = x @ weight.T + bias.

x_TD: (T, D), last dimension contiguous. weight_ND: (N, D), last dimension contiguous. bias_N: (N,) or None.
Returned: new (T, N) of out_dtype (x's dtype when None), accumulated in float32 or better and rounded once.
T = 0 gives (0, N).
"""

from __future__ import annotations

from typing import Protocol

import torch


class Linear(Protocol):
    """Signature of the op."""

    def __call__(
        self,
        x_TD: torch.Tensor,
        weight_ND: torch.Tensor,
        bias_N: torch.Tensor | None,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor: ...
