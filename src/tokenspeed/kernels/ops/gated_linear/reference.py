# SPDX-License-Identifier: Apache-2.0
"""The oracle, in torch: a row at a time, so that none depends on the others."""

from __future__ import annotations

import torch

from tokenspeed.kernels.registry import Band, Ok, Solution


def activate(gate_F: torch.Tensor, activation: str) -> torch.Tensor:
    if activation == "silu":
        return torch.nn.functional.silu(gate_F)
    assert activation == "gelu_tanh", activation
    return torch.nn.functional.gelu(gate_F, approximate="tanh")


class Reference:
    """The op itself. Never the faster way."""

    def __call__(
        self, x_TD: torch.Tensor, weight_ND: torch.Tensor, bias_N: torch.Tensor | None, activation: str
    ) -> torch.Tensor:
        out_TF = torch.empty((x_TD.shape[0], weight_ND.shape[0] // 2), dtype=x_TD.dtype, device=x_TD.device)
        weight_ND = weight_ND.float()
        bias_N = None if bias_N is None else bias_N.float()
        for x_D, out_F in zip(x_TD.float(), out_TF, strict=True):
            gate_F, up_F = torch.nn.functional.linear(x_D, weight_ND, bias_N).chunk(2)
            out_F.copy_(activate(gate_F, activation) * up_F)
        return out_TF

    def pays(self, x_TD: torch.Tensor, weight_ND: torch.Tensor) -> bool:
        return False


SOLUTION = Solution("reference", Band.REFERENCE, lambda _ctx: Ok(), lambda _ctx: Reference(), batch_invariant=True)
