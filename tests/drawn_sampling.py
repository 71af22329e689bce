# SPDX-License-Identifier: Apache-2.0
"""Random calls of the op sampling, and how a solution is held to the reference on them."""

from __future__ import annotations

import math

import torch

from tokenspeed.kernels.ops.sampling import (
    GREEDY_BELOW,
    Draws,
    Edits,
    Filters,
    Masks,
    Penalties,
    SampleFn,
    SamplingInputs,
)
from tokenspeed.kernels.ops.sampling import reference as oracle

KINDS = ("plain", "flat", "peaked", "equals", "sparse", "faulty", "transposed")


def random_logits(generator: torch.Generator, kind: str, num_rows: int, vocab_size: int) -> torch.Tensor:
    """(S, V) float32 on the generator's device."""
    device = generator.device
    logits_SV = torch.randn(num_rows, vocab_size, generator=generator, device=device) * 3
    if kind == "flat":
        return logits_SV * 0.1
    if kind == "peaked":  # a few likely tokens and a long tail, as language has
        ranks_SV = torch.rand(num_rows, vocab_size, generator=generator, device=device).argsort(-1) + 1.0
        return logits_SV * 0.1 - 1.6 * ranks_SV.log()
    if kind == "equals":
        return logits_SV.round()
    if kind == "sparse":
        is_out_SV = torch.rand(num_rows, vocab_size, generator=generator, device=device) < 0.8
        return logits_SV.masked_fill(is_out_SV, -math.inf)
    if kind == "faulty":
        logits_SV[0, -1] = math.nan
        logits_SV[-1, 0] = math.inf
    return logits_SV.t().contiguous().t() if kind == "transposed" else logits_SV


def random_draws(generator: torch.Generator, num_rows: int, vocab_size: int) -> Draws:
    """Rows of every sort: greedy, open and filtered, tiny and huge temperatures."""
    filters = Filters(
        _any_of(generator, num_rows, (0, 0, 1, 2, 7, 11, 50, vocab_size, vocab_size + 3, 5_000)).long(),
        _any_of(generator, num_rows, (1.0, 1.0, 0.0, 1e-6, 0.37, 0.71, 0.95, 0.999)),
        _any_of(generator, num_rows, (0.0, 0.0, 0.0, 1e-9, 0.03, 0.4, 1.0)),
    )
    temperature_S = _any_of(generator, num_rows, (0.0, 1e-6, 2e-5, 0.1, 0.7, 1.0, 1.9, 50.0))
    device = generator.device
    seed_S = torch.randint(-(1 << 63), (1 << 63) - 1, (num_rows,), generator=generator, device=device)
    position_S = torch.randint(0, 1 << 20, (num_rows,), generator=generator, device=device)
    return Draws(temperature_S, seed_S, position_S, filters)


def random_edits(generator: torch.Generator, num_rows: int, vocab_size: int) -> SamplingInputs:
    """Some of each kind, some of them of rows that are not there. Token 0 stays possible."""
    device = generator.device
    rows = torch.randperm(num_rows + 2, generator=generator, device=device)
    shape = (len(rows), vocab_size)
    prompt_mask_PV = torch.rand(shape, generator=generator, device=device) < 0.3
    penalties = Penalties(
        rows,
        torch.randint(0, 3, shape, generator=generator, dtype=torch.int32, device=device),
        prompt_mask_PV if num_rows % 2 else None,
        torch.rand(len(rows), generator=generator, device=device),
        torch.rand(len(rows), generator=generator, device=device),
        1 + torch.rand(len(rows), generator=generator, device=device),
    )
    num_edits = 70
    edits = Edits(
        torch.randint(0, num_rows + 2, (num_edits,), generator=generator, device=device),
        torch.randint(min(1, vocab_size - 1), vocab_size, (num_edits,), generator=generator, device=device),
        _any_of(generator, num_edits, (2.0, -1.5, 0.25, -math.inf if vocab_size > 1 else -9.0)),
    )
    words = (2, -(-vocab_size // 32))
    bits_GW = torch.randint(-(1 << 31), 1 << 31, words, generator=generator, device=device).to(torch.int32) | 1
    return SamplingInputs(None, penalties, edits, Masks(rows[:2], bits_GW))


def assert_same(sample: SampleFn, logits_SV: torch.Tensor, inputs: SamplingInputs) -> None:
    """The tokens of the reference, but where the two scores are as near as float32 can tell them apart."""
    expected, actual = oracle.sample(logits_SV, inputs), sample(logits_SV, inputs)
    assert torch.equal(expected.is_faulty_S, actual.is_faulty_S)
    edited_SV = oracle._edit(logits_SV, inputs)
    for row in torch.nonzero(expected.token_ids_S != actual.token_ids_S).flatten().tolist():
        pair_12 = torch.stack([expected.token_ids_S[row], actual.token_ids_S[row]]).unsqueeze(0)
        assert inputs.draws is not None, f"greedy row {row}: {pair_12.tolist()}"
        temperature = float(inputs.draws.temperature_S[row])
        assert temperature >= GREEDY_BELOW, f"greedy row {row}: {pair_12.tolist()}"
        noise_2 = oracle.noise(inputs.draws.seed_S[row : row + 1], inputs.draws.position_S[row : row + 1], pair_12)[0]
        scaled_2 = edited_SV[row, pair_12[0]].double() / temperature
        first, second = (scaled_2 - noise_2.double().log()).tolist()
        near = 1e-5 + 4e-7 * float(scaled_2.abs().max())
        assert abs(first - second) < near, f"row {row}: tokens {pair_12.tolist()} score {first} and {second}"


def _any_of(generator: torch.Generator, num: int, values: tuple[float, ...]) -> torch.Tensor:
    choice = torch.randint(len(values), (num,), generator=generator, device=generator.device)
    return torch.tensor(values, dtype=torch.float32, device=generator.device)[choice]
