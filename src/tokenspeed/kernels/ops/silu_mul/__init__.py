# SPDX-License-Identifier: Apache-2.0
"""The gated activation silu(gate) * up, with silu(z) = z / (1 + exp(-z)).

x_TF: (T, 2 F), gate in the first half of a row and up in the second, last dimension contiguous.
Returned: new (T, F) of x's dtype; computed in float32 and rounded once. T = 0 gives (0, F).
"""

from __future__ import annotations

from typing import Protocol

import torch


class SiluMul(Protocol):
    """Signature of the op."""

    def __call__(self, x_TF: torch.Tensor) -> torch.Tensor: ...
