# SPDX-License-Identifier: Apache-2.0
"""RMS normalisation with the residual stream folded in. Knows no family."""

from __future__ import annotations

import torch
from torch import nn

from tokenspeed.kernels.ops.rms_norm import RmsNorm
from tokenspeed.layers.build import BuildContext
from tokenspeed.spmd.shards import WHOLE, Shards


class RMSNorm(nn.Module):
    """Scale is weight + weight_offset (families that store weights around zero use offset 1). shards: how the weight is
    dealt, where ranks have parts of what is normalised; then `apply_with` takes the sum over all."""

    def __init__(
        self, ctx: BuildContext, size: int, eps: float, weight_offset: float = 0.0, shards: Shards = WHOLE
    ) -> None:
        super().__init__()
        self.cut = ctx.cut("norm", (size,), shards)
        self.weight = ctx.empty(*self.cut.local_shape)
        self.eps = eps
        self.weight_offset = weight_offset
        self._rms_norm: RmsNorm = ctx.bind("rms_norm")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension of x (..., size)."""
        return self._rms_norm(x, self.weight, None, eps=self.eps, weight_offset=self.weight_offset)[0]

    def add(self, x_TD: torch.Tensor, residual_TD: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """(normalised x + residual, x + residual). The residual given is overwritten; None starts a stream with x."""
        return self._rms_norm(x_TD, self.weight, residual_TD, eps=self.eps, weight_offset=self.weight_offset)

    def apply_with(self, x: torch.Tensor, squares: torch.Tensor) -> torch.Tensor:
        """Normalise this rank's part of rows whose squares, over all ranks, have these sums (..., 1) in float32."""
        scaled = x.float() * torch.rsqrt(squares / self.cut.shape[0] + self.eps)
        return (scaled * (self.weight.float() + self.weight_offset)).to(x.dtype)
