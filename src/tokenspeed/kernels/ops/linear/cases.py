# SPDX-License-Identifier: Apache-2.0
"""Inputs of linear: empty, one row, every tile remainder, strided rows, inputs longer than a block of the sum."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch

from tokenspeed.kernels.conformance import BenchCase, Case, Cost, Row, Tolerance

TOLERANCE = {torch.float32: Tolerance(1e-5, 1e-5), torch.bfloat16: Tolerance(1.6e-2, 1e-2)}
_SHAPES = (
    (0, 5, 7),
    (1, 1, 1),
    (1, 37, 64),
    (2, 9, 100),
    (3, 50, 31),
    (5, 24, 8),
    (7, 3, 513),
    (97, 31, 40),
    (6, 65, 1100),
)


def cases(dtype: torch.dtype) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(0)
    for num_rows, num_outputs, num_inputs in _SHAPES:
        x_TD = torch.randn(num_rows, num_inputs, generator=generator).to(dtype)
        weight_ND = (torch.randn(num_outputs, num_inputs, generator=generator) * num_inputs**-0.5).to(dtype)
        bias_N = torch.randn(num_outputs, generator=generator).to(dtype) if num_rows % 2 else None
        name = f"{num_rows}x{num_outputs}x{num_inputs}"
        yield Case(name, (x_TD, weight_ND, bias_N), rows=_rows(x_TD, weight_ND, bias_N))
    wide_TD = torch.randn(6, 200, generator=generator).to(dtype)
    weight_ND = torch.randn(20, 96, generator=generator).to(dtype)[:, 5:85]
    many_TD = torch.randn(600, 40, generator=generator).to(dtype)
    yield Case("many-rows", (many_TD, torch.randn(130, 40, generator=generator).to(dtype), None))
    yield Case("strided", (wide_TD[::2, 17:97], weight_ND, None))
    yield Case("float32-out", (wide_TD[:2, :80], weight_ND, None, torch.float32))


def cost(num_rows: int, num_outputs: int, num_inputs: int, itemsize: int) -> Cost:
    elements = num_rows * num_inputs + num_outputs * num_inputs + num_rows * num_outputs
    return Cost(2 * num_rows * num_outputs * num_inputs, elements * itemsize)


def bench_cases(dtype: torch.dtype, device: str) -> Iterator[BenchCase]:
    """The projections of an 8B decoder: decodes of 1, 16 and 64 rows and a prefill chunk."""
    weights = {"qkv": (6144, 4096), "o": (4096, 4096), "gate-up": (24576, 4096), "down": (4096, 12288)}
    for num_rows in (1, 16, 64, 8192):
        for name, (num_outputs, num_inputs) in weights.items():
            shape = (num_rows, num_outputs, num_inputs)
            make = functools.partial(_bench_case, shape, dtype, device)
            yield BenchCase(f"{name}-{num_rows}", make, cost(*shape, dtype.itemsize))
        if num_rows <= 64:
            shape = (num_rows, 151936, 4096)
            make = functools.partial(_bench_case, shape, dtype, device)
            yield BenchCase(f"head-{num_rows}", make, cost(*shape, dtype.itemsize))


def _bench_case(shape: tuple[int, int, int], dtype: torch.dtype, device: str) -> Case:
    num_rows, num_outputs, num_inputs = shape
    x_TD = torch.randn(num_rows, num_inputs, dtype=dtype, device=device)
    weight_ND = torch.randn(num_outputs, num_inputs, dtype=dtype, device=device) * num_inputs**-0.5
    return Case("bench", (x_TD, weight_ND, None))


def _rows(x_TD: torch.Tensor, weight_ND: torch.Tensor, bias_N: torch.Tensor | None) -> tuple[Row, ...]:
    def row(index: int) -> Row:
        return Row((x_TD[index : index + 1], weight_ND, bias_N), {}, lambda y_TN: y_TN[index : index + 1])

    return tuple(row(index) for index in range(x_TD.shape[0]))
