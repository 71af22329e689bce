# SPDX-License-Identifier: Apache-2.0
"""Token embedding and the head that turns hidden states into logits. Knows no sampling."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import torch
from torch import nn

from tokenspeed.layers.build import BuildContext
from tokenspeed.layers.matrix import Matrix
from tokenspeed.spmd import shards
from tokenspeed.spmd.mesh import Group
from tokenspeed.spmd.step import View

VOCABULARY = shards.rows(Group.DENSE, what="tokens of the vocabulary")


class Embedding(nn.Module):
    """(T,) token ids -> (T, D). scale multiplies the vectors, rounded to the model's dtype first. Ranks share out the
    vocabulary: the vector of a token that another one has is zero here."""

    def __init__(self, ctx: BuildContext, vocab_size: int, hidden_size: int, scale: float | None = None) -> None:
        super().__init__()
        self.cut = ctx.cut("embedding", (vocab_size, hidden_size), VOCABULARY)
        self.matrix = Matrix(ctx, *self.cut.local_shape)
        self.scale = None if scale is None else float(torch.tensor(scale, dtype=ctx.dtype))

    @property
    def weight(self) -> torch.Tensor:
        """The matrix as numbers."""
        return self.matrix.weight

    def forward(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        if len(self.weight) == self.cut.shape[0]:
            hidden_TD = self.matrix.rows(token_ids_T)
        else:
            places_T = token_ids_T - self.cut.index[0].start
            is_here_T = (places_T >= 0) & (places_T < len(self.weight))
            hidden_TD = self.matrix.rows(places_T * is_here_T) * is_here_T[:, None]
        return hidden_TD if self.scale is None else hidden_TD * self.scale


class LmHead(nn.Module):
    """(S, D) -> (S, V) float32 logits. tied: share the matrix of this embedding instead of having one. soft_cap bounds
    logits smoothly. Ranks share out the vocabulary and tell each other their columns."""

    def __init__(
        self,
        ctx: BuildContext,
        vocab_size: int,
        hidden_size: int,
        tied: Embedding | None = None,
        soft_cap: float | None = None,
    ) -> None:
        super().__init__()
        self.cut = ctx.cut("head", (vocab_size, hidden_size), VOCABULARY)
        self.matrix = Matrix(ctx, *self.cut.local_shape) if tied is None else tied.matrix
        self.matrix.is_head = True
        self.soft_cap = soft_cap

    @property
    def weight(self) -> torch.Tensor:
        """The matrix as numbers."""
        return self.matrix.weight

    def forward(self, hidden_SD: torch.Tensor) -> torch.Tensor:
        """The columns of this rank."""
        logits_SV: torch.Tensor = self.matrix(hidden_SD, None, torch.float32)
        return logits_SV if self.soft_cap is None else self.soft_cap * torch.tanh(logits_SV / self.soft_cap)

    def run(self, view: View, hidden_SD: torch.Tensor) -> torch.Tensor | Generator[Any, Any, torch.Tensor]:
        """All columns, as the maths of an op."""
        logits_SV: torch.Tensor = self(hidden_SD)
        return _gathered(view, logits_SV) if view.exchanges() else logits_SV


def _gathered(view: View, columns_SV: torch.Tensor) -> Generator[Any, Any, torch.Tensor]:
    parts = yield view.exchange(0, [columns_SV] * view.size(Group.DENSE))
    return torch.cat(parts, dim=1)
