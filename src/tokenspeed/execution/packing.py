# SPDX-License-Identifier: Apache-2.0
"""Which matrices of a model stay in the blocks of their file, decided before anything is read.

A matrix stays packed where all that it is made of is blocks that the op packed_linear knows, and where the part of a
rank begins and ends with a block. Others are filled with numbers as always. Knows names and shapes, not file formats.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import torch
from numpy.typing import NDArray

from tokenspeed.checkpoints import TensorInfo, Weights
from tokenspeed.kernels.ops.packed_linear import FORMATS, PIECES_MAX, Piece
from tokenspeed.layers.build import BuildContext
from tokenspeed.layers.matrix import Matrix, MatrixStack, can_pack
from tokenspeed.layers.weight_map import WeightSlot
from tokenspeed.models import CausalLM


@dataclass(frozen=True, slots=True)
class PackedPart:
    """A slot of a matrix that stays packed, and the tensor that it takes its part of."""

    slot: WeightSlot
    info: TensorInfo

    @property
    def num_bytes(self) -> int:
        """Of the part."""
        num_inputs, num_bytes = FORMATS[self.info.dtype]
        return self.slot.target.numel() // num_inputs * num_bytes

    @property
    def description(self) -> str:
        """Which part of which tensor it is."""
        return f"{self.slot.name} {self.info.dtype} {self.info.shape} {self.slot.cut.index}"

    def shape_only(self) -> Piece:
        """A piece without memory, for what was packed once."""
        num_inputs, num_bytes = FORMATS[self.info.dtype]
        num_rows, num_columns = self.slot.target.shape
        shape = (num_rows, num_columns // num_inputs * num_bytes)
        return Piece(self.info.dtype, torch.empty(shape, dtype=torch.uint8, device="meta"))

    def piece(self) -> Piece:
        """The blocks of the part; reads them."""
        assert self.info.blocks is not None, self.slot.name
        num_inputs, num_bytes = FORMATS[self.info.dtype]
        rows, columns = self.slot.cut.index
        bytes_of = slice(columns.start // num_inputs * num_bytes, columns.stop // num_inputs * num_bytes)
        return Piece(self.info.dtype, _as_tensor(self.info.blocks()[rows, bytes_of]))


AnyMatrix = Matrix | MatrixStack

Packing = Mapping[AnyMatrix, tuple[PackedPart, ...]]
"""The parts of each matrix that stays packed, in the order of its rows; of a stack in that of
its matrices."""

NOTHING_PACKED: Packing = MappingProxyType({})

PackedBefore = Mapping[AnyMatrix, Sequence[torch.Tensor]]
"""The data of matrices as they were packed once."""

NOTHING_BEFORE: PackedBefore = MappingProxyType({})


def has_blocks(weights: Weights) -> bool:
    """Whether any of these may stay packed."""
    return any(info.blocks for info in (weights.infos() or {}).values())


def plan_packing(model: CausalLM, weights: Weights, ctx: BuildContext) -> Packing:
    """What can stay packed; nothing where no kernel multiplies by blocks."""
    infos = weights.infos()
    if not infos or not has_blocks(weights) or not can_pack(ctx):
        ctx.bindings.pop("packed_linear", None)
        return NOTHING_PACKED
    every = [each for each in model.modules() if isinstance(each, AnyMatrix)]
    matrices = {_memory(each.weight): each for each in every if each.weight.numel() > 0}
    slots: dict[AnyMatrix, list[WeightSlot]] = {matrix: [] for matrix in matrices.values()}
    for slot in model.weight_map().for_checkpoint(infos):
        matrix = matrices.get(_memory(slot.target))
        if matrix is not None and slot.target.numel() > 0:
            slots[matrix].append(slot)
    found = {matrix: _parts(matrix, each, infos) for matrix, each in slots.items()}
    return {matrix: parts for matrix, parts in found.items() if parts}


def place_of(slot: WeightSlot) -> tuple[int, int] | None:
    """Where a slot's target is, as long as nothing is packed yet; None of one that is empty."""
    return (_memory(slot.target), int(slot.target.storage_offset())) if slot.target.numel() > 0 else None


def _parts(matrix: AnyMatrix, slots: list[WeightSlot], infos: Mapping[str, TensorInfo]) -> tuple[PackedPart, ...]:
    """The parts of a matrix, or of those of all experts; none unless all can stay packed."""
    num_pieces, rest = divmod(len(slots), matrix.num_matrices)
    if rest or not 1 <= num_pieces <= PIECES_MAX:
        return ()
    named = [(slot, next((infos[name] for name in slot.names if name in infos), None)) for slot in slots]
    parts = [PackedPart(slot, info) for slot, info in named if info is not None and _stays_packed(slot, info)]
    if len(parts) < len(slots):
        return ()
    return tuple(sorted(parts, key=lambda part: part.slot.target.storage_offset()))


def _stays_packed(slot: WeightSlot, info: TensorInfo) -> bool:
    if info.blocks is None or info.dtype not in FORMATS or info.shape != slot.cut.shape or not slot.cut.has_values:
        return False
    rows, columns = slot.cut.index
    block_len = FORMATS[info.dtype][0]
    is_run = rows.step in (None, 1) and columns.step in (None, 1) and slot.target.is_contiguous()
    return is_run and columns.start % block_len == 0 and columns.stop % block_len == 0


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _as_tensor(blocks: NDArray[np.uint8]) -> torch.Tensor:
    """torch warns of arrays it could write to: a view of a mapped file is only read here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(blocks)
