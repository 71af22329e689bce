# SPDX-License-Identifier: Apache-2.0
"""y = activation(x @ gate.T + bias of gate) * (x @ up.T + bias of up): two projections and what gates, in one.

x_TD: (T, D), last dimension contiguous. weight_ND: (2 F, D), the F rows of gate and then the F rows of up, last
dimension contiguous. bias_N: (2 F,) in the same order, or None. activation: one of ACTIVATIONS; silu(z) = z / (1 +
exp(-z)), gelu_tanh is gelu by tanh.
Returned: new (T, F) of x's dtype; both products are accumulated in float32 or better, and only the result is rounded.
T = 0 gives (0, F).

`pays` looks at shapes, strides and addresses alone.
"""

from __future__ import annotations

from typing import Protocol

import torch

ACTIVATIONS = ("silu", "gelu_tanh")


class GatedLinear(Protocol):
    """Signature of the op."""

    def __call__(
        self, x_TD: torch.Tensor, weight_ND: torch.Tensor, bias_N: torch.Tensor | None, activation: str
    ) -> torch.Tensor: ...

    def pays(self, x_TD: torch.Tensor, weight_ND: torch.Tensor) -> bool:
        """Whether a call is thought to take less time than a product and an activation."""
        ...
