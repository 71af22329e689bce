# SPDX-License-Identifier: Apache-2.0
"""Sampling and log-probabilities on a CUDA device, at the size of a real vocabulary: every row takes the token of the
reference, alone and in a batch, eagerly and from a graph whose inputs have changed since it was captured."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from drawn_sampling import KINDS, assert_same, random_draws, random_edits, random_logits
from tokenspeed.kernels.ops.logprobs import reference as logprobs_oracle
from tokenspeed.kernels.ops.logprobs import triton as logprobs_triton
from tokenspeed.kernels.ops.sampling import Draws, Filters, SampleFn, SamplingInputs, triton
from tokenspeed.kernels.registry import KernelContext

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

ON_CUDA = KernelContext("cuda", torch.bfloat16)
VOCAB_SIZE = 151_936
SHAPES = [(1, VOCAB_SIZE), (64, VOCAB_SIZE), (300, 32_001), (4096, 2_000), (7, 262_144)]


@pytest.fixture
def sample() -> SampleFn:
    return triton.build(ON_CUDA)


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator("cuda").manual_seed(7)


def row_of(draws: Draws, row: int) -> Draws:
    part = slice(row, row + 1)
    assert draws.filters is not None
    filters = Filters(draws.filters.top_k_S[part], draws.filters.top_p_S[part], draws.filters.min_p_S[part])
    return Draws(draws.temperature_S[part], draws.seed_S[part], draws.position_S[part], filters)


@pytest.mark.parametrize(("num_rows", "vocab_size"), SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_takes_the_tokens_of_the_reference(
    sample: SampleFn, generator: torch.Generator, kind: str, num_rows: int, vocab_size: int
) -> None:
    logits_SV = random_logits(generator, kind, num_rows, vocab_size)
    draws = random_draws(generator, num_rows, vocab_size)
    assert_same(sample, logits_SV, SamplingInputs(draws))
    if num_rows <= 64:
        assert_same(sample, logits_SV, dataclasses.replace(random_edits(generator, num_rows, vocab_size), draws=draws))
    row = num_rows // 2
    alone = sample(logits_SV[row : row + 1], SamplingInputs(row_of(draws, row))).token_ids_S
    assert torch.equal(alone, sample(logits_SV, SamplingInputs(draws)).token_ids_S[row : row + 1])


def test_a_captured_call_follows_its_tensors(sample: SampleFn, generator: torch.Generator) -> None:
    """Rows that were greedy when it was captured are drawn and filtered later, and edits come and go."""
    num_rows, vocab_size = 16, 50_257
    logits_SV = random_logits(generator, "peaked", num_rows, vocab_size)
    inputs = dataclasses.replace(
        random_edits(generator, num_rows, vocab_size), draws=random_draws(generator, num_rows, vocab_size)
    )
    assert inputs.draws is not None and inputs.draws.filters is not None
    inputs.draws.temperature_S.zero_()
    sample(logits_SV, inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sampled = sample(logits_SV, inputs)
    for _ in range(4):
        logits_SV.copy_(random_logits(generator, "plain", num_rows, vocab_size))
        drawn = random_draws(generator, num_rows, vocab_size)
        edited = random_edits(generator, num_rows, vocab_size)
        for held, given in zip(tensors(inputs), tensors(dataclasses.replace(edited, draws=drawn)), strict=True):
            held.copy_(given)
        graph.replay()
        torch.cuda.synchronize()
        assert_same(lambda *_: sampled, logits_SV, inputs)
        assert torch.equal(sampled.token_ids_S, sample(logits_SV, inputs).token_ids_S)


@pytest.mark.parametrize("kind", ["plain", "peaked", "equals"])
@pytest.mark.parametrize("num_top", [0, 1, 20])
def test_log_probabilities_equal_the_reference(generator: torch.Generator, kind: str, num_top: int) -> None:
    logits_SV = random_logits(generator, kind, 16, VOCAB_SIZE)
    token_ids_S = torch.randint(VOCAB_SIZE, (16,), generator=generator, device="cuda")
    expected = logprobs_oracle.logprobs(logits_SV, token_ids_S, num_top)
    actual = logprobs_triton.build(ON_CUDA)(logits_SV, token_ids_S, num_top)
    assert torch.equal(actual.ranks_S, expected.ranks_S)
    assert torch.equal(actual.top_ids_SK, expected.top_ids_SK)
    torch.testing.assert_close(actual.logprobs_S, expected.logprobs_S, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(actual.top_logprobs_SK, expected.top_logprobs_SK, rtol=2e-6, atol=2e-6)


def tensors(value: object) -> list[torch.Tensor]:
    """Those in a dataclass, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if not dataclasses.is_dataclass(value):
        return []
    return [tensor for item in dataclasses.fields(value) for tensor in tensors(getattr(value, item.name))]
