# SPDX-License-Identifier: Apache-2.0
"""The gated activation gelu(gate) * up, with gelu(z) = 0.5 z (1 + tanh(sqrt(2 / pi) (z + 0.044715 z ** 3))).

x_TF: (T, 2 F), gate in the first half of a row and up in the second, last dimension contiguous.
Returned: new (T, F) of x's dtype; computed in float32 and rounded once. T = 0 gives (0, F).
"""

from __future__ import annotations

from typing import Protocol

import torch


class GeluTanhMul(Protocol):
    """Signature of the op."""

    def __call__(self, x_TF: torch.Tensor) -> torch.Tensor: ...
