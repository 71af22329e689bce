# SPDX-License-Identifier: Apache-2.0
"""y = x @ weight.T + bias, of a weight that stays in the few bits of its file.

`prepare(pieces, is_head=False, data=None) -> PackedMatrix` lays the weight out as the solution wants it, once; the
blocks are not kept. pieces: one or several matrices of D inputs whose rows follow one another, each in a format of its
own, such as the projections that read one input. The weight takes as many bytes as its blocks, up to a few rows that
fill a tile. is_head: often no more than the highest number of each row of a product is wanted; a solution may lay the
weight out for that, with a byte more for each of its rows. data: what `matrix.data` was when the same pieces were laid
out with the same is_head under the same `prepare.layout`, perhaps in read-only memory, at multiples of 64 bytes; it is
used in place of the blocks, of which only the shape counts then.

`matrix(x_TD, bias_N, out_dtype=None) -> y_TN`: x_TD is (T, D), float32 or bfloat16, last dimension contiguous; bias_N
(N,) of x's dtype, or None. Returned: new (T, N) of out_dtype (x's dtype when None). T = 0 gives (0, N). A solution may
round x to bytes, each 32 inputs of a row by a scale of their own: to the nearest of 127 steps of the largest among
them, either way. So a result may be off by half such a step in every input; the sums are float32 or better, rounded
once. A row of x that holds a number that is not finite has no finite result.

`matrix.rows(row_ids_T) -> (T, D)`: rows of the weight as numbers of `dtype`, which is the context's. row_ids_T: (T,)
int64, in range; in a matrix of one piece.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

FORMATS: Mapping[str, tuple[int, int]] = {
    "q4_0": (32, 18),
    "q4_1": (32, 20),
    "q5_0": (32, 22),
    "q5_1": (32, 24),
    "q8_0": (32, 34),
    "iq4_nl": (32, 18),
    "q2_k": (256, 84),
    "q3_k": (256, 110),
    "q4_k": (256, 144),
    "q5_k": (256, 176),
    "q6_k": (256, 210),
}
"""Block formats, as GGUF files have them: inputs and bytes of a block."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A matrix as a file has it. blocks_NB: (N, bytes of a row) uint8, rows contiguous, perhaps read-only memory."""

    format: str
    blocks_NB: torch.Tensor

    @property
    def num_outputs(self) -> int:
        return self.blocks_NB.shape[0]

    @property
    def num_inputs(self) -> int:
        num_inputs, num_bytes = FORMATS[self.format]
        assert self.blocks_NB.shape[1] % num_bytes == 0, (self.format, self.blocks_NB.shape)
        return self.blocks_NB.shape[1] // num_bytes * num_inputs


class PackedMatrix(Protocol):
    """A weight as a solution keeps it. num_bytes: what it takes. data: all of it, arrays of (bytes,) uint8; none where
    the solution cannot take it up again. cpu_pieces_P3: where the compiled CPU kernels find it, as csrc/cpu/kernels.h
    has a PackedPiece, for a step that runs them itself; None where it lies otherwise. in_planes: so that the highest
    number of a row is found without reading all of it."""

    num_outputs: int
    num_inputs: int
    num_bytes: int
    data: tuple[torch.Tensor, ...]
    cpu_pieces_P3: torch.Tensor | None
    in_planes: bool

    def __call__(
        self, x_TD: torch.Tensor, bias_N: torch.Tensor | None, out_dtype: torch.dtype | None = None
    ) -> torch.Tensor: ...

    def rows(self, row_ids_T: torch.Tensor) -> torch.Tensor: ...


class PackedLinear(Protocol):
    """Signature of the op: prepare. layout: says how `data` of its matrices is laid out, another text for each layout;
    None where it cannot be taken up again."""

    @property
    def layout(self) -> str | None: ...

    def __call__(
        self, pieces: Sequence[Piece], *, is_head: bool = False, data: Sequence[torch.Tensor] | None = None
    ) -> PackedMatrix: ...


PIECES_MAX = 8
