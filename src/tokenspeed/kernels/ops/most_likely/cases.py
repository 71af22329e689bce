# SPDX-License-Identifier: Apache-2.0
"""Inputs of most_likely: empty, one number, sizes about those of vectors, views, equals, faults. The dtype of a model
changes nothing."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

import torch

from tokenspeed.kernels.conformance import BenchCase, Case, Cost, Tolerance

TOLERANCE = {torch.float32: Tolerance(0.0, 0.0), torch.bfloat16: Tolerance(0.0, 0.0)}


def cases(_dtype: torch.dtype) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(0)

    def logits(num_rows: int, vocab_size: int) -> torch.Tensor:
        return torch.randn(num_rows, vocab_size, generator=generator) * 4 - 9

    for num_rows, vocab_size in ((0, 9), (1, 1), (3, 5), (2, 16), (4, 33), (5, 577), (1, 33_000), (3, 20_000)):
        yield _case(f"{num_rows}x{vocab_size}", logits(num_rows, vocab_size))
    yield _case("strided", logits(8, 200)[::2, 3:160])
    yield _case("equals", torch.ones(3, 300))
    equal_SV = torch.zeros(2, 67)
    equal_SV[0, 40:], equal_SV[1, 66] = 3.0, 3.0
    yield _case("late-equals", equal_SV)
    yield _case("negative-zero", torch.tensor([[-0.0, 0.0, -1.0], [-1.0, 0.0, -0.0]]))
    faulty_SV = logits(7, 65)
    faulty_SV[1, 64], faulty_SV[2, 0], faulty_SV[3] = math.nan, math.inf, -math.inf
    faulty_SV[4, 7], faulty_SV[5, 0], faulty_SV[6, 1:] = -math.inf, math.nan, -math.inf
    yield _case("faulty", faulty_SV)


def cost(num_rows: int, vocab_size: int) -> Cost:
    return Cost(num_rows * vocab_size, 4 * num_rows * vocab_size)


def bench_cases(_dtype: torch.dtype, device: str) -> Iterator[BenchCase]:
    """Vocabularies of 49152 and 151936."""
    for num_rows, vocab_size in ((1, 49_152), (1, 151_936), (8, 151_936)):
        make = functools.partial(_bench_case, num_rows, vocab_size, device)
        yield BenchCase(f"{num_rows}x{vocab_size}", make, cost(num_rows, vocab_size))


def _case(name: str, logits_SV: torch.Tensor) -> Case:
    told_2S = torch.full((2, len(logits_SV)), -1, dtype=torch.int64, device=logits_SV.device)
    return Case(name, (logits_SV, told_2S), mutated=(1,))


def _bench_case(num_rows: int, vocab_size: int, device: str) -> Case:
    return _case("bench", torch.randn(num_rows, vocab_size, device=device))
