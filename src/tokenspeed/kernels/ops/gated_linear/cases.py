# SPDX-License-Identifier: Apache-2.0
"""Inputs of gated_linear: empty, one row, both sides of a tile's edge, strided rows, both activations, biases, and
sizes that no tile has."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch

from tokenspeed.kernels.conformance import BenchCase, Case, Cost, Tolerance
from tokenspeed.kernels.ops.gated_linear import ACTIVATIONS

TOLERANCE = {
    torch.float32: Tolerance(1e-5, 1e-5),
    torch.bfloat16: Tolerance(1.6e-2, 1e-2),
    torch.float16: Tolerance(2e-3, 2e-3),
}
_SHAPES = ((0, 128, 64), (1, 128, 64), (63, 256, 128), (129, 128, 320), (3, 13, 7), (2, 128, 72), (5, 100, 64))


def cases(dtype: torch.dtype) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(0)
    for number, (num_rows, size, num_inputs) in enumerate(_SHAPES):
        args = drawn((num_rows, size, num_inputs), dtype, has_bias=number % 2 == 1, generator=generator)
        activation = ACTIVATIONS[number % 2]
        yield Case(f"{num_rows}x{size}x{num_inputs}", (*args, activation))
    x_TD = torch.randn(12, 200, generator=generator).to(dtype)[::2, 8:136]
    weight_ND = torch.randn(256, 300, generator=generator).to(dtype)[:, 16:144] * 0.1
    yield Case("strided", (x_TD, weight_ND, None, "silu"))
    extremes = torch.linspace(-100.0, 100.0, 128)[:, None] * torch.eye(1, 64)
    weight_ND = torch.cat((extremes, torch.eye(1, 64).expand(128, 64))).to(dtype)
    yield Case("extremes", (torch.eye(1, 64).to(dtype), weight_ND, None, "silu"))
    yield Case("extremes-gelu", (torch.eye(1, 64).to(dtype), weight_ND, None, "gelu_tanh"))


def drawn(
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    has_bias: bool = False,
    device: str = "cpu",
    generator: torch.Generator | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """x, weight and bias of (T, F, D), such that gate and up are of size 1."""
    num_rows, size, num_inputs = shape
    made = functools.partial(torch.randn, generator=generator, device=device)
    x_TD = made(num_rows, num_inputs).to(dtype)
    weight_ND = made(2 * size, num_inputs).mul_(num_inputs**-0.5).to(dtype)
    return x_TD, weight_ND, made(2 * size).to(dtype) if has_bias else None


def cost(num_rows: int, size: int, num_inputs: int, itemsize: int) -> Cost:
    elements = num_rows * num_inputs + 2 * size * num_inputs + num_rows * size
    return Cost(4 * num_rows * size * num_inputs, elements * itemsize)


def bench_cases(dtype: torch.dtype, device: str) -> Iterator[BenchCase]:
    """Prefill chunks of an 8B decoder."""

    def make(shape: tuple[int, int, int]) -> Case:
        return Case("bench", (*drawn(shape, dtype, device=device), "silu"))

    for num_rows in (2048, 8192):
        shape = (num_rows, 12288, 4096)
        yield BenchCase(str(num_rows), functools.partial(make, shape), cost(*shape, dtype.itemsize))
