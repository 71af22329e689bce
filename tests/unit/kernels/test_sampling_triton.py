# SPDX-License-Identifier: Apache-2.0
"""Sampling in Triton against the reference, with blocks and lists so small that each way through them is taken."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drawn_sampling import KINDS, assert_same, random_draws, random_edits, random_logits
from tokenspeed.kernels.ops.sampling import Draws, Edits, Masks, Sampled, SamplingInputs, triton
from tokenspeed.kernels.registry import KernelContext
from unit.kernels.test_sampling import chi_square_fits, draws, kept_by

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NUM_DRAWS = 20_000 if DEVICE == "cuda" else 40


@pytest.fixture(autouse=True, scope="module")
def _small() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (
            ("BLOCK", 32),
            ("GROUP", 8),
            ("CAPACITY", 8),
            ("LIST_TILE", 32),
            ("ROW_TILE", 64),
            ("ROWS_A_LAUNCH", 2),
        ):
            patch.setattr(triton, name, value)
        torch.set_default_device(DEVICE)
        yield
        torch.set_default_device(None)


def sample(logits_SV: torch.Tensor, inputs: SamplingInputs) -> Sampled:
    return triton.build(KernelContext(DEVICE, torch.float32))(logits_SV, inputs)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 1 << 30),
    kind=st.sampled_from(KINDS),
    num_rows=st.integers(1, 3),
    vocab_size=st.sampled_from([1, 31, 32, 47, 90]),
    parts=st.sampled_from(["open", "filtered", "edited", "edited and filtered"]),
)
def test_takes_the_tokens_of_the_reference(seed: int, kind: str, num_rows: int, vocab_size: int, parts: str) -> None:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    logits_SV = random_logits(generator, kind, num_rows, vocab_size)
    edits = random_edits(generator, num_rows, vocab_size) if "edited" in parts else SamplingInputs()
    params = random_draws(generator, num_rows, vocab_size)
    if "filtered" not in parts:
        params = Draws(params.temperature_S, params.seed_S, params.position_S)
    assert_same(sample, logits_SV, SamplingInputs(params, edits.penalties, edits.edits, edits.masks))


@pytest.mark.parametrize("capacity", [2, 256])
@pytest.mark.parametrize("filters", [{"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}, {"top_k": 30, "top_p": 0.6}])
def test_a_list_that_overflows_changes_no_token(
    monkeypatch: pytest.MonkeyPatch, capacity: int, filters: dict[str, float]
) -> None:
    monkeypatch.setattr(triton, "CAPACITY", capacity)
    logits_SV = torch.randn(2, 70, generator=torch.Generator(DEVICE).manual_seed(2)).round(decimals=1)
    assert_same(sample, logits_SV, SamplingInputs(draws(2, 0.8, **filters)))


def test_many_edits_of_one_token_add_up_in_order() -> None:
    edits = Edits(torch.tensor([1, 1, 0, 1]), torch.tensor([40, 40, 5, 40]), torch.tensor([1e8, -1e8, 3.0, 2.0]))
    logits_SV = torch.zeros(2, 64)
    logits_SV[1, 3] = 1.0
    assert sample(logits_SV, SamplingInputs(edits=edits)).token_ids_S.tolist() == [5, 40]


def test_a_mask_with_one_bit_leaves_one_token() -> None:
    bits_GW = torch.tensor([[0, 1 << 7, 0], [0, 0, -(1 << 31)]], dtype=torch.int32)
    inputs = SamplingInputs(draws(2, 1.3, top_p=0.5), masks=Masks(torch.tensor([1, 0]), bits_GW))
    assert sample(torch.randn(2, 96), inputs).token_ids_S.tolist() == [95, 39]


def test_top_k_keeps_no_token_more() -> None:
    """All nearly as likely, so that one too many would soon be drawn."""
    logits_V = torch.arange(70) % 7 * 1e-3 + torch.arange(70) * 1e-5
    best = set(logits_V.topk(2).indices.tolist())
    token_ids_S = sample(logits_V.expand(16, -1), SamplingInputs(draws(16, 1.0, top_k=2))).token_ids_S
    assert set(token_ids_S.tolist()) == best


def test_equals_by_the_thousand_end() -> None:
    """All tokens the same: each filter keeps all of them, and one look is enough."""
    for filters in ({"top_k": 2, "top_p": 0.5}, {"top_p": 1e-3}, {"min_p": 1.0}):
        assert_same(sample, torch.full((1, 70), -7.5), SamplingInputs(draws(1, 1.0, **filters)))


@pytest.mark.parametrize("filters", [{}, {"top_k": 6, "top_p": 0.8}])
def test_draws_follow_the_filtered_distribution(monkeypatch: pytest.MonkeyPatch, filters: dict[str, float]) -> None:
    monkeypatch.setattr(triton, "ROWS_A_LAUNCH", 256)
    logits_V = torch.linspace(2.0, -1.5, 12)[torch.randperm(12, generator=torch.Generator(DEVICE).manual_seed(1))]
    inputs = SamplingInputs(draws(NUM_DRAWS, 0.9, **filters))
    token_ids_S = sample(logits_V.expand(NUM_DRAWS, -1), inputs).token_ids_S
    assert chi_square_fits(token_ids_S, kept_by(logits_V / 0.9, **filters))
    assert len(set(token_ids_S.tolist())) > 3
