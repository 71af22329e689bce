# SPDX-License-Identifier: Apache-2.0
"""Real weights: exact ones give transformers' greedy tokens in float32 on the same file, however the requests are run.

Packed ones, the default, whose activations are rounded, are held to what the oracle says of the same text.

The oracle reads prompt and answer in one pass; its most likely token after each prefix must be the next one of the
answer. Where its two best logits are closer than TIE the position counts as a tie and either is right.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tokenspeed.checkpoints import open_model
from tokenspeed.core.config import ModelConfig
from tokenspeed.core.request import SamplingParams
from tokenspeed.llm.tokenizer import Tokenizer

pytestmark = [pytest.mark.models, pytest.mark.timeout(1800)]

TIE = 1e-3
NUM_TOKENS = 64
NUM_THREADS = 2
LONG = "\n".join(f"def step_{n}(x: int) -> int:\n    return x * {n} + step_{n - 1}(x)" for n in range(1, 30))
TEXTS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Die Katze sitzt auf der Matte und",
    "1, 2, 4, 8, 16,",
    "Q: Why is the sky blue?\nA: Because 🌍",
    LONG + "\n\nclass Walker:\n    def walk(self",
)

CHATS = tuple(
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    for question in (
        "What is the capital of France?",
        "What is gravity?",
        "How do I make pancakes?",
        "Give me three tips for sleeping better.",
        "What is the difference between a list and a tuple in Python? Show an example.",
        "If a train travels 60 miles in 1.5 hours, how fast is it going on average?",
    )
)
"""Of SmolLM2, whose first tokens of a chat have channels that are many times the others."""


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    torch.set_num_threads(NUM_THREADS)
    yield
    torch.set_num_threads(1)


def encode(path: Path, texts: Sequence[str]) -> list[list[int]]:
    """The texts as ids by the vocabulary in the file."""
    source = open_model(ModelConfig(model=str(path))).tokenizer
    assert source is not None
    tokenizer = Tokenizer.from_source(source)
    return [tokenizer.encode(text) for text in texts]


def oracle_faults(path: Path, prompts: Sequence[list[int]], answers: Sequence[list[int]]) -> tuple[list[str], int]:
    """What the oracle would have said otherwise, and the number of ties."""
    oracle = transformers.AutoModelForCausalLM.from_pretrained(
        str(path.parent), gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    faults, num_ties = [], 0
    for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        with torch.inference_mode():
            logits = oracle(torch.tensor([prompt + answer]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        best, best_ids = logits.float().topk(2, dim=-1)
        for index, token in enumerate(answer):
            if token == best_ids[index, 0]:
                continue
            if token == best_ids[index, 1] and best[index, 0] - best[index, 1] < TIE:
                num_ties += 1
            else:
                faults.append(f"prompt {number}, token {index}: {token}, not {best_ids[index].tolist()}")
    return faults, num_ties


def check_against_oracle(path: Path, tools: Any, num_alone: int) -> None:
    """Six prompts of 64 tokens all together against the oracle, and the last num_alone of them alone."""
    prompts = encode(path, TEXTS)
    loop = tools.Loop(tools.engine_config(path, kv_tokens=8192, num_threads=NUM_THREADS, weights="exact"))
    try:
        wishes = [tools.Wish(prompt, NUM_TOKENS) for prompt in prompts]
        together = [request.token_ids for request in loop.run(wishes)]
        alone = [loop.run([wish])[0] for wish in wishes[-num_alone:]]
    finally:
        loop.close()
    del loop  # the oracle needs its memory
    assert any(request.cached_len > 0 for request in alone)
    assert [request.token_ids for request in alone] == together[-num_alone:]
    assert all(len(answer) == NUM_TOKENS for answer in together)
    faults, num_ties = oracle_faults(path, prompts, together)
    assert not faults, faults
    assert num_ties <= 3, f"{num_ties} ties in {len(prompts) * NUM_TOKENS} tokens"


def test_smollm2_greedy_text_equals_the_oracle(smollm2_path: Path, tools: Any) -> None:
    check_against_oracle(smollm2_path, tools, num_alone=3)


def test_gemma3_greedy_text_equals_the_oracle(gemma3_path: Path, tools: Any) -> None:
    check_against_oracle(gemma3_path, tools, num_alone=1)


@pytest.mark.slow
def test_qwen_coder_greedy_text_equals_the_oracle(qwen_coder_path: Path, tools: Any) -> None:
    check_against_oracle(qwen_coder_path, tools, num_alone=1)


def oracle_logprobs(path: Path, texts: Sequence[list[int]]) -> list[torch.Tensor]:
    """Of every token after each token but the last, (tokens - 1, V)."""
    oracle = transformers.AutoModelForCausalLM.from_pretrained(
        str(path.parent), gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.inference_mode():
        return [oracle(torch.tensor([text]), use_cache=False).logits[0, :-1].log_softmax(dim=-1) for text in texts]


def check_packed_against_oracle(
    path: Path,
    tools: Any,
    prompts: Sequence[str] = TEXTS,
    *,
    kv_dtype: str = "auto",
    kept: torch.dtype = torch.bfloat16,
) -> None:
    """Six prompts and answers, token by token: the most likely token is the oracle's at 95 of 100 positions, and the
    log-probability of the next token is off by 0.05 at most in the mean."""
    encoded = encode(path, prompts)
    sampling = SamplingParams(temperature=0.0, seed=0, prompt_logprobs=1)
    loop = tools.Loop(tools.engine_config(path, kv_tokens=8192, num_threads=NUM_THREADS, kv_dtype=kv_dtype))
    try:
        assert "packed_linear" in {kernel.op for kernel in loop.runner.info.kernels}
        assert loop.runner._buffers.kv_layers[0].k.dtype is kept
        answers = [request.token_ids for request in loop.run([tools.Wish(prompt, NUM_TOKENS) for prompt in encoded])]
        texts = [prompt + answer for prompt, answer in zip(encoded, answers, strict=True)]
        scored = [loop.run([tools.Wish(text, 1, sampling)])[0].prompt_logprobs[1:] for text in texts]
    finally:
        loop.close()
    del loop  # the oracle needs its memory
    expected = oracle_logprobs(path, texts)
    agreed, errors = [], []
    for text, logprobs_TV, entries in zip(texts, expected, scored, strict=True):
        for position, (token, entry) in enumerate(zip(text[1:], entries, strict=True)):
            assert entry.token_id == token
            agreed.append(entry.top[0][0] == int(logprobs_TV[position].argmax()))
            errors.append(abs(entry.logprob - float(logprobs_TV[position, token])))
    agreement, error = sum(agreed) / len(agreed), sum(errors) / len(errors)
    assert agreement >= 0.95, f"{agreement:.4f} of {len(agreed)} positions agree"
    assert error <= 0.05, f"log-probabilities are off by {error:.4f} in the mean"


@pytest.mark.parametrize("prompts", [TEXTS, CHATS], ids=["texts", "chats"])
def test_smollm2_packed_says_what_the_oracle_says(smollm2_path: Path, tools: Any, prompts: Sequence[str]) -> None:
    check_packed_against_oracle(smollm2_path, tools, prompts)


@pytest.mark.slow
@pytest.mark.parametrize("prompts", [TEXTS, CHATS], ids=["texts", "chats"])
def test_smollm2_with_codes_of_k_and_v_says_what_the_oracle_says(
    smollm2_path: Path, tools: Any, prompts: Sequence[str]
) -> None:
    check_packed_against_oracle(smollm2_path, tools, prompts, kv_dtype="int8", kept=torch.int8)


@pytest.mark.slow
def test_gemma3_packed_says_what_the_oracle_says(gemma3_path: Path, tools: Any) -> None:
    check_packed_against_oracle(gemma3_path, tools)


@pytest.mark.slow
def test_qwen_coder_packed_says_what_the_oracle_says(qwen_coder_path: Path, tools: Any) -> None:
    check_packed_against_oracle(qwen_coder_path, tools)


@pytest.mark.parametrize("num_prompts", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_cold_warm_and_batched_runs_are_identical(smollm2_path: Path, tools: Any, num_prompts: int) -> None:
    """SL-3, with prompts of 700 tokens."""
    (text,) = encode(smollm2_path, [LONG * 8])
    prompts = [text[17 * number : 17 * number + 700] for number in range(num_prompts)]
    sampling = SamplingParams(temperature=0.0, seed=0, logprobs=1)
    wishes = [tools.Wish([number + 5, *prompt[1:]], 32, sampling) for number, prompt in enumerate(prompts)]
    others = [tools.Wish([number + 100, *text[:150]], 40) for number in range(7)]
    loop = tools.Loop(tools.engine_config(smollm2_path, kv_tokens=20480, num_threads=NUM_THREADS))
    try:
        cold = [loop.run([wish])[0] for wish in wishes]
        warm = [loop.run([wish])[0] for wish in wishes]
        batched = [loop.run([wish, *others])[0] for wish in wishes]
    finally:
        loop.close()
    assert [request.cached_len for request in cold] == [0] * len(cold)
    for name, requests in (("warm", warm), ("batched", batched)):
        assert all(request.cached_len > 0 for request in requests), name
        assert [request.token_ids for request in requests] == [request.token_ids for request in cold], name
        for mine, first in zip(requests, cold, strict=True):
            values = [entry.logprob for entry in mine.logprobs]
            assert values == pytest.approx([entry.logprob for entry in first.logprobs], abs=1e-4)
