# SPDX-License-Identifier: Apache-2.0
"""Gated activations, and the feed-forward block around them: activation(gate) * up, between two projections. Knows no
family."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn

from tokenspeed.kernels.ops.gated_linear import GatedLinear
from tokenspeed.layers.build import BuildContext
from tokenspeed.layers.linear import FusedLinear, Linear
from tokenspeed.layers.weight_map import Names, WeightSlot, fused_slots, linear_slots
from tokenspeed.spmd import shards
from tokenspeed.spmd.graph import Graph, Value
from tokenspeed.spmd.mesh import Group


@dataclass(frozen=True, slots=True)
class ClampedSwiglu:
    """gate * sigmoid(alpha * gate) * (up + 1), gate at most `limit` and up within ±limit before that.

    (T, 2 F) with gate and up in turn, gate first -> (T, F), computed in float32 and rounded once.
    """

    alpha: float = 1.702
    limit: float = 7.0

    def __call__(self, x_TF: torch.Tensor) -> torch.Tensor:
        gate_TF = x_TF[:, 0::2].float().clamp(max=self.limit)
        up_TF = x_TF[:, 1::2].float().clamp(-self.limit, self.limit)
        return (gate_TF * torch.sigmoid(self.alpha * gate_TF) * (up_TF + 1)).to(x_TF.dtype)


def even_sigmoid(x: torch.Tensor) -> torch.Tensor:
    """The sigmoid, with an element's bits the same whatever stands beside it: torch.sigmoid computes the elements that
    are left over from whole vectors in another way."""
    return torch.stack((x, torch.zeros_like(x)), dim=-1).softmax(dim=-1)[..., 0]


Activation = str | ClampedSwiglu
"""What gates: an op, silu_mul or gelu_tanh_mul, or a formula of its own."""


def activate_with(ctx: BuildContext, activation: Activation) -> Callable[[torch.Tensor], torch.Tensor]:
    """The function (T, 2 F) -> (T, F)."""
    return ctx.bind(activation) if isinstance(activation, str) else activation


def gate_and_up_rows(activation: Activation, ff_size: int) -> tuple[slice, slice]:
    """Which of 2 * ff_size outputs of a projection the activation reads as gate, and which as up."""
    if isinstance(activation, ClampedSwiglu):
        return slice(0, None, 2), slice(1, None, 2)
    return slice(0, ff_size), slice(ff_size, None)


GATES = {"silu_mul": "silu", "gelu_tanh_mul": "gelu_tanh"}
"""What gated_linear and moe_experts call what an op gates by."""

FEED_FORWARD = "feed-forward elements"


class GatedMLP(nn.Module):
    """down(activation(gate(x)) * up(x)), the inner width shared out over ranks; what is before `down` is one op where
    that pays. activation: the op that gates, silu_mul or gelu_tanh_mul. names: module names in a checkpoint, of gate,
    up and down or of gate and up as one and down."""

    def __init__(
        self,
        ctx: BuildContext,
        hidden_size: int,
        ff_size: int,
        activation: str,
        bias: bool = False,
        *,
        names: Names,
    ) -> None:
        super().__init__()
        self.names, self.activation = names, activation
        dealt = shards.rows(Group.DENSE, what=FEED_FORWARD)
        parts = {"gate": ff_size, "up": ff_size}
        self.gate_up = FusedLinear(ctx, hidden_size, parts, bias, dict.fromkeys(parts, dealt))
        self.down = Linear(ctx, ff_size, hidden_size, bias, shards.columns(Group.DENSE, what=FEED_FORWARD))
        self._activate = activate_with(ctx, activation)
        self._fused = cast("GatedLinear | None", ctx.bind_better("gated_linear"))

    def declare(self, graph: Graph, name: str, x: Value) -> Value:
        """The block as an op of a model."""
        return graph.feed_forward(name, x, run=lambda _, x_TD: self(x_TD))

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        """This rank's addend."""
        return self.down(self._inner(x_TD))  # type: ignore[no-any-return]

    def _inner(self, x_TD: torch.Tensor) -> torch.Tensor:
        fused, matrix, bias_N = self._fused, self.gate_up.matrix, self.gate_up.bias
        if fused is not None and matrix.packed is None and fused.pays(x_TD, matrix.weight):
            return fused(x_TD, matrix.weight, bias_N, GATES[self.activation])
        return self._activate(self.gate_up(x_TD))

    def weight_slots(self) -> list[WeightSlot]:
        """Names relative to the block."""
        return fused_slots(self.names[:-1], self.gate_up) + linear_slots(self.names[-1], self.down)
