# SPDX-License-Identifier: Apache-2.0
"""Turns GGUF blocks into float32, in numpy. Knows block layouts; knows no tensor names.

Each formula multiplies and adds in float32 in the order of the public reference, so results agree to the bit.
Layouts (bytes): Q4_0 d qs[16] · Q4_1 d m qs[16] · Q5_0 d qh[4] qs[16] · Q5_1 d m qh[4] qs[16] · Q8_0 d qs[32] ·
IQ4_NL d qs[16] · Q2_K scales[16] qs[64] d dmin · Q3_K hmask[32] qs[64] scales[12] d · Q4_K d dmin scales[12] qs[128] ·
Q5_K d dmin scales[12] qh[32] qs[128] · Q6_K ql[128] qh[64] scales[16] d; d, m and dmin are float16.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from tokenspeed.checkpoints.gguf import BLOCKS

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

# Elements handled at once: temporaries of this size stay in the second-level cache.
_CHUNK_LEN = 1 << 17

_IQ4_NL = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32
)  # what its codes stand for


def dequantize(type_name: str, raw: Bytes, out: Floats) -> None:
    """Fill `out` (flat) from the blocks in `raw` (flat). Knows the quantised types of BLOCKS."""
    reader = _READERS[type_name]
    block_len, block_bytes = BLOCKS[type_name]
    num_blocks = raw.size // block_bytes
    assert num_blocks * block_bytes == raw.size, f"{raw.size} bytes are no whole {type_name} blocks"
    assert out.size == num_blocks * block_len, f"{num_blocks} {type_name} blocks do not fill {out.size} elements"
    blocks = raw.reshape(num_blocks, block_bytes)
    rows = out.reshape(num_blocks, block_len)
    step = _CHUNK_LEN // block_len
    for begin in range(0, num_blocks, step):
        reader(blocks[begin : begin + step], rows[begin : begin + step])


def _half(blocks: Bytes, begin: int) -> Floats:
    """The float16 at byte `begin` of each block, as a float32 column."""
    return np.ascontiguousarray(blocks[:, begin : begin + 2]).view(np.float16).astype(np.float32)


def _q4_0(blocks: Bytes, out: Floats) -> None:
    _nibbles(blocks[:, 2:], out)
    out -= 8.0
    out *= _half(blocks, 0)


def _q4_1(blocks: Bytes, out: Floats) -> None:
    _nibbles(blocks[:, 4:], out)
    out *= _half(blocks, 0)
    out += _half(blocks, 2)


def _q5_0(blocks: Bytes, out: Floats) -> None:
    _fives(blocks[:, 2:6], blocks[:, 6:], out)
    out -= 16.0
    out *= _half(blocks, 0)


def _q5_1(blocks: Bytes, out: Floats) -> None:
    _fives(blocks[:, 4:8], blocks[:, 8:], out)
    out *= _half(blocks, 0)
    out += _half(blocks, 2)


def _nibbles(packed: Bytes, out: Floats) -> None:
    out[:, :16] = packed & 15
    out[:, 16:] = packed >> 4


def _fives(high: Bytes, packed: Bytes, out: Floats) -> None:
    """Codes of five bits, the highest of all 32 in four bytes."""
    codes = np.unpackbits(high, axis=1, bitorder="little")
    codes <<= 4
    codes[:, :16] |= packed & 15
    codes[:, 16:] |= packed >> 4
    out[:] = codes


def _iq4_nl(blocks: Bytes, out: Floats) -> None:
    packed = blocks[:, 2:]
    out[:, :16] = _IQ4_NL[packed & 15]
    out[:, 16:] = _IQ4_NL[packed >> 4]
    out *= _half(blocks, 0)


def _q8_0(blocks: Bytes, out: Floats) -> None:
    out[:] = blocks[:, 2:].view(np.int8)
    out *= _half(blocks, 0)


def _q2_k(blocks: Bytes, out: Floats) -> None:
    num_blocks = len(blocks)
    groups = out.reshape(num_blocks, 16, 16)
    groups[:] = _quarters(blocks[:, 16:80]).reshape(num_blocks, 16, 16)
    groups *= (_half(blocks, 80) * (blocks[:, :16] & 15).astype(np.float32))[:, :, None]
    groups -= (_half(blocks, 82) * (blocks[:, :16] >> 4).astype(np.float32))[:, :, None]


def _q3_k(blocks: Bytes, out: Floats) -> None:
    num_blocks = len(blocks)
    packed = blocks[:, 96:108]
    scales = np.concatenate((packed[:, :8] & 15, packed[:, :8] >> 4), axis=1)
    for part in range(4):
        scales[:, 4 * part : 4 * part + 4] |= ((packed[:, 8:] >> (2 * part)) & 3) << 4
    high = blocks[:, None, :32] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    codes = _quarters(blocks[:, 32:96]) | (high << 2).reshape(num_blocks, 256)
    out[:] = codes
    out -= 4.0
    groups = out.reshape(num_blocks, 16, 16)
    groups *= (_half(blocks, 108) * (scales.astype(np.float32) - 32.0))[:, :, None]


def _quarters(packed: Bytes) -> Bytes:
    """Codes of two bits: of 128 inputs in 32 bytes, four to a byte."""
    num_blocks = len(packed)
    runs = packed.reshape(num_blocks, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None]
    codes: Bytes = np.bitwise_and(runs, np.uint8(3)).reshape(num_blocks, 256)
    return codes


def _q4_k(blocks: Bytes, out: Floats) -> None:
    num_blocks = len(blocks)
    packed = blocks[:, 16:].reshape(num_blocks, 4, 32)
    halves = out.reshape(num_blocks, 4, 2, 32)
    halves[:, :, 0] = packed & 15
    halves[:, :, 1] = packed >> 4
    _scale_q4_k(blocks, out)


def _q5_k(blocks: Bytes, out: Floats) -> None:
    num_blocks = len(blocks)
    packed = blocks[:, 48:].reshape(num_blocks, 4, 1, 32)
    codes = np.concatenate((packed & 15, packed >> 4), axis=2).reshape(num_blocks, 8, 32)
    codes |= (blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1) << 4
    out[:] = codes.reshape(num_blocks, 256)
    _scale_q4_k(blocks, out)


def _scale_q4_k(blocks: Bytes, out: Floats) -> None:
    """Codes become numbers."""
    scales, mins = _q4_k_scales(blocks[:, 4:16])
    groups = out.reshape(len(blocks), 8, 32)
    groups *= (_half(blocks, 0) * scales)[:, :, None]
    groups -= (_half(blocks, 2) * mins)[:, :, None]


def _q4_k_scales(packed: Bytes) -> tuple[Floats, Floats]:
    """The eight 6-bit scales and minima that 12 bytes hold, as float32."""
    first, second, last = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.empty((len(packed), 8), np.float32)
    mins = np.empty((len(packed), 8), np.float32)
    scales[:, :4] = first & 63
    mins[:, :4] = second & 63
    scales[:, 4:] = (last & 15) | ((first >> 6) << 4)
    mins[:, 4:] = (last >> 4) | ((second >> 6) << 4)
    return scales, mins


def _q6_k(blocks: Bytes, out: Floats) -> None:
    num_blocks = len(blocks)
    low = blocks[:, :128].reshape(num_blocks, 2, 2, 32)
    high = blocks[:, 128:192].reshape(num_blocks, 2, 32)
    codes = np.empty((num_blocks, 2, 4, 32), np.uint8)
    np.bitwise_and(low, 15, out=codes[:, :, 0:2])
    np.right_shift(low, 4, out=codes[:, :, 2:4])
    codes[:, :, 0] |= (high & 3) << 4
    codes[:, :, 1] |= ((high >> 2) & 3) << 4
    codes[:, :, 2] |= ((high >> 4) & 3) << 4
    codes[:, :, 3] |= (high >> 6) << 4
    out[:] = codes.reshape(num_blocks, 256)
    out -= 32.0
    scales = blocks[:, 192:208].view(np.int8).astype(np.float32)
    groups = out.reshape(num_blocks, 16, 16)
    groups *= (_half(blocks, 208) * scales)[:, :, None]


_READERS: dict[str, Callable[[Bytes, Floats], None]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "IQ4_NL": _iq4_nl,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
