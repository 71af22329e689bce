# SPDX-License-Identifier: Apache-2.0
"""The gated feed-forward block: activation(gate) * up, between two projections. Knows no family."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from tokenspeed.layers.build import BuildContext
from tokenspeed.layers.linear import FusedLinear, Linear


class GatedMLP(nn.Module):
    """down(activation(gate(x)) * up(x)). activation: the op that gates, silu_mul or gelu_tanh_mul."""

    def __init__(self, ctx: BuildContext, hidden_size: int, ff_size: int, activation: str, bias: bool = False) -> None:
        super().__init__()
        self.gate_up = FusedLinear(ctx, hidden_size, {"gate": ff_size, "up": ff_size}, bias)
        self.down = Linear(ctx, ff_size, hidden_size, bias)
        self._activate: Callable[[torch.Tensor], torch.Tensor] = ctx.bind(activation)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        return self.down(self._activate(self.gate_up(x_TD)))  # type: ignore[no-any-return]
