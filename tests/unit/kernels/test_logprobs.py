# SPDX-License-Identifier: Apache-2.0
"""The log-probabilities op: both solutions against a plain loop, with equals, −inf and more tops than blocks hold."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenspeed.kernels.ops.logprobs import Logprobs, LogprobsFn, reference, triton
from tokenspeed.kernels.registry import KernelContext

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SOLUTIONS = {"reference": reference.SOLUTION, "triton": triton.SOLUTION}


@pytest.fixture(params=SOLUTIONS)
def logprobs(request: Any, monkeypatch: pytest.MonkeyPatch) -> LogprobsFn:
    """Triton's with blocks of 16 tokens, so that few tokens make many blocks."""
    monkeypatch.setattr(triton, "BLOCK", 16)
    monkeypatch.setattr(triton, "GROUP", 4)
    kernel = SOLUTIONS[request.param].build(KernelContext(DEVICE, torch.float32))

    def run(logits_SV: torch.Tensor, token_ids_S: torch.Tensor, num_top: int) -> Logprobs:
        found = kernel(logits_SV.to(DEVICE), token_ids_S.to(DEVICE), num_top)
        return Logprobs(*(getattr(found, name).cpu() for name in Logprobs.__dataclass_fields__))

    return run


def assert_right(logits_V: list[float], token_id: int, num_top: int, found: Logprobs, row: int) -> None:
    top = max(logits_V)
    log_sum = math.log(sum(math.exp(logit - top) for logit in logits_V))
    order = sorted(range(len(logits_V)), key=lambda token: (-logits_V[token], token))[:num_top]
    assert found.logprobs_S[row].item() == pytest.approx(logits_V[token_id] - top - log_sum, abs=3e-6, rel=3e-6)
    assert found.ranks_S[row] == 1 + sum(logit > logits_V[token_id] for logit in logits_V)
    assert found.top_ids_SK[row].tolist() == order
    expected = [logits_V[token] - top - log_sum for token in order]
    assert found.top_logprobs_SK[row].tolist() == pytest.approx(expected, abs=3e-6, rel=3e-6)


@settings(max_examples=15, deadline=None)
@given(
    rows=st.lists(st.lists(st.sampled_from([-2.5, 0.0, 0.25, 7.0]), min_size=21, max_size=21), min_size=1, max_size=2),
    num_top=st.sampled_from([0, 3, 20]),
)
def test_equals_come_lowest_id_first(rows: list[list[float]], num_top: int) -> None:
    for solution in SOLUTIONS.values():
        kernel = solution.build(KernelContext(DEVICE, torch.float32))
        token_ids_S = torch.arange(len(rows)) + 9
        found = kernel(torch.tensor(rows, device=DEVICE), token_ids_S.to(DEVICE), num_top)
        for row, logits_V in enumerate(rows):
            assert_right(logits_V, row + 9, num_top, found, row)


def test_random_rows_equal_a_plain_loop(logprobs: LogprobsFn) -> None:
    logits_SV = torch.randn(3, 50, generator=torch.Generator().manual_seed(0)) * 5
    token_ids_S = torch.tensor([0, 49, 41])
    found = logprobs(logits_SV, token_ids_S, 20)
    for row in range(3):
        assert_right(logits_SV[row].tolist(), int(token_ids_S[row]), 20, found, row)


def test_impossible_tokens_have_minus_infinity(logprobs: LogprobsFn) -> None:
    logits_SV = torch.full((1, 30), -math.inf)
    logits_SV[0, 17] = 3.0
    found = logprobs(logits_SV, torch.tensor([4]), 3)
    assert found.logprobs_S.tolist() == [-math.inf]
    assert found.ranks_S.tolist() == [2]
    assert found.top_ids_SK.tolist() == [[17, 0, 1]]
    assert found.top_logprobs_SK.tolist() == [[0.0, -math.inf, -math.inf]]


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_faulty_row_leaves_the_others_alone(logprobs: LogprobsFn, poison: float) -> None:
    logits_SV = torch.randn(2, 40, generator=torch.Generator().manual_seed(1))
    logits_SV[0, 3] = poison
    assert_right(logits_SV[1].tolist(), 5, 4, logprobs(logits_SV, torch.tensor([3, 5]), 4), 1)


def test_more_tops_than_tokens(logprobs: LogprobsFn) -> None:
    found = logprobs(torch.tensor([[1.0, 3.0]]), torch.tensor([0]), 20)
    assert found.top_ids_SK.tolist() == [[1, 0]]


def test_too_many_tops_are_refused(logprobs: LogprobsFn) -> None:
    with pytest.raises(AssertionError):
        logprobs(torch.zeros(1, 30), torch.tensor([0]), 21)
