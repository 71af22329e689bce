# SPDX-License-Identifier: Apache-2.0
"""The compiled sampling against the reference: groups and chunks that are full, begun and over, every part, any number
of threads, and tensors that come again with other numbers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drawn_sampling import KINDS, assert_same, random_draws, random_edits, random_logits
from tokenspeed.kernels.ops.sampling import Draws, Edits, Filters, Masks, Sampled, SampleFn, SamplingInputs, cpu
from tokenspeed.kernels.platform import compiled_cpu, require_cpu_module
from tokenspeed.kernels.registry import KernelContext, Ok
from unit.kernels.test_sampling import chi_square_fits, draws, kept_by

CPU = KernelContext("cpu", torch.float32)
NUM_DRAWS = 20_000

pytestmark = pytest.mark.skipif(compiled_cpu(CPU) != Ok(), reason="the compiled CPU kernels are not built")


@pytest.fixture(autouse=True)
def _restored_threads() -> Iterator[None]:
    module = require_cpu_module()
    num_threads = module.num_threads()
    yield
    module.set_num_threads(num_threads)


@pytest.fixture
def sample() -> SampleFn:
    built: SampleFn = cpu.SOLUTION.build(CPU)
    return built


def random_inputs(generator: torch.Generator, num_rows: int, vocab_size: int, parts: str) -> SamplingInputs:
    params = random_draws(generator, num_rows, vocab_size)
    if "filtered" not in parts:
        params = Draws(params.temperature_S, params.seed_S, params.position_S)
    edits = random_edits(generator, num_rows, vocab_size) if "edited" in parts else SamplingInputs()
    return dataclasses.replace(edits, draws=None if parts == "edited greedy" else params)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 1 << 30),
    kind=st.sampled_from(KINDS),
    num_rows=st.sampled_from([1, 2, 3, 5, 9, 40]),
    vocab_size=st.sampled_from([1, 2, 7, 31, 63, 64, 65, 128, 577, 4_095, 4_096, 4_097, 16_384, 16_385, 40_000]),
    parts=st.sampled_from(["open", "filtered", "filtered", "edited", "edited greedy", "edited and filtered"]),
)
def test_takes_the_tokens_of_the_reference(seed: int, kind: str, num_rows: int, vocab_size: int, parts: str) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits_SV = random_logits(generator, kind, num_rows, vocab_size)
    before = logits_SV.clone()
    assert_same(cpu.SOLUTION.build(CPU), logits_SV, random_inputs(generator, num_rows, vocab_size, parts))
    assert torch.equal(logits_SV.nan_to_num(nan=-77.0), before.nan_to_num(nan=-77.0))


@pytest.mark.parametrize("kind", ["plain", "flat", "peaked", "equals"])
@pytest.mark.parametrize(
    "filters",
    [
        {},
        {"top_p": 0.95},
        {"top_p": 0.01},
        {"top_p": 0.0},
        {"top_k": 20, "top_p": 0.8},
        {"top_k": 700, "top_p": 0.999},
        {"top_k": 3_000},
        {"min_p": 0.05},
        {"min_p": 1e-9, "top_p": 0.9},
        {"min_p": 1.0},
        {"top_k": 1},
    ],
)
def test_large_vocabularies(sample: SampleFn, kind: str, filters: dict[str, float]) -> None:
    """Of several chunks, the last of which is not full."""
    logits_SV = random_logits(torch.Generator().manual_seed(11), kind, 4, 50_001)
    assert_same(sample, logits_SV, SamplingInputs(draws(4, 0.8, **filters)))


@pytest.mark.parametrize("parts", ["open", "filtered", "edited and filtered"])
@pytest.mark.parametrize("vocab_size", [577, 50_001])
def test_neither_threads_nor_the_batch_change_a_token(sample: SampleFn, parts: str, vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(5)
    logits_SV = random_logits(generator, "flat", 12, vocab_size)
    inputs = random_inputs(generator, 12, vocab_size, parts)
    told = []
    for num_threads in (1, 2, 5):
        require_cpu_module().set_num_threads(num_threads)
        told += [sample(logits_SV.clone(), inputs).token_ids_S.tolist() for _ in range(5)]
    assert all(each == told[0] for each in told)
    assert len(set(told[0])) > 5
    if parts == "edited and filtered":
        return
    assert inputs.draws is not None
    for row in range(12):
        part = slice(row, row + 1)
        columns = [inputs.draws.temperature_S[part], inputs.draws.seed_S[part], inputs.draws.position_S[part]]
        filters = inputs.draws.filters
        if filters is not None:
            filters = Filters(filters.top_k_S[part], filters.top_p_S[part], filters.min_p_S[part])
        alone = SamplingInputs(Draws(*columns, filters))
        assert sample(logits_SV[part], alone).token_ids_S.tolist() == [told[0][row]]


@pytest.mark.parametrize(
    "filters",
    [{}, {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.2}, {"top_k": 8, "top_p": 0.8, "min_p": 0.05}, {"top_p": 1e-6}],
)
@pytest.mark.parametrize("temperature", [0.6, 1.7])
def test_draws_follow_the_filtered_distribution(
    sample: SampleFn, temperature: float, filters: dict[str, float]
) -> None:
    logits_V = torch.linspace(2.0, -1.5, 90)[torch.randperm(90, generator=torch.Generator().manual_seed(1))]
    inputs = SamplingInputs(draws(NUM_DRAWS, temperature, **filters))
    token_ids_S = sample(logits_V.expand(NUM_DRAWS, -1), inputs).token_ids_S
    probs = kept_by(logits_V / temperature, **filters)
    assert chi_square_fits(token_ids_S, probs)
    assert len(set(token_ids_S.tolist())) == int((probs > 0).sum())


def test_tensors_that_come_again_have_other_numbers(sample: SampleFn) -> None:
    """Beside each other in memory, and in columns of a table."""
    table = torch.zeros(3, 2, dtype=torch.int64)
    logits_SV, into = torch.zeros(3, 500), Sampled.empty(3, torch.device("cpu"))
    for position_S in (torch.zeros(3, dtype=torch.int64), table[:, 1]):
        params = dataclasses.replace(draws(3, 1.0, top_p=0.99), position_S=position_S)
        inputs, told = SamplingInputs(params), []
        for position in range(6):
            position_S.fill_(position)
            logits_SV.copy_(random_logits(torch.Generator().manual_seed(position), "flat", 3, 500))
            assert sample(logits_SV, inputs, into) is into
            told.append(into.token_ids_S.tolist())
            assert told[-1] == sample(logits_SV.clone(), SamplingInputs(params)).token_ids_S.tolist()
            logits_SV[1, 3] = math.nan
            for again in (into, Sampled.empty(3, torch.device("cpu"))):
                assert sample(logits_SV, inputs, again).is_faulty_S.tolist() == [False, True, False]
        assert len({tuple(each) for each in told}) == 6


def test_top_k_keeps_no_token_more(sample: SampleFn) -> None:
    """All nearly as likely, so that one too many would soon be drawn."""
    logits_V = torch.arange(20_000) % 7 * 1e-3 + torch.arange(20_000) * 1e-7
    for top_k in (2, 400):
        token_ids_S = sample(logits_V.expand(3_000, -1), SamplingInputs(draws(3_000, 1.0, top_k=top_k))).token_ids_S
        assert set(token_ids_S.tolist()) == set(logits_V.topk(top_k).indices.tolist())


def test_many_edits_of_one_token_add_up_in_order_and_a_mask_may_leave_one(sample: SampleFn) -> None:
    logits_SV = torch.zeros(2, 96)
    logits_SV[1, 3] = 1.0
    edits = Edits(torch.tensor([1, 1, 0, 1]), torch.tensor([40, 40, 5, 40]), torch.tensor([1e8, -1e8, 3.0, 2.0]))
    assert sample(logits_SV, SamplingInputs(edits=edits)).token_ids_S.tolist() == [5, 40]
    bits_GW = torch.tensor([[0, 1 << 7, 0], [0, 0, -(1 << 31)]], dtype=torch.int32)
    masked = SamplingInputs(draws(2, 1.3, top_p=0.5), masks=Masks(torch.tensor([1, 0]), bits_GW))
    assert sample(logits_SV, masked).token_ids_S.tolist() == [95, 39]
