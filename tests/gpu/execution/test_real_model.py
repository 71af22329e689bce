# SPDX-License-Identifier: Apache-2.0
"""A real model, SmolLM2, on a GPU: the log-probabilities of whole prompts and the greedy text are the CPU's.

Two devices add in different orders, so two tokens that are nearly as likely may change places: a text may leave the
CPU's where the CPU holds both tokens to be equal up to a small number, and is not compared from there on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tokenspeed.core.request import SamplingParams
from tokenspeed.llm.llm import LLM
from tokenspeed.llm.outputs import RequestOutput

pytestmark = pytest.mark.gpu

MESSAGES = (
    "Write a Python function that reverses a linked list.",
    "What is the capital of France, and what is it known for?",
    "List five uses of a paper clip.",
    "Explain why the sky is blue to a child.",
    "def fibonacci(n):\n    ",
    "Translate to French: The cat sits on the mat. " * 20,
)
NUM_TOKENS = 64


@dataclass(frozen=True)
class Bound:
    """mean and most: of |Δ log p| over the tokens of the prompts. tie: log-probabilities that differ by less are
    equal."""

    mean: float
    most: float
    tie: float


BOUNDS = {"float32": Bound(1e-3, 2e-2, 1e-2), "bfloat16": Bound(5e-2, 0.6, 2.5e-1)}


def answers(path: Path, device: str, dtype: str, **options: object) -> list[RequestOutput]:
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, logprobs=20, prompt_logprobs=0)
    sizes = {"max_num_seqs": 8, "kv_tokens": 8192, "max_model_len": 1024, "max_num_batched_tokens": 1024}
    with LLM(str(path), device=device, dtype=dtype, **sizes, **options) as llm:
        return llm.chat([[{"role": "user", "content": text}] for text in MESSAGES], params)


@pytest.fixture(scope="module")
def expected(smollm2_path: Path) -> list[RequestOutput]:
    return answers(smollm2_path, "cpu", "float32", weights="exact")


@pytest.mark.parametrize("graphs", [True, False], ids=["captured", "op-by-op"])
@pytest.mark.parametrize("dtype", BOUNDS)
def test_gives_the_text_of_the_cpu(smollm2_path: Path, expected: list[RequestOutput], dtype: str, graphs: bool) -> None:
    actual, bound = answers(smollm2_path, "cuda", dtype, graphs=graphs), BOUNDS[dtype]
    differences = [
        abs(ours - theirs)
        for one, other in zip(actual, expected, strict=True)
        for ours, theirs in zip(of_prompt(one), of_prompt(other), strict=True)
    ]
    assert sum(differences) / len(differences) <= bound.mean
    assert max(differences) <= bound.most
    for one, other in zip(actual, expected, strict=True):
        assert_equal_up_to_ties(one, other, bound.tie)


def of_prompt(output: RequestOutput) -> list[float]:
    """The log-probability of each prompt token but the first."""
    assert output.prompt_logprobs is not None
    entries = [entry for entry in output.prompt_logprobs[1:] if entry is not None]
    assert len(entries) == len(output.prompt_token_ids) - 1
    return [entry.token.logprob for entry in entries]


def assert_equal_up_to_ties(actual: RequestOutput, expected: RequestOutput, tie: float) -> None:
    ours, theirs = list(actual.outputs[0].token_ids), list(expected.outputs[0].token_ids)
    at = first_difference(ours, theirs)
    if at is None:
        return
    entries = expected.outputs[0].logprobs
    assert entries is not None
    likely = {top.token_id: top.logprob for top in entries[at].top}
    assert ours[at] in likely, (at, ours[at], likely)
    assert likely[theirs[at]] - likely[ours[at]] <= tie, (at, ours[at], theirs[at], likely)


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    for at, (one, other) in enumerate(zip(ours, theirs, strict=False)):
        if one != other:
            return at
    return None if len(ours) == len(theirs) else min(len(ours), len(theirs)) - 1
