# SPDX-License-Identifier: Apache-2.0
"""What blocks say, in plain torch: codes, and for runs of them a scale and a minimum. Knows no tensor names.

A number is code * scale + minimum. Blocks are (B, bytes) uint8; codes (B, inputs), scales and minima (B, runs).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from tokenspeed.kernels.ops.packed_linear import FORMATS, Piece

_Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

_IQ4_NL = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def numbers(piece: Piece) -> torch.Tensor:
    """(N, D) float32."""
    num_inputs, num_bytes = FORMATS[piece.format]
    codes_BI, scales_BR, minima_BR = _READERS[piece.format](piece.blocks_NB.reshape(-1, num_bytes))
    runs = (len(codes_BI), scales_BR.shape[1], num_inputs // scales_BR.shape[1])
    numbers_BRI = codes_BI.float().view(runs) * scales_BR[:, :, None] + minima_BR[:, :, None]
    return numbers_BRI.reshape(piece.num_outputs, piece.num_inputs)


def _half(blocks: torch.Tensor, begin: int) -> torch.Tensor:
    """The float16 at byte `begin`, (B, 1)."""
    return blocks[:, begin : begin + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: torch.Tensor, run: int) -> torch.Tensor:
    """Lower halves of `run` bytes, then the upper ones, then the next bytes."""
    parts = packed.reshape(len(packed), -1, 1, run)
    return torch.cat((parts & 15, parts >> 4), dim=2).flatten(1)


def _bits(packed: torch.Tensor, run: int, width: int) -> torch.Tensor:
    """The lowest `width` bits of `run` bytes, then their next ones, up to the highest, then the next bytes."""
    parts = packed.reshape(len(packed), -1, 1, run)
    shifts = torch.arange(0, 8, width, dtype=torch.uint8)[:, None]
    return ((parts >> shifts) & ((1 << width) - 1)).flatten(1)


def _high_bits(packed: torch.Tensor) -> torch.Tensor:
    """Bit i of four bytes is that of input i."""
    shifts = torch.arange(8, dtype=torch.uint8)
    return ((packed[:, :, None] >> shifts) & 1).flatten(1)


def _small(has_high: bool, offset: int) -> Callable[[torch.Tensor], _Parts]:
    """Formats of 32 inputs; offset: the code of zero, 0 where the block has a minimum."""

    def read(blocks: torch.Tensor) -> _Parts:
        begin = 4 if offset == 0 else 2
        scale = _half(blocks, 0)
        codes = _nibbles(blocks[:, -16:], 16)
        if has_high:
            codes = codes | (_high_bits(blocks[:, begin : begin + 4]) << 4)
        return codes.to(torch.int16) - offset, scale, torch.zeros_like(scale) if offset else _half(blocks, 2)

    return read


def _q8_0(blocks: torch.Tensor) -> _Parts:
    scale = _half(blocks, 0)
    return blocks[:, 2:].view(torch.int8), scale, torch.zeros_like(scale)


def _iq4_nl(blocks: torch.Tensor) -> _Parts:
    scale = _half(blocks, 0)
    return torch.tensor(_IQ4_NL)[_nibbles(blocks[:, 2:], 16).long()], scale, torch.zeros_like(scale)


def _q2_k(blocks: torch.Tensor) -> _Parts:
    scales, minima = blocks[:, :16] & 15, blocks[:, :16] >> 4
    return _bits(blocks[:, 16:80], 32, 2), _half(blocks, 80) * scales, -_half(blocks, 82) * minima


def _q3_k(blocks: torch.Tensor) -> _Parts:
    codes = _bits(blocks[:, 32:96], 32, 2) | (_bits(blocks[:, :32], 32, 1) << 2)
    scales = _nibbles(blocks[:, 96:104], 8) | (_bits(blocks[:, 104:108], 4, 2) << 4)
    scale = _half(blocks, 108) * (scales.to(torch.int16) - 32)
    return codes.to(torch.int16) - 4, scale, torch.zeros_like(scale)


def _q4_or_q5_k(has_high: bool) -> Callable[[torch.Tensor], _Parts]:
    def read(blocks: torch.Tensor) -> _Parts:
        first, second, last = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
        scales = torch.cat((first & 63, (last & 15) | ((first >> 6) << 4)), dim=1)
        minima = torch.cat((second & 63, (last >> 4) | ((second >> 6) << 4)), dim=1)
        codes = _nibbles(blocks[:, -128:], 32)
        if has_high:
            codes = codes | (_bits(blocks[:, 16:48], 32, 1) << 4)
        return codes, _half(blocks, 0) * scales, -_half(blocks, 2) * minima

    return read


def _q6_k(blocks: torch.Tensor) -> _Parts:
    codes = _nibbles(blocks[:, :128], 64) | (_bits(blocks[:, 128:192], 32, 2) << 4)
    scale = _half(blocks, 208) * blocks[:, 192:208].contiguous().view(torch.int8)
    return codes.to(torch.int16) - 32, scale, torch.zeros_like(scale)


_READERS: dict[str, Callable[[torch.Tensor], _Parts]] = {
    "q4_0": _small(has_high=False, offset=8),
    "q4_1": _small(has_high=False, offset=0),
    "q5_0": _small(has_high=True, offset=16),
    "q5_1": _small(has_high=True, offset=0),
    "q8_0": _q8_0,
    "iq4_nl": _iq4_nl,
    "q2_k": _q2_k,
    "q3_k": _q3_k,
    "q4_k": _q4_or_q5_k(has_high=False),
    "q5_k": _q4_or_q5_k(has_high=True),
    "q6_k": _q6_k,
}
