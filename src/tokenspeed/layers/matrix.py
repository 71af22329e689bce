# SPDX-License-Identifier: Apache-2.0
"""A weight matrix, or several of one shape, and its product with rows: numbers, or the blocks of a file, which stay
packed. Knows no checkpoint names and not what the matrix is for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import nn

from tokenspeed.kernels.ops.linear import Linear as LinearOp
from tokenspeed.kernels.ops.moe_experts import ExpertStack
from tokenspeed.kernels.ops.packed_linear import PackedLinear, PackedMatrix, Piece
from tokenspeed.kernels.registry import Band
from tokenspeed.layers.build import BuildContext


class Matrix(nn.Module):
    """(N, D), (T, D) -> (T, N). `weight` are numbers for the loader to fill in; memory of a CPU is taken as that is
    done. Or it packs the matrix instead, and then `weight` has a shape and no memory. is_head: often no more than the
    highest of the N is wanted."""

    num_matrices = 1

    def __init__(self, ctx: BuildContext, num_outputs: int, num_inputs: int) -> None:
        super().__init__()
        self.weight = ctx.empty(num_outputs, num_inputs)
        self.packed: PackedMatrix | None = None
        self.is_head = False
        self._ctx = ctx
        self._linear: LinearOp = ctx.bind("linear")

    def forward(
        self, x_TD: torch.Tensor, bias_N: torch.Tensor | None, out_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        if self.packed is not None:
            return self.packed(x_TD, bias_N, out_dtype)
        return self._linear(x_TD, self.weight, bias_N, out_dtype)

    def rows(self, row_ids_T: torch.Tensor) -> torch.Tensor:
        """Some of its rows, (T, D)."""
        if self.packed is not None:
            return self.packed.rows(row_ids_T)
        return torch.nn.functional.embedding(row_ids_T, self.weight)

    def pack(self, pieces: Sequence[Piece], data: Sequence[torch.Tensor] | None = None) -> None:
        """Take the matrix from these, row after row, and give back the memory of its numbers. data: as they were packed
        once, see the op."""
        packed: PackedMatrix = self._ctx.bind("packed_linear")(pieces, is_head=self.is_head, data=data)
        assert (packed.num_outputs, packed.num_inputs) == tuple(self.weight.shape), (packed, self.weight.shape)
        self.packed = packed
        self.weight.untyped_storage().resize_(0)

    def packed_data(self) -> Sequence[torch.Tensor]:
        """What `pack` takes as data."""
        return () if self.packed is None else self.packed.data


class MatrixStack(nn.Module):
    """(E, N, D): a matrix of each expert, and perhaps a bias (E, N). As Matrix, all packed or none."""

    is_head = False

    def __init__(self, ctx: BuildContext, shape: tuple[int, ...], *, bias: bool) -> None:
        super().__init__()
        self.num_matrices, num_outputs, _ = shape
        self.weight = ctx.empty(*shape)
        self.bias = ctx.empty(self.num_matrices, num_outputs) if bias else None
        self.packed: list[PackedMatrix] | None = None
        self._ctx = ctx
        self._linear: LinearOp = ctx.bind("linear")

    def product(self, index: int, x_TD: torch.Tensor) -> torch.Tensor:
        """(T, N), of one matrix."""
        bias_N = None if self.bias is None else self.bias[index]
        if self.packed is not None:
            return self.packed[index](x_TD, bias_N)
        return self._linear(x_TD, self.weight[index], bias_N)

    def pack(self, pieces: Sequence[Piece], data: Sequence[torch.Tensor] | None = None) -> None:
        """Take the matrices from these, each from as many, and give back the memory of their numbers. data: as they
        were packed once, as many of each."""
        prepare = cast(PackedLinear, self._ctx.bind("packed_linear"))
        num_pieces, rest = divmod(len(pieces), self.num_matrices)
        assert rest == 0, (len(pieces), self.num_matrices)
        num_arrays = len(data or ()) // self.num_matrices
        packed = [
            prepare(
                pieces[index * num_pieces : (index + 1) * num_pieces],
                data=None if data is None else data[index * num_arrays : (index + 1) * num_arrays],
            )
            for index in range(self.num_matrices)
        ]
        shapes = {(self.num_matrices, each.num_outputs, each.num_inputs) for each in packed}
        assert shapes == {tuple(self.weight.shape)}, (shapes, self.weight.shape)
        self.packed = packed
        self.weight.untyped_storage().resize_(0)

    def packed_data(self) -> Sequence[torch.Tensor]:
        """What `pack` takes as data."""
        return [data for each in self.packed or () for data in each.data]

    def described(self) -> ExpertStack:
        """As the op moe_experts takes it."""
        return ExpertStack(self.weight.data, None if self.bias is None else self.bias.data, self.packed)


def can_pack(ctx: BuildContext) -> bool:
    """Whether a matrix may stay packed here: a kernel multiplies by it as it is."""
    ctx.bind("packed_linear")
    return ctx.bindings["packed_linear"].traits.band > Band.REFERENCE
