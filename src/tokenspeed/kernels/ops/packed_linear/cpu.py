# SPDX-License-Identifier: Apache-2.0
"""The compiled CPU kernel (csrc/cpu/packed_body.h): eight rows interleaved, activations as bytes."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from pathlib import Path

import torch

from tokenspeed.kernels.ops.packed_linear import FORMATS, PIECES_MAX, PackedLinear, Piece
from tokenspeed.kernels.platform import CPU_DTYPES, compiled_cpu, require_cpu_module
from tokenspeed.kernels.registry import Band, KernelContext, Solution

_CODES = {"q4_0": 0, "q4_1": 1, "q5_0": 2, "q5_1": 3, "q8_0": 4, "iq4_nl": 5, "q2_k": 6, "q3_k": 7}
_CODES |= {"q4_k": 8, "q5_k": 9, "q6_k": 10}
"""PackedFormat of csrc/cpu/packed_layout.h."""

_CODES_IN_PLANES = {"q8_0": 11, "q6_k": 12}


class _Memory:
    """Where the matrices of a model lie one behind another: in large pages where the machine gives them."""

    _CHUNK_BYTES, _ALIGNMENT = 64 << 20, 64

    def __init__(self) -> None:
        self._rest = torch.empty(0, dtype=torch.uint8)

    def take(self, num_bytes: int) -> torch.Tensor:
        """(num_bytes,) uint8."""
        padded = -(-num_bytes // self._ALIGNMENT) * self._ALIGNMENT
        if padded > len(self._rest):
            self._rest = torch.empty(max(padded, self._CHUNK_BYTES), dtype=torch.uint8)
            require_cpu_module().prefer_large_pages(self._rest.data_ptr(), len(self._rest))
        taken, self._rest = self._rest[:num_bytes], self._rest[padded:]
        return taken


class _Packed:
    def __init__(
        self,
        pieces: Sequence[Piece],
        dtype: torch.dtype,
        memory: _Memory,
        *,
        is_head: bool,
        data: Sequence[torch.Tensor] | None,
    ) -> None:
        assert 1 <= len(pieces) <= PIECES_MAX, f"{len(pieces)} pieces"
        self.num_inputs = pieces[0].num_inputs
        assert all(piece.num_inputs == self.num_inputs for piece in pieces), [piece.num_inputs for piece in pieces]
        self.num_outputs = sum(piece.num_outputs for piece in pieces)
        module = require_cpu_module()
        self.in_planes = is_head and len(pieces) == 1 and pieces[0].format in _CODES_IN_PLANES
        codes = _CODES_IN_PLANES if self.in_planes else _CODES
        formats = [codes[piece.format] for piece in pieces]
        described = list(zip(pieces, formats, strict=True))
        self.data = tuple(data or [_pack(piece, code, memory) for piece, code in described])
        self.num_bytes = sum(len(each) for each in self.data)
        assert [len(each) for each in self.data] == [_packed_size(*each) for each in described], "data of other pieces"
        located = zip(self.data, pieces, formats, strict=True)
        table = [[each.data_ptr(), piece.num_outputs, code] for each, piece, code in located]
        self.cpu_pieces_P3: torch.Tensor | None = torch.tensor(table)
        self._table = self.cpu_pieces_P3.data_ptr()
        self._formats, self._dtype = formats, dtype
        self._linear, self._rows = module.packed_linear, module.packed_rows

    def __call__(
        self, x_TD: torch.Tensor, bias_N: torch.Tensor | None, out_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        num_rows, num_inputs = x_TD.shape
        assert num_inputs == self.num_inputs, (x_TD.shape, self.num_inputs)
        assert x_TD.stride(1) == 1, x_TD.stride()
        dtype = out_dtype or x_TD.dtype
        out_TN = torch.empty((num_rows, self.num_outputs), dtype=dtype)
        self._linear(
            x_TD.data_ptr(),
            self._table,
            0 if bias_N is None else bias_N.data_ptr(),
            out_TN.data_ptr(),
            len(self.data),
            num_rows,
            self.num_outputs,
            num_inputs,
            x_TD.stride(0),
            CPU_DTYPES[x_TD.dtype],
            CPU_DTYPES[dtype],
        )
        return out_TN

    def rows(self, row_ids_T: torch.Tensor) -> torch.Tensor:
        (data,), (code,) = self.data, self._formats
        ids_T = row_ids_T.contiguous()
        assert ids_T.dtype is torch.int64, ids_T.dtype
        out_TD = torch.empty((len(ids_T), self.num_inputs), dtype=self._dtype)
        self._rows(
            data.data_ptr(),
            ids_T.data_ptr(),
            out_TD.data_ptr(),
            len(ids_T),
            self.num_outputs,
            self.num_inputs,
            code,
            CPU_DTYPES[self._dtype],
        )
        return out_TD


def _pack(piece: Piece, code: int, memory: _Memory) -> torch.Tensor:
    module = require_cpu_module()
    blocks_NB = piece.blocks_NB
    assert blocks_NB.stride(1) == 1, blocks_NB.stride()
    assert blocks_NB.shape[1] == piece.num_inputs // FORMATS[piece.format][0] * FORMATS[piece.format][1]
    data = memory.take(_packed_size(piece, code))
    module.pack(blocks_NB.data_ptr(), data.data_ptr(), piece.num_outputs, piece.num_inputs, blocks_NB.stride(0), code)
    return data


def _packed_size(piece: Piece, code: int) -> int:
    size: int = require_cpu_module().packed_size(code, piece.num_outputs, piece.num_inputs)
    return size


class _Prepare:
    def __init__(self, ctx: KernelContext) -> None:
        self._dtype, self._memory = ctx.dtype, _Memory()

    @property
    def layout(self) -> str:
        """The code that lays weights out: nobody has to think of a new name for what it does."""
        return f"{require_cpu_module().isa()} {_code_digest()}"

    def __call__(
        self, pieces: Sequence[Piece], *, is_head: bool = False, data: Sequence[torch.Tensor] | None = None
    ) -> _Packed:
        assert not any(each.data_ptr() % 64 for each in data or ()), "data at other addresses"
        return _Packed(pieces, self._dtype, self._memory, is_head=is_head, data=data)


@functools.cache
def _code_digest() -> str:
    digest = hashlib.sha256()
    for path in (require_cpu_module().__file__, __file__):
        digest.update(Path(str(path)).read_bytes())
    return digest.hexdigest()


def build(ctx: KernelContext) -> PackedLinear:
    return _Prepare(ctx)


SOLUTION = Solution("cpu", Band.PERFORMANT, compiled_cpu, build, batch_invariant=True, weight_layout="tiles of 8 rows")
