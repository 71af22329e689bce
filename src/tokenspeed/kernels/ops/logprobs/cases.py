# SPDX-License-Identifier: Apache-2.0
"""Inputs of log-probabilities: empty, one row, one token, odd and large vocabularies, equals, −inf, views."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

import torch

from tokenspeed.kernels.conformance import BenchCase, Case, Cost, Row, Tolerance

TOLERANCE = {torch.float32: Tolerance(2e-6, 2e-6), torch.bfloat16: Tolerance(2e-6, 2e-6)}


def cases(dtype: torch.dtype) -> Iterator[Case]:
    """dtype is the model's; logits are float32 whatever it is, so one dtype has all the cases."""
    generator = torch.Generator().manual_seed(0)

    def logits(num_rows: int, vocab_size: int) -> torch.Tensor:
        return torch.randn(num_rows, vocab_size, generator=generator) * 4

    yield _case("none", logits(0, 9), 5)
    for num_rows, vocab_size, num_top in ((1, 1, 3), (1, 7, 20), (3, 577, 0), (2, 2048, 1), (2, 4_501, 20)):
        yield _case(f"{num_rows}x{vocab_size}-top{num_top}", logits(num_rows, vocab_size), num_top)
        if dtype is not torch.float32 and vocab_size == 7:
            return
    yield _case("strided", logits(8, 200)[::2, 3:160], 4)
    yield _case("equals", torch.ones(1, 2_100), 20)
    yield _case("few-values", logits(1, 4_500).round() / 4, 20)
    lowest_SV = torch.full((1, 3_000), -math.inf)
    lowest_SV[:, 2_500:2_520] = logits(1, 20)  # −inf would make the answer infinite if it were among the top
    yield _case("mostly-impossible", lowest_SV, 20, first_id=2_500)
    yield _case("far-apart", logits(2, 300) * 1e4, 3, first_id=299)


def cost(num_rows: int, vocab_size: int) -> Cost:
    """One pass over the logits."""
    return Cost(2 * num_rows * vocab_size, 4 * num_rows * vocab_size)


def bench_cases(dtype: torch.dtype, device: str) -> Iterator[BenchCase]:
    """A vocabulary of 151936, the sampled token alone and with the 20 most likely."""
    del dtype

    def make(num_rows: int, num_top: int) -> Case:
        token_ids_S = torch.randint(151936, (num_rows,), device=device)
        return Case("bench", (torch.randn(num_rows, 151936, device=device) * 4, token_ids_S, num_top))

    for num_rows in (1, 16, 64):
        for num_top in (0, 20):
            name = f"top{num_top}-{num_rows}"
            yield BenchCase(name, functools.partial(make, num_rows, num_top), cost(num_rows, 151936))


def _case(name: str, logits_SV: torch.Tensor, num_top: int, first_id: int = 0) -> Case:
    num_rows, vocab_size = logits_SV.shape
    token_ids_S = first_id + torch.arange(num_rows) * 7919 % (vocab_size - first_id)
    if first_id:
        token_ids_S = torch.full_like(token_ids_S, first_id)
    rows = tuple(_row(logits_SV, token_ids_S, num_top, row) for row in range(num_rows))
    return Case(name, (logits_SV, token_ids_S, num_top), rows=rows)


def _row(logits_SV: torch.Tensor, token_ids_S: torch.Tensor, num_top: int, row: int) -> Row:
    part = slice(row, row + 1)
    return Row((logits_SV[part], token_ids_S[part], num_top), {}, lambda logprobs_S: logprobs_S[part])
