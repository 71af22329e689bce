# SPDX-License-Identifier: Apache-2.0
"""Dense projections, alone or several fused into one matrix product, and the parts of them that a rank has. Knows no
checkpoint names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from tokenspeed.layers.build import BuildContext
from tokenspeed.layers.matrix import Matrix
from tokenspeed.spmd.shards import WHOLE, Cut, Shards


@dataclass(frozen=True, slots=True)
class Part:
    """One projection: a view of the weight rows and bias entries that this rank has, and which of the whole they
    are."""

    weight: torch.Tensor
    cut: Cut
    bias: torch.Tensor | None = None
    bias_cut: Cut | None = None


class Linear(nn.Module):
    """(T, in_features) -> (T, out_features), sizes over all ranks. shards: how the matrix (out, in) is dealt; where its
    inputs are, a rank takes its own and gives addends."""

    def __init__(
        self,
        ctx: BuildContext,
        in_features: int,
        out_features: int,
        bias: bool = False,
        shards: Shards = WHOLE,
    ) -> None:
        super().__init__()
        cut = ctx.cut("projection", (out_features, in_features), shards)
        bias_cut = ctx.cut("bias", (out_features,), shards.beside()) if bias else None
        self.matrix = Matrix(ctx, *cut.local_shape)
        self.bias = None if bias_cut is None else ctx.empty(*bias_cut.local_shape)
        self.whole = Part(self.weight.data, cut, None if self.bias is None else self.bias.data, bias_cut)

    @property
    def weight(self) -> torch.Tensor:
        """The matrix as numbers."""
        return self.matrix.weight

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        return self.matrix(x_TD, self.bias)  # type: ignore[no-any-return]


class FusedLinear(nn.Module):
    """Several projections of one input as one matrix, their outputs side by side in the order of `parts`.

    parts: name -> number of outputs over all ranks. shards: how each is dealt; every rank has a run of each.
    """

    def __init__(
        self,
        ctx: BuildContext,
        in_features: int,
        parts: Mapping[str, int],
        bias: bool = False,
        shards: Mapping[str, Shards] | None = None,
    ) -> None:
        super().__init__()
        self.parts: dict[str, Part] = {}
        dealt = {name: (shards or {}).get(name, WHOLE) for name in parts}
        cuts = {name: ctx.cut(name, (size, in_features), dealt[name]) for name, size in parts.items()}
        num_rows = sum(cut.local_shape[0] for cut in cuts.values())
        self.matrix = Matrix(ctx, num_rows, in_features)
        self.bias = ctx.empty(num_rows) if bias else None
        start = 0
        for name, cut in cuts.items():
            rows = slice(start, start + cut.local_shape[0])
            bias_cut = ctx.cut(name, (parts[name],), dealt[name].beside()) if bias else None
            bias_rows = None if self.bias is None else self.bias.data[rows]
            self.parts[name] = Part(self.weight.data[rows], cut, bias_rows, bias_cut)
            start = rows.stop

    @property
    def weight(self) -> torch.Tensor:
        """The matrix as numbers."""
        return self.matrix.weight

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        return self.matrix(x_TD, self.bias)  # type: ignore[no-any-return]
