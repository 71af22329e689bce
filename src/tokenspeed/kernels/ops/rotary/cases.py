# SPDX-License-Identifier: Apache-2.0
"""Inputs of rotary: empty, one token, partial rotation, heads inside a wider row, repeated and far positions."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch

from tokenspeed.kernels.conformance import BenchCase, Case, Cost, Tolerance

TOLERANCE = {torch.float32: Tolerance(1e-5, 1e-5), torch.bfloat16: Tolerance(1.6e-2, 1e-2)}


def cases(dtype: torch.dtype) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(0)
    angles = torch.rand(5000, 1, generator=generator) * torch.linspace(0.1, 9.0, 32)
    for num_tokens, num_heads, head_dim, rotary_dim in ((0, 2, 8, 8), (1, 1, 2, 2), (3, 4, 20, 12), (20, 9, 64, 64)):
        half = rotary_dim // 2
        table_PR = torch.cat((angles[:, :half].cos(), angles[:, :half].sin()), dim=1)
        q_THK = torch.randn(num_tokens, num_heads, head_dim, generator=generator).to(dtype)
        k_TGK = torch.randn(num_tokens, 1, head_dim, generator=generator).to(dtype)
        positions_T = torch.randint(0, 5000, (num_tokens,), generator=generator)
        name = f"{num_tokens}x{num_heads}x{head_dim}-{rotary_dim}"
        yield Case(name, (q_THK, k_TGK, positions_T, table_PR), mutated=(0, 1))
        yield Case(f"{name}-interleaved", (q_THK, k_TGK, positions_T, table_PR, True), mutated=(0, 1))
    fused_TN = torch.randn(5, 6 * 16, generator=generator).to(dtype).view(5, 6, 16)
    table_PR = torch.cat((angles[:, :8].cos(), angles[:, :8].sin()), dim=1)
    positions_T = torch.tensor([4999, 0, 7, 7, 1])
    interleaved = (fused_TN[:, :3, 2:], fused_TN[:, 3:5], positions_T, table_PR[:, 1:15], True)
    yield Case("fused-heads-interleaved", interleaved, mutated=(0, 1))
    yield Case("fused-heads", (fused_TN[:, :3], fused_TN[:, 3:5], positions_T, table_PR), mutated=(0, 1))


def cost(num_tokens: int, num_heads: int, rotary_dim: int, itemsize: int) -> Cost:
    elements = num_tokens * num_heads * rotary_dim
    return Cost(3 * elements, 2 * elements * itemsize + 4 * num_tokens * rotary_dim)


def bench_cases(dtype: torch.dtype, device: str) -> Iterator[BenchCase]:
    """32 query and 8 K/V heads of 128."""

    def make(num_tokens: int) -> Case:
        heads_TNK = torch.randn(num_tokens, 48, 128, dtype=dtype, device=device)
        table_PR = torch.randn(40960, 128, device=device)
        positions_T = torch.randint(0, 40960, (num_tokens,), device=device)
        return Case("bench", (heads_TNK[:, :32], heads_TNK[:, 32:40], positions_T, table_PR), mutated=(0, 1))

    for num_tokens in (1, 16, 64, 8192):
        yield BenchCase(str(num_tokens), functools.partial(make, num_tokens), cost(num_tokens, 40, 128, dtype.itemsize))
