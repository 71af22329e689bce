# SPDX-License-Identifier: Apache-2.0
"""The oracle, in torch: a token at a time and an expert at a time, in float32."""

from __future__ import annotations

import torch

from tokenspeed.kernels.ops.moe_experts import ExpertStack, Gate, MoeExperts, Prepare
from tokenspeed.kernels.registry import Band, Ok, Solution


def gated(gate: Gate, x_F: torch.Tensor) -> torch.Tensor:
    """(2 F,) -> (F,)."""
    if gate.kind == "clamped_swiglu":
        gate_F, up_F = x_F[0::2].clamp(max=gate.limit), x_F[1::2].clamp(-gate.limit, gate.limit)
        return gate_F * torch.sigmoid(gate.alpha * gate_F) * (up_F + 1)
    gate_F, up_F = x_F.chunk(2)
    if gate.kind == "silu":
        return torch.nn.functional.silu(gate_F) * up_F
    return torch.nn.functional.gelu(gate_F, approximate="tanh") * up_F


def prepare(gate_up: ExpertStack, down: ExpertStack, gate: Gate, first_expert: int = 0) -> MoeExperts:
    num_experts = len(gate_up.weight_END)

    def run(x_TD: torch.Tensor, experts_TC: torch.Tensor, weights_TC: torch.Tensor) -> torch.Tensor:
        out_TD = torch.empty_like(x_TD)
        for token, (experts_C, weights_C) in enumerate(zip(experts_TC.tolist(), weights_TC, strict=True)):
            sum_D = torch.zeros(x_TD.shape[1], device=x_TD.device)
            for expert, weight in zip(experts_C, weights_C, strict=True):
                own = expert - first_expert
                if 0 <= own < num_experts:
                    hidden_F = gated(gate, _product(gate_up, own, x_TD[token].float()))
                    sum_D = sum_D + _product(down, own, hidden_F) * weight
            out_TD[token] = sum_D.to(x_TD.dtype)
        return out_TD

    return run


def _product(stack: ExpertStack, expert: int, x_D: torch.Tensor) -> torch.Tensor:
    bias_N = None if stack.bias_EN is None else stack.bias_EN[expert].float()
    if stack.packed is not None:
        return stack.packed[expert](x_D[None], bias_N)[0]
    return torch.nn.functional.linear(x_D, stack.weight_END[expert].float(), bias_N)


def build(_ctx: object) -> Prepare:
    return prepare


SOLUTION = Solution("reference", Band.REFERENCE, lambda _ctx: Ok(), build, batch_invariant=True)
