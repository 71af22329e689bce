# SPDX-License-Identifier: Apache-2.0
"""The sampling op: distributions, filters, penalties, and draws that depend on nothing but seed and position."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from tokenspeed.kernels.ops import sampling
from tokenspeed.kernels.ops.sampling import (
    Draws,
    Edits,
    Filters,
    Penalties,
    Sampled,
    SampleFn,
    SamplingInputs,
    cases,
    reference,
)
from tokenspeed.kernels.ops.sampling.reference import noise, sample
from tokenspeed.kernels.registry import KernelContext, Ok, Solution, solutions_of

NUM_DRAWS = 20_000


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def draws(num_rows: int, temperature: float = 1.0, **filters: float) -> Draws:
    """Draws with seeds 0, 1, 2, … and the same parameters in every row."""
    chosen = None
    if filters:
        chosen = Filters(
            torch.full((num_rows,), int(filters.get("top_k", 0))),
            torch.full((num_rows,), filters.get("top_p", 1.0)),
            torch.full((num_rows,), filters.get("min_p", 0.0)),
        )
    seeds = torch.arange(num_rows)
    return Draws(torch.full((num_rows,), temperature), seeds, seeds % 7 + 3, chosen)


def kept_by(logits_V: torch.Tensor, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> torch.Tensor:
    """The contract's filters, one token at a time: probabilities with what is filtered out at 0."""
    probs = torch.softmax(logits_V.double(), -1)
    keep = probs >= min_p * probs.max()
    if top_k:
        keep &= probs >= probs.sort(descending=True).values[min(top_k, len(probs)) - 1]
    if top_p < 1:
        left = torch.where(keep, probs, 0.0) / probs[keep].sum()
        more_likely = (left > left[:, None]).double() @ left
        keep &= (more_likely < top_p) | (left == left.max())
    return torch.where(keep, probs, 0.0) / probs[keep].sum()


def chi_square_fits(token_ids: torch.Tensor, probs: torch.Tensor) -> bool:
    """No token outside the support, and the statistic within five standard deviations of its mean."""
    counts = torch.bincount(token_ids, minlength=len(probs)).double()
    support = probs > 0
    if counts[~support].sum() > 0:
        return False
    expected = probs[support] * len(token_ids)
    statistic = ((counts[support] - expected) ** 2 / expected).sum().item()
    freedom = int(support.sum()) - 1
    return statistic <= freedom + 5 * math.sqrt(2 * max(freedom, 1))


@pytest.mark.parametrize(
    "filters",
    [
        {},
        {"top_k": 5},
        {"top_p": 0.7},
        {"min_p": 0.2},
        {"top_k": 8, "top_p": 0.8, "min_p": 0.05},
        {"top_k": 1},
        {"top_p": 1e-6},
    ],
)
@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_draws_follow_the_filtered_distribution(temperature: float, filters: dict[str, float]) -> None:
    logits_V = torch.linspace(2.0, -1.5, 24)[torch.randperm(24, generator=torch.Generator().manual_seed(1))]
    inputs = SamplingInputs(draws(NUM_DRAWS, temperature, **filters))
    token_ids = sample(logits_V.expand(NUM_DRAWS, -1), inputs).token_ids_S
    assert chi_square_fits(token_ids, kept_by(logits_V / temperature, **filters))


def test_the_chi_square_test_can_fail() -> None:
    logits_V = torch.linspace(2.0, -1.5, 24)
    token_ids = sample(logits_V.expand(NUM_DRAWS, -1), SamplingInputs(draws(NUM_DRAWS, 1.1))).token_ids_S
    assert not chi_square_fits(token_ids, kept_by(logits_V))
    filtered = sample(logits_V.expand(NUM_DRAWS, -1), SamplingInputs(draws(NUM_DRAWS, 1.0, top_k=6))).token_ids_S
    assert not chi_square_fits(filtered, kept_by(logits_V, top_k=5))


def test_noise_is_exponential_and_uncorrelated_over_positions_seeds_and_tokens() -> None:
    seeds, tokens = torch.arange(100), torch.arange(1000).unsqueeze(0)
    first = noise(seeds, torch.full((100,), 5), tokens)
    assert first.mean().item() == pytest.approx(1.0, abs=0.02)
    assert first.var().item() == pytest.approx(1.0, abs=0.05)
    assert (first > 1.0).double().mean().item() == pytest.approx(math.exp(-1), abs=0.01)
    others = (
        noise(seeds, torch.full((100,), 6), tokens),
        noise(seeds + 1, torch.full((100,), 5), tokens),
        noise(seeds, torch.full((100,), 5), tokens + 1),
    )
    for other in others:
        correlation = torch.corrcoef(torch.stack([first.flatten(), other.flatten()]))[0, 1]
        assert abs(correlation.item()) < 0.02


def test_noise_is_the_same_for_single_tokens_as_for_the_whole_vocabulary() -> None:
    seeds, positions = torch.tensor([-(2**63), 2**63 - 1]), torch.tensor([0, 2**40])
    whole = noise(seeds, positions, torch.arange(500).unsqueeze(0))
    some = torch.tensor([[499, 0, 7], [3, 3, 498]])
    assert torch.equal(noise(seeds, positions, some), whole.gather(-1, some))


def test_a_draw_depends_on_seed_and_position_only() -> None:
    generator = torch.Generator().manual_seed(3)
    logits_SV = torch.randn(12, 700, generator=generator) * 2
    batch = draws(12, 0.9, top_k=50, top_p=0.9)
    assert batch.filters is not None
    batch.filters.top_k_S[::3] = 0
    batch.filters.top_p_S[::2] = 1.0
    batch.temperature_S[5] = 0.0
    whole = sample(logits_SV, SamplingInputs(batch)).token_ids_S
    for row in range(12):
        alone = reference._take(batch, torch.tensor([row]))
        assert sample(logits_SV[row : row + 1], SamplingInputs(alone)).token_ids_S == whole[row]
    assert whole[5] == logits_SV[5].argmax()
    again = dataclasses.replace(batch, position_S=batch.position_S + 1)
    assert not torch.equal(sample(logits_SV, SamplingInputs(again)).token_ids_S, whole)


@pytest.mark.parametrize("first_look", [2, 17, 700])
def test_widening_never_changes_a_draw(monkeypatch: pytest.MonkeyPatch, first_look: int) -> None:
    generator = torch.Generator().manual_seed(4)
    logits_SV = (torch.randn(64, 700, generator=generator) * 3).round(decimals=1)  # many ties
    params = draws(64, 1.0, top_k=1)
    filters = Filters(
        torch.randint(0, 800, (64,), generator=generator) * (torch.arange(64) % 3 != 0),
        torch.rand(64, generator=generator),
        torch.rand(64, generator=generator) * 0.2 * (torch.arange(64) % 2),
    )
    inputs = SamplingInputs(dataclasses.replace(params, filters=filters))
    monkeypatch.setattr(reference, "FIRST_LOOK", first_look)
    token_ids = sample(logits_SV, inputs).token_ids_S
    for row in range(64):
        kept = kept_by(
            logits_SV[row], int(filters.top_k_S[row]), float(filters.top_p_S[row]), float(filters.min_p_S[row])
        )
        noise_V = noise(params.seed_S[row : row + 1], params.position_S[row : row + 1], torch.arange(700)[None])[0]
        scores = torch.log(kept) - torch.log(noise_V.double())
        best = scores.topk(2).values
        assert token_ids[row] == scores.argmax() or best[0] - best[1] < 1e-4


def test_equals_at_the_cut_are_all_kept() -> None:
    logits_V = torch.tensor([1.0, 1.0, 1.0, 0.0, -1.0])
    token_ids = sample(logits_V.expand(500, -1), SamplingInputs(draws(500, top_k=2))).token_ids_S
    assert set(token_ids.tolist()) == {0, 1, 2}


def test_greedy_takes_the_lowest_id_of_equals() -> None:
    logits_SV = torch.tensor([[0.0, 3.0, 3.0], [1.0, 1.0, 1.0]])
    assert sample(logits_SV, SamplingInputs()).token_ids_S.tolist() == [1, 0]


def test_penalties_and_edits_equal_a_plain_loop() -> None:
    generator = torch.Generator().manual_seed(5)
    logits_SV = torch.randn(4, 60, generator=generator)
    before = logits_SV.clone()
    rows = [3, 1]
    counts = torch.randint(0, 3, (2, 60), generator=generator, dtype=torch.int32)
    prompt = torch.rand(2, 60, generator=generator) < 0.3
    presence, frequency, repetition = torch.tensor([0.5, -0.3]), torch.tensor([0.2, 1.0]), torch.tensor([1.3, 1.0])
    edits = Edits(torch.tensor([3, 0, 0, 0]), torch.tensor([9, 7, 7, 2]), torch.tensor([5.0, 1.0, 2.0, -math.inf]))
    inputs = SamplingInputs(None, Penalties(torch.tensor(rows), counts, prompt, presence, frequency, repetition), edits)
    edited = reference._edit(logits_SV, inputs)
    expected = before.clone()
    for index, row in enumerate(rows):
        for token in range(60):
            value = float(before[row, token])
            count = int(counts[index, token])
            if count or prompt[index, token]:
                value = value / repetition[index] if value > 0 else value * repetition[index]
            expected[row, token] = value - frequency[index] * count - presence[index] * (count > 0)
    expected[3, 9] += 5.0
    expected[0, 7] += 3.0
    expected[0, 2] = -math.inf
    torch.testing.assert_close(edited, expected)
    assert torch.equal(logits_SV, before)
    assert torch.equal(sample(logits_SV, inputs).token_ids_S, expected.argmax(-1))


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("inputs", [SamplingInputs(), SamplingInputs(draws(3, 1.0, top_p=0.9))])
def test_a_row_with_nan_or_infinity_is_faulty_alone(poison: float, inputs: SamplingInputs) -> None:
    logits_SV = torch.randn(3, 400, generator=torch.Generator().manual_seed(6))
    clean = sample(logits_SV, inputs)
    logits_SV[1, 77] = poison
    sampled = sample(logits_SV, inputs)
    assert sampled.is_faulty_S.tolist() == [False, True, False]
    assert sampled.token_ids_S[1] == 0
    assert sampled.token_ids_S[[0, 2]].tolist() == clean.token_ids_S[[0, 2]].tolist()


def test_minus_infinity_is_no_fault_unless_it_is_all() -> None:
    logits_SV = torch.full((2, 5), -math.inf)
    logits_SV[0, 3] = -50.0
    sampled = sample(logits_SV, SamplingInputs(draws(2, 0.7, top_p=0.5)))
    assert sampled.is_faulty_S.tolist() == [False, True]
    assert sampled.token_ids_S[0] == 3


SOLUTIONS = [each for each in solutions_of("sampling") if each.supports(KernelContext("cpu", torch.float32)) == Ok()]


@pytest.mark.parametrize("solution", SOLUTIONS, ids=lambda each: each.name)
def test_it_writes_where_it_is_told_to_and_nowhere_else(solution: Solution) -> None:
    call: SampleFn = solution.build(KernelContext("cpu", torch.float32))
    logits_SV = torch.randn(3, 50, generator=torch.Generator().manual_seed(9))
    logits_SV[2, 7] = math.nan
    for inputs in (SamplingInputs(), SamplingInputs(draws(3, 1.0, top_k=4))):
        first = call(logits_SV, inputs)
        into = Sampled(torch.full((3,), -1), torch.zeros(3, dtype=torch.bool))
        assert call(logits_SV, inputs, into) is into
        assert into.token_ids_S.tolist() == first.token_ids_S.tolist()
        assert into.is_faulty_S.tolist() == first.is_faulty_S.tolist() == [False, False, True]
        before = first.token_ids_S.tolist()
        call(-logits_SV, inputs)
        assert first.token_ids_S.tolist() == before


def test_nothing_to_sample() -> None:
    sampled = sample(torch.zeros(0, 9), SamplingInputs())
    assert sampled.token_ids_S.shape == (0,)
    assert sampled.is_faulty_S.shape == (0,)


def test_a_tiny_temperature_is_greedy() -> None:
    logits_SV = torch.randn(50, 30, generator=torch.Generator().manual_seed(8))
    params = SamplingInputs(draws(50, sampling.GREEDY_BELOW / 2))
    assert torch.equal(sample(logits_SV, params).token_ids_S, logits_SV.argmax(-1))


def test_each_row_of_each_case_stands_alone() -> None:
    for case in cases.cases(torch.float32):
        whole = sample(*case.args).token_ids_S  # type: ignore[arg-type]
        for row in case.rows:
            assert torch.equal(sample(*row.args).token_ids_S, row.select(whole)), case.name  # type: ignore[arg-type]
