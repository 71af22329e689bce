# SPDX-License-Identifier: Apache-2.0
"""Inputs of packed_linear: every format, no, one and a few rows and whole panels of them, remainders of rows and of
outputs, views of wider memory, several pieces.

Activations that are whole steps of a scale lose nothing when they are rounded to bytes, so there a result is as close
to the reference as a sum of float32 numbers can be.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

import numpy as np
import torch

from tokenspeed.kernels.conformance import Case, Row, Tolerance
from tokenspeed.kernels.ops.packed_linear import FORMATS, PackedLinear, Piece
from tokenspeed.kernels.registry import Kernel

TOLERANCE = {torch.float32: Tolerance(1e-5, 1e-5), torch.bfloat16: Tolerance(1.0 / 128, 1e-5)}
_ROUNDED = {torch.float32: Tolerance(0.0, 0.05), torch.bfloat16: Tolerance(1.0 / 128, 0.05)}
_EXACT = Tolerance(0.0, 0.0)

_NUMBER_SIZE, _INPUT_SIZE = 1 / 8, 1 / 4
"""Root mean squares of the numbers of a weight and of activations: results of a thousand inputs are about one."""

_CODE_SIZES = {"q4_0": 4.6, "q4_1": 8.8, "q5_0": 9.2, "q5_1": 18.0, "q8_0": 74.0, "iq4_nl": 65.0}
_CODE_SIZES |= {"q2_k": 16.0, "q3_k": 42.0, "q4_k": 320.0, "q5_k": 660.0, "q6_k": 1370.0}
"""Root mean square of a random code, times that of the code of its scale."""

_HALVES = {"q4_1": (0, 2), "q5_1": (0, 2), "q2_k": (80, 82), "q3_k": (108,), "q4_k": (0, 2), "q5_k": (0, 2)}
_HALVES |= {"q6_k": (208,)}
"""Where a block has float16 numbers, at 0 alone for others."""


def as_function(prepare: PackedLinear) -> Kernel:
    """The op as a function of tensors: the product, and with row_ids_T also those rows of the weight."""

    def packed_linear(
        pieces: tuple[Piece, ...],
        x_TD: torch.Tensor,
        bias_N: torch.Tensor | None,
        out_dtype: torch.dtype | None = None,
        row_ids_T: torch.Tensor | None = None,
        *,
        is_head: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        matrix = prepare(pieces, is_head=is_head)
        y_TN = matrix(x_TD, bias_N, out_dtype)
        return y_TN if row_ids_T is None else (y_TN, matrix.rows(row_ids_T))

    return packed_linear


def drawn(format_name: str, num_outputs: int, num_inputs: int, seed: int = 0) -> Piece:
    """Random blocks."""
    rng = np.random.default_rng(seed)
    block_len, num_bytes = FORMATS[format_name]
    blocks = rng.integers(0, 256, (num_outputs, num_inputs // block_len, num_bytes), np.uint8)
    largest = 3**0.5 * _NUMBER_SIZE / _CODE_SIZES[format_name]
    for begin in _HALVES.get(format_name, (0,)):
        halves = rng.uniform(-largest, largest, (*blocks.shape[:2], 1)).astype(np.float16)
        blocks[:, :, begin : begin + 2] = halves.view(np.uint8)
    return Piece(format_name, torch.from_numpy(blocks.reshape(num_outputs, -1)))


def steps(num_rows: int, num_inputs: int, dtype: torch.dtype) -> torch.Tensor:
    """Activations that are whole numbers of steps, up to 127, of a power of two for each 32."""
    generator = torch.Generator().manual_seed(num_rows)
    codes = torch.randint(-126, 127, (num_rows, num_inputs // 32, 32), generator=generator)
    codes[:, :, 5] = 127
    sizes = torch.randint(-13, -6, (num_rows, num_inputs // 32, 1), generator=generator)
    return torch.ldexp(codes.float(), sizes).view(num_rows, num_inputs).to(dtype)


def cases(dtype: torch.dtype) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    for format_name in FORMATS:
        for num_rows, num_outputs, num_inputs in ((0, 5, 256), (1, 37, 768), (3, 8, 512), (4, 9, 256), (7, 17, 1024)):
            piece = drawn(format_name, num_outputs, num_inputs, seed=num_rows)
            bias_N = normal(num_outputs) if num_rows % 2 else None
            name = f"{format_name}-{num_rows}x{num_outputs}x{num_inputs}"
            yield Case(name, ((piece,), steps(num_rows, num_inputs, dtype), bias_N))
        x_TD = normal(139, 1280) * _INPUT_SIZE
        two = (drawn(format_name, 21, 1280), drawn("q6_k", 11, 1280))
        yield _in_parts(Case(f"{format_name}-panels", (two, x_TD, normal(32)), tolerance=_ROUNDED[dtype]))
        yield _of_rows(format_name, dtype)
        for num_rows in (1, 3, 21):
            args = ((drawn(format_name, 70, 768, seed=num_rows),), steps(num_rows, 768, dtype), None, None)
            yield Case(f"{format_name}-head-{num_rows}", (*args, torch.tensor([69, 0, 8])), {"is_head": True})
    four = (drawn("q4_k", 24, 768), drawn("q6_k", 9, 768), drawn("q8_0", 40, 768), drawn("q4_1", 3, 768))
    for num_rows in (2, 135):
        x_TD = steps(num_rows, 1024, dtype)[:, 128:896]
        yield Case(f"strided-{num_rows}", (four, x_TD, None, torch.float32))
    eight = tuple(drawn(name, 1 + index, 256) for index, name in enumerate(list(FORMATS)[-8:]))
    yield Case("eight-pieces", (eight, steps(5, 256, dtype), normal(36)))
    zeros_TD = torch.zeros(3, 256, dtype=dtype)
    yield Case("zeros", ((drawn("q6_k", 9, 256),), zeros_TD, normal(9)), tolerance=_EXACT)


def _of_rows(format_name: str, dtype: torch.dtype) -> Case:
    """Rows of the weight: the last, the first, the ends of a tile, one twice; beside a product of one block a row."""
    num_inputs = FORMATS[format_name][0]
    row_ids_T = torch.tensor([28, 0, 7, 8, 8])
    args = ((drawn(format_name, 29, num_inputs),), steps(2, num_inputs, dtype), None, None, row_ids_T)
    return Case(f"{format_name}-rows", args)


def _in_parts(case: Case) -> Case:
    """The case with some of its rows alone: one, and runs that begin and end anywhere in a panel."""
    pieces, x_TD, *others = case.args
    assert isinstance(x_TD, torch.Tensor)
    parts = []
    for first, last in ((0, 1), (5, 7), (6, 9), (12, 16), (20, 25), (30, 41), (1, len(x_TD))):
        parts.append(Row((pieces, x_TD[first:last], *others), {}, functools.partial(_part, first, last)))
    return dataclasses.replace(case, rows=tuple(parts))


def _part(first: int, last: int, y_TN: torch.Tensor) -> torch.Tensor:
    return y_TN[first:last]
