# SPDX-License-Identifier: Apache-2.0
"""The feed-forward blocks of experts, each for the tokens that chose it: the weighted sum of down(gate(x) * up(x)).

`prepare(gate_up, down, gate, first_expert) -> run`, once, when the weights are there; they stay where they are. Or None
where the solution cannot multiply by such weights. E experts are here, numbered from first_expert on; others of a token
add nothing.

`run(x_TD, experts_TC, weights_TC) -> out_TD`: x_TD is (T, D) of the weights' dtype, last dimension contiguous.
experts_TC: (T, C) int64, the experts of each token, over all ranks, each once. weights_TC: (T, C) float32.
Returned: new (T, D) of x's dtype. Products are accumulated in float32 or better; what lies between the products of an
expert may be rounded to x's dtype; the sum over experts is float32 in the order of C, rounded once. T = 0 gives (0, D).
Of weights that stay packed, rows of a product's inputs may be rounded to bytes, as packed_linear says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

GATES = ("silu", "gelu_tanh", "clamped_swiglu")


@dataclass(frozen=True, slots=True)
class Gate:
    """What makes one number of gate and up. silu: gate / (1 + exp(-gate)) * up. gelu_tanh: gelu by tanh of gate, times
    up. For both the F outputs of gate come before those of up. clamped_swiglu: gate at most `limit` and up within
    ±limit, then gate / (1 + exp(-alpha * gate)) * (up + 1); gate and up stand in turn, gate first."""

    kind: str
    alpha: float = 0.0
    limit: float = 0.0

    def __post_init__(self) -> None:
        assert self.kind in GATES, self.kind


class PackedWeight(Protocol):
    """What is used of packed_linear.PackedMatrix."""

    num_outputs: int
    num_inputs: int
    cpu_pieces_P3: torch.Tensor | None

    def __call__(
        self, x_TD: torch.Tensor, bias_N: torch.Tensor | None, out_dtype: torch.dtype | None = None
    ) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class ExpertStack:
    """A matrix (N, D) and perhaps a bias of each expert. weight_END: (E, N, D), contiguous; where `packed` are there,
    the matrices instead, it has a shape and no memory. bias_EN: (E, N)."""

    weight_END: torch.Tensor
    bias_EN: torch.Tensor | None = None
    packed: Sequence[PackedWeight] | None = None

    def __post_init__(self) -> None:
        num_experts, num_outputs, num_inputs = self.weight_END.shape
        assert self.bias_EN is None or self.bias_EN.shape == (num_experts, num_outputs), self.bias_EN.shape
        for matrix in self.packed or ():
            assert (matrix.num_outputs, matrix.num_inputs) == (num_outputs, num_inputs), (matrix, num_outputs)
        assert self.packed is None or len(self.packed) == num_experts, (len(self.packed), num_experts)


class MoeExperts(Protocol):
    """What a solution makes of the weights of a layer."""

    def __call__(self, x_TD: torch.Tensor, experts_TC: torch.Tensor, weights_TC: torch.Tensor) -> torch.Tensor: ...


class Prepare(Protocol):
    """Signature of the op. gate_up: (E, 2 F, D). down: (E, D, F)."""

    def __call__(
        self, gate_up: ExpertStack, down: ExpertStack, gate: Gate, first_expert: int = 0
    ) -> MoeExperts | None: ...
