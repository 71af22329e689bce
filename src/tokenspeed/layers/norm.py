# SPDX-License-Identifier: Apache-2.0
"""RMS normalisation with the residual stream folded in. Knows no family."""

from __future__ import annotations

import torch
from torch import nn

from tokenspeed.kernels.ops.rms_norm import RmsNorm
from tokenspeed.layers.build import BuildContext


class RMSNorm(nn.Module):
    """Scale is weight + weight_offset (families that store weights around zero use offset 1)."""

    def __init__(self, ctx: BuildContext, size: int, eps: float, weight_offset: float = 0.0) -> None:
        super().__init__()
        self.weight = ctx.empty(size)
        self.eps = eps
        self.weight_offset = weight_offset
        self._rms_norm: RmsNorm = ctx.bind("rms_norm")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension of x (..., size)."""
        return self._rms_norm(x, self.weight, None, eps=self.eps, weight_offset=self.weight_offset)[0]

    def add(self, x_TD: torch.Tensor, residual_TD: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """(normalised x + residual, x + residual). The residual given is overwritten; None starts a stream with x."""
        return self._rms_norm(x_TD, self.weight, residual_TD, eps=self.eps, weight_offset=self.weight_offset)
