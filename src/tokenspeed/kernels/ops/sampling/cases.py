# SPDX-License-Identifier: Apache-2.0
"""Inputs of sampling: empty, one row, odd and large vocabularies, every part alone and all together, views, faults."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator

import torch

from tokenspeed.kernels.conformance import BenchCase, Case, Cost, Row, Tolerance
from tokenspeed.kernels.ops.sampling import Draws, Edits, Filters, Masks, Penalties, SamplingInputs

TOLERANCE = {torch.float32: Tolerance(0.0, 0.0), torch.bfloat16: Tolerance(0.0, 0.0)}


def cases(dtype: torch.dtype) -> Iterator[Case]:
    """dtype is the model's; logits are float32 whatever it is, so one dtype has all the cases."""
    generator = torch.Generator().manual_seed(0)

    def logits(num_rows: int, vocab_size: int) -> torch.Tensor:
        return torch.randn(num_rows, vocab_size, generator=generator) * 4

    yield _case("none", logits(0, 9), SamplingInputs())
    for num_rows, vocab_size in ((1, 1), (1, 7), (5, 577), (1, 33_000)):
        logits_SV = logits(num_rows, vocab_size)
        yield _case(f"{num_rows}x{vocab_size}-greedy", logits_SV, SamplingInputs())
        yield _case(f"{num_rows}x{vocab_size}-open", logits_SV, SamplingInputs(_draws(num_rows)))
        yield _case(f"{num_rows}x{vocab_size}-filtered", logits_SV, SamplingInputs(_draws(num_rows, True)))
        if dtype is not torch.float32 and vocab_size == 7:
            return
    edited = SamplingInputs(None, _penalties(generator, (4, 0, 2), 90), _edits())
    yield _case("edited", logits(6, 90), edited)
    yield _case("all", logits(6, 90), SamplingInputs(_draws(6, True), edited.penalties, edited.edits))
    padded = SamplingInputs(None, _penalties(generator, (9, 1, 6), 90), _edits(4), _masks(generator, 12, 90))
    yield _case("padded", logits(6, 90), padded)
    yield _case("padded-filtered", logits(6, 90), dataclasses.replace(padded, draws=_draws(6, True)))
    for num_rows, vocab_size in ((2, 32), (3, 577)):
        masked = SamplingInputs(_draws(num_rows, True), masks=_masks(generator, num_rows, vocab_size))
        yield _case(f"{num_rows}x{vocab_size}-masked", logits(num_rows, vocab_size), masked)
    yield _case("strided", logits(8, 200)[::2, 3:160], SamplingInputs(_draws(4, True)))
    yield _case("equals", torch.ones(4, 300), SamplingInputs(_draws(4, True)))
    late_SV = torch.zeros(2, 67)
    late_SV[0, 40:], late_SV[1, 66] = 3.0, 3.0
    yield _case("late-equals", late_SV, SamplingInputs())
    yield _case("negative-zero", torch.tensor([[-0.0, 0.0, -1.0], [-1.0, 0.0, -0.0]]), SamplingInputs())
    yield _case("ties", logits(5, 300).round(), SamplingInputs(_draws(5, True)))
    yield _case("limits", logits(10, 70), SamplingInputs(_limits(70)))
    sparse_SV = logits(5, 200)
    sparse_SV[:, torch.arange(200) % 7 > 0] = -math.inf
    yield _case("sparse", sparse_SV, SamplingInputs(_draws(5, True)))
    faulty_SV = logits(7, 65)
    faulty_SV[1, 64], faulty_SV[2, 0], faulty_SV[3] = math.nan, math.inf, -math.inf
    faulty_SV[4, 7], faulty_SV[5, 0], faulty_SV[6, 1:] = -math.inf, math.nan, -math.inf
    yield _case("faulty", faulty_SV, SamplingInputs(_draws(7)))
    yield _case("faulty-greedy", faulty_SV, SamplingInputs())


def cost(num_rows: int, vocab_size: int) -> Cost:
    """Greedy: one pass over the logits."""
    return Cost(num_rows * vocab_size, 4 * num_rows * vocab_size)


def bench_cases(dtype: torch.dtype, device: str) -> Iterator[BenchCase]:
    """A vocabulary of 151936: greedy, drawn, and drawn from a nucleus."""
    del dtype

    def make(num_rows: int, kind: str) -> Case:
        logits_SV = torch.randn(num_rows, 151936, device=device) * 4
        index_S, ones_S = torch.arange(num_rows, device=device), torch.ones(num_rows, device=device)
        filters = Filters(torch.full_like(index_S, 50), ones_S * 0.95, ones_S * 0.0) if kind == "filtered" else None
        draws = None if kind == "greedy" else Draws(ones_S, index_S * 7919, index_S + 11, filters)
        return Case("bench", (logits_SV, SamplingInputs(draws)))

    for num_rows in (1, 16, 64):
        for kind in ("greedy", "open", "filtered"):
            yield BenchCase(f"{kind}-{num_rows}", functools.partial(make, num_rows, kind), cost(num_rows, 151936))


def _draws(num_rows: int, has_filters: bool = False) -> Draws:
    index_S = torch.arange(num_rows)
    filters = Filters(
        torch.tensor([0, 3, 50, 0, 700])[index_S % 5],
        torch.tensor([0.9, 1.0, 0.5, 0.999])[index_S % 4],
        torch.tensor([0.0, 0.02, 0.0])[index_S % 3],
    )
    temperature_S = torch.tensor([0.7, 1.0, 0.0, 1.6])[index_S % 4]
    return Draws(temperature_S, index_S * 7919 - (1 << 62), index_S + 11, filters if has_filters else None)


def _limits(vocab_size: int) -> Draws:
    """Filters and temperatures at the ends of their ranges, one a row."""
    filters = Filters(
        torch.tensor([vocab_size, vocab_size + 3, 1, 0, 0, 0, 0, 0, 2, 0]),
        torch.tensor([1.0, 0.9, 1.0, 0.0, 1e-6, 1.0, 1.0, 0.95, 0.0, 1.0]),
        torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1e-9, 0.0, 0.5, 0.0]),
    )
    temperature_S = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 2e-5, 50.0, 1e-6])
    index_S = torch.arange(len(temperature_S))
    return Draws(temperature_S, index_S * 31 + (1 << 62), index_S + (1 << 40), filters)


def _penalties(generator: torch.Generator, rows: tuple[int, ...], vocab_size: int) -> Penalties:
    shape = (len(rows), vocab_size)
    return Penalties(
        torch.tensor(rows),
        torch.randint(0, 3, shape, generator=generator, dtype=torch.int32),
        torch.rand(shape, generator=generator) < 0.2,
        torch.linspace(-0.5, 1.0, len(rows)),
        torch.linspace(0.0, 0.7, len(rows)),
        torch.linspace(1.0, 1.5, len(rows)),
    )


def _edits(first_row: int = 0) -> Edits:
    values_N = torch.tensor([3.0, -2.0, 1.0, -math.inf, 100.0])
    return Edits(first_row + torch.tensor([0, 0, 0, 3, 5]), torch.tensor([4, 4, 89, 17, 0]), values_N)


def _masks(generator: torch.Generator, num_rows: int, vocab_size: int) -> Masks:
    """A dense one, and for the last row one bit: the highest."""
    bits_GW = torch.randint(-(1 << 31), 1 << 31, (2, -(-vocab_size // 32)), generator=generator).to(torch.int32)
    bits_GW[1] = 0
    bits_GW[1, -1] = 1 << (vocab_size - 1) % 32 if vocab_size % 32 else -(1 << 31)
    return Masks(torch.tensor([0, num_rows - 1]), bits_GW)


def _case(name: str, logits_SV: torch.Tensor, inputs: SamplingInputs) -> Case:
    is_whole = any(part is not None for part in (inputs.penalties, inputs.edits, inputs.masks))
    num_rows = 0 if is_whole else len(logits_SV)
    return Case(name, (logits_SV, inputs), rows=tuple(_row(logits_SV, inputs.draws, row) for row in range(num_rows)))


def _row(logits_SV: torch.Tensor, draws: Draws | None, row: int) -> Row:
    part = slice(row, row + 1)
    alone = None
    if draws is not None:
        filters = draws.filters
        if filters is not None:
            filters = Filters(filters.top_k_S[part], filters.top_p_S[part], filters.min_p_S[part])
        alone = Draws(draws.temperature_S[part], draws.seed_S[part], draws.position_S[part], filters)
    return Row((logits_SV[part], SamplingInputs(alone)), {}, lambda token_ids_S: token_ids_S[part])
