# SPDX-License-Identifier: Apache-2.0
"""Inputs of the gated activation: empty, odd sizes, strided rows, arguments that overflow a careless exp."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch

from tokenspeed.kernels.conformance import BenchCase, Case, Cost, Row, Tolerance

TOLERANCE = {torch.float32: Tolerance(1e-5, 1e-5), torch.bfloat16: Tolerance(1.6e-2, 1e-2)}


def cases(dtype: torch.dtype) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(0)
    for num_rows, size in ((0, 8), (1, 1), (3, 13), (2, 64), (40, 1531)):
        x_TF = (torch.randn(num_rows, 2 * size, generator=generator) * 4).to(dtype)
        yield Case(f"{num_rows}x{size}", (x_TF,), rows=tuple(_row(x_TF, index) for index in range(min(num_rows, 4))))
    yield Case("strided", (torch.randn(6, 90, generator=generator).to(dtype)[::2, 5:71],))
    gates = torch.tensor([-1e4, -300.0, -90.0, -88.0, -20.0, -1e-3, 0.0, 1e-3, 20.0, 88.0, 90.0, 300.0, 1e4])
    yield Case("extremes", (torch.cat((gates, torch.ones(13))).to(dtype)[None, :],))


def cost(num_rows: int, size: int, itemsize: int) -> Cost:
    return Cost(5 * num_rows * size, 3 * num_rows * size * itemsize)


def bench_cases(dtype: torch.dtype, device: str) -> Iterator[BenchCase]:
    """An 8B decoder: decodes of 1, 16 and 64 rows and a prefill chunk."""

    def make(num_rows: int) -> Case:
        return Case("bench", (torch.randn(num_rows, 2 * 12288, dtype=dtype, device=device),))

    for num_rows in (1, 16, 64, 8192):
        yield BenchCase(str(num_rows), functools.partial(make, num_rows), cost(num_rows, 12288, dtype.itemsize))


def _row(x_TF: torch.Tensor, index: int) -> Row:
    return Row((x_TF[index : index + 1],), {}, lambda y_TF: y_TF[index : index + 1])
