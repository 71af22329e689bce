# SPDX-License-Identifier: Apache-2.0
"""Inputs of rms_norm: empty, odd sizes, with and without a residual, heads inside a wider row, padded residuals."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch

from tokenspeed.kernels.conformance import BenchCase, Case, Cost, Row, Tolerance

TOLERANCE = {torch.float32: Tolerance(1e-5, 1e-6), torch.bfloat16: Tolerance(1.6e-2, 1e-2)}
_PLAIN = {"eps": 1e-6, "weight_offset": 0.0}
_OFFSET = {"eps": 1e-5, "weight_offset": 1.0}


def cases(dtype: torch.dtype) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * 3).to(dtype)

    for num_rows, size in ((0, 16), (1, 1), (1, 7), (3, 64), (5, 577), (700, 48)):
        x_TD, weight_D = randn(num_rows, size), randn(size)
        rows = tuple(_row(x_TD, weight_D, index) for index in range(min(num_rows, 8)))
        yield Case(f"{num_rows}x{size}", (x_TD, weight_D, None), _PLAIN, rows=rows)
        yield Case(f"{num_rows}x{size}-residual", (x_TD, weight_D, randn(num_rows, size)), _OFFSET, mutated=(2,))
    yield Case("heads", (randn(5, 90)[:, 12:72].view(5, 3, 20), randn(20), None), _OFFSET)
    yield Case("no-heads", (randn(0, 60).view(0, 3, 20), randn(20), None), _OFFSET)
    yield Case("strided", (randn(8, 50)[::2, 3:39], randn(36), randn(4, 40)[:, :36]), _PLAIN, mutated=(2,))
    yield Case("zeros", (torch.zeros(2, 24, dtype=dtype), randn(24), None), _PLAIN)


def cost(num_rows: int, size: int, itemsize: int, has_residual: bool) -> Cost:
    num_passes = 4 if has_residual else 2
    return Cost(5 * num_rows * size, num_passes * num_rows * size * itemsize)


def bench_cases(dtype: torch.dtype, device: str) -> Iterator[BenchCase]:
    """An 8B decoder: after each part of a layer, and over the heads of a query."""

    def make(shape: tuple[int, ...], has_residual: bool) -> Case:
        x, weight_D = torch.randn(shape, dtype=dtype, device=device), torch.randn(shape[-1], dtype=dtype, device=device)
        return Case("bench", (x, weight_D, torch.randn_like(x) if has_residual else None), _PLAIN, mutated=(2,))

    for num_rows in (1, 16, 64, 8192):
        residual, heads = (
            functools.partial(make, (num_rows, 4096), True),
            functools.partial(make, (num_rows, 32, 128), False),
        )
        yield BenchCase(f"residual-{num_rows}", residual, cost(num_rows, 4096, dtype.itemsize, True))
        yield BenchCase(f"heads-{num_rows}", heads, cost(num_rows * 32, 128, dtype.itemsize, False))


def _row(x_TD: torch.Tensor, weight_D: torch.Tensor, index: int) -> Row:
    return Row((x_TD[index : index + 1], weight_D, None), _PLAIN, lambda normed_TD: normed_TD[index : index + 1])
