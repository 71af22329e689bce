# SPDX-License-Identifier: Apache-2.0
"""Token embedding and the head that turns hidden states into logits. Knows no sampling."""

from __future__ import annotations

import torch
from torch import nn

from tokenspeed.kernels.ops.linear import Linear as LinearOp
from tokenspeed.layers.build import BuildContext


class Embedding(nn.Module):
    """(T,) token ids -> (T, D). scale multiplies the vectors, rounded to the model's dtype first."""

    def __init__(self, ctx: BuildContext, vocab_size: int, hidden_size: int, scale: float | None = None) -> None:
        super().__init__()
        self.weight = ctx.empty(vocab_size, hidden_size)
        self.scale = None if scale is None else float(torch.tensor(scale, dtype=ctx.dtype))

    def forward(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        hidden_TD = torch.nn.functional.embedding(token_ids_T, self.weight)
        return hidden_TD if self.scale is None else hidden_TD * self.scale


class LmHead(nn.Module):
    """(S, D) -> (S, V) float32 logits. tied: share the matrix of this embedding instead of having one."""

    def __init__(self, ctx: BuildContext, vocab_size: int, hidden_size: int, tied: Embedding | None) -> None:
        super().__init__()
        self.weight = ctx.empty(vocab_size, hidden_size) if tied is None else tied.weight
        self._linear: LinearOp = ctx.bind("linear")

    def forward(self, hidden_SD: torch.Tensor) -> torch.Tensor:
        return self._linear(hidden_SD, self.weight, None, torch.float32)
