# SPDX-License-Identifier: Apache-2.0
"""Dense projections, alone or several fused into one matrix product. Knows no checkpoint names."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from tokenspeed.kernels.ops.linear import Linear as LinearOp
from tokenspeed.layers.build import BuildContext


class Linear(nn.Module):
    """(T, in_features) -> (T, out_features)."""

    def __init__(self, ctx: BuildContext, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = ctx.empty(out_features, in_features)
        self.bias = ctx.empty(out_features) if bias else None
        self._linear: LinearOp = ctx.bind("linear")

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        return self._linear(x_TD, self.weight, self.bias)


class FusedLinear(Linear):
    """Several projections of one input as one matrix, their outputs side by side in the order of `parts`.

    parts: name -> number of outputs.
    """

    def __init__(self, ctx: BuildContext, in_features: int, parts: Mapping[str, int], bias: bool = False) -> None:
        super().__init__(ctx, in_features, sum(parts.values()), bias)
        self.parts: dict[str, slice] = {}
        start = 0
        for name, size in parts.items():
            self.parts[name] = slice(start, start + size)
            start += size

    def part(self, name: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Views of the weight rows and bias entries of one projection, for the loader to fill."""
        rows = self.parts[name]
        return self.weight.data[rows], None if self.bias is None else self.bias.data[rows]
