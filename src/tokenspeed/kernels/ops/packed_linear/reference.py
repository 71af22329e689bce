# SPDX-License-Identifier: Apache-2.0
"""The oracle, in torch: the weight as float32 numbers, which is not packed at all, and a float32 product."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tokenspeed.kernels.ops.packed_linear import PackedLinear, Piece
from tokenspeed.kernels.ops.packed_linear._blocks import numbers
from tokenspeed.kernels.registry import Band, KernelContext, Ok, Solution


class _Numbers:
    def __init__(self, pieces: Sequence[Piece], ctx: KernelContext) -> None:
        self._weight_ND = torch.cat([numbers(piece) for piece in pieces]).to(ctx.device)
        self._dtype = ctx.dtype
        self.num_outputs, self.num_inputs = self._weight_ND.shape
        self.num_bytes = 4 * self._weight_ND.numel()
        self.data: tuple[torch.Tensor, ...] = ()
        self.cpu_pieces_P3: torch.Tensor | None = None
        self.in_planes = False

    def __call__(
        self, x_TD: torch.Tensor, bias_N: torch.Tensor | None, out_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        bias = None if bias_N is None else bias_N.float()
        return torch.nn.functional.linear(x_TD.float(), self._weight_ND, bias).to(out_dtype or x_TD.dtype)

    def rows(self, row_ids_T: torch.Tensor) -> torch.Tensor:
        return self._weight_ND[row_ids_T].to(self._dtype)


class _Prepare:
    layout: str | None = None

    def __init__(self, ctx: KernelContext) -> None:
        self._ctx = ctx

    def __call__(
        self, pieces: Sequence[Piece], *, is_head: bool = False, data: Sequence[torch.Tensor] | None = None
    ) -> _Numbers:
        del is_head  # there is one way to lay numbers out
        assert data is None, "numbers are not taken up again"
        return _Numbers(pieces, self._ctx)


def build(ctx: KernelContext) -> PackedLinear:
    return _Prepare(ctx)


SOLUTION = Solution("reference", Band.REFERENCE, lambda _ctx: Ok(), build)
