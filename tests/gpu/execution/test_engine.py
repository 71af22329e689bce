# SPDX-License-Identifier: Apache-2.0
"""An engine on a GPU: captured steps, steps op by op and the CPU give the same tokens, with masks, penalties, biases
and log-probabilities too; deterministic ones the same whatever runs beside them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from every_seventh import EverySeventh
from tokenspeed.bench.streams import Streams, Timing
from tokenspeed.core.ipc import Vocabulary
from tokenspeed.core.request import EngineRequest, Grammar, SamplingParams, SequenceUpdate, TokenLogprobs, pack_ids
from tokenspeed.engine.process import InProcessEngine
from tokenspeed.execution.constraints import Constraints
from tokenspeed.execution.cuda_graph import StepGraphs, StepSize
from tokenspeed.execution.edits import StepEdits
from tokenspeed.llm.engine_client import EngineClient
from tokenspeed.llm.llm import engine_config

pytestmark = pytest.mark.gpu

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 2000,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
LENGTHS = (5, 40, 64, 3, 300, 700, 17, 2100, 130)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def tokens(folder: Path, *, together: bool, temperature: float, again: bool = False, **options: object) -> list[object]:
    """What each prompt is answered with: one after the other, or all at once; `again` when they have been cached."""
    config = engine_config(
        model=str(folder), load_format="dummy", kv_tokens=16384, max_model_len=4096, max_num_seqs=16, **options
    )
    generator = np.random.default_rng(1)
    prompts = [generator.integers(1, 2000, length).tolist() for length in LENGTHS]

    async def run() -> list[Timing]:
        client = await EngineClient.start(InProcessEngine, config)
        try:
            if again:
                earlier = Streams(client)
                await asyncio.gather(*[earlier.run(prompt[:-2], 2, temperature) for prompt in prompts])
            streams = Streams(client)
            if together:
                return await asyncio.gather(*[streams.run(prompt, 24, temperature) for prompt in prompts])
            return [await streams.run(prompt, 24, temperature) for prompt in prompts]
        finally:
            await client.stop()

    return [timing.token_ids for timing in asyncio.run(run())]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_captured_steps_steps_op_by_op_and_the_cpu_agree(folder: Path, temperature: float) -> None:
    run = partial(tokens, folder, together=True, temperature=temperature, dtype="float32")
    expected = run(device="cpu")
    assert run(device="cuda", graphs=False) == expected
    assert run(device="cuda") == expected


@pytest.mark.parametrize("solution", ["triton", "cuda"])
def test_a_whole_decode_step_as_one_op_gives_the_same_tokens(folder: Path, solution: str) -> None:
    run = partial(tokens, folder, together=False, temperature=0.0, dtype="bfloat16", device="cuda")
    whole = partial(run, kernel_overrides=(("decode_step", solution),))
    captured = whole()
    assert whole(graphs=False) == captured
    # It rounds elsewhere than the layers do: near a tie a token may differ, and an answer goes on from there.
    assert sum(mine == other for mine, other in zip(captured, run(), strict=True)) > len(LENGTHS) // 2


def test_a_pool_of_fp8_gives_the_same_tokens_captured_or_not(folder: Path) -> None:
    options = {"dtype": "float32", "kv_dtype": "fp8", "max_num_batched_tokens": 256}  # few sizes to prepare
    run = partial(tokens, folder, together=True, temperature=0.8, device="cuda", **options)
    references = tuple((op, "reference") for op in ("paged_attention", "kv_write"))
    expected = run(graphs=False, kernel_overrides=references)
    plain = run(graphs=False)
    assert run() == plain
    # A key that lies between two numbers of 8 bits may fall to either side, and an answer goes on from there.
    assert sum(mine == other for mine, other in zip(plain, expected, strict=True)) > len(LENGTHS) // 2


class Answer:
    """What one request got."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def push(self, update: SequenceUpdate) -> None:
        self.token_ids.extend(update.token_ids)
        self.logprobs.extend(update.logprobs or ())
        if update.finish_reason is not None:
            assert update.error is None, update.error
            self.ended.set_result(None)

    def push_tokens(self, request_id: str, token_ids: Sequence[int]) -> None:
        del request_id
        self.token_ids.extend(token_ids)

    def fail(self, error: Exception) -> None:
        self.ended.set_exception(error)


WISHES: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.9, "top_p": 0.9, "frequency_penalty": 0.7, "logit_bias": ((4, 3.0), (9, -2.0))},
    {"temperature": 0.8, "top_k": 50, "grammar": Grammar("regex", "3"), "logprobs": 20},
    {"temperature": 0.0, "repetition_penalty": 1.6, "logprobs": 3},
    {"temperature": 0.0, "presence_penalty": 0.4, "logprobs": 0, "grammar": Grammar("regex", "5")},
    {"temperature": 0.0, "min_tokens": 9, "logit_bias": tuple((token_id, 2.0) for token_id in range(0, 90, 3))},
    {"temperature": 1.1, "logit_bias": tuple((token_id, 0.01) for token_id in range(300)), "max_tokens": 6},
    {"temperature": 0.0, "repetition_penalty": 1.2, "frequency_penalty": -0.5},
)


def edited(folder: Path, **options: object) -> list[Answer]:
    """Answers to requests of every kind, two rounds of them, so that seats are taken again."""
    config = engine_config(
        model=str(folder), load_format="dummy", kv_tokens=16384, max_model_len=4096, max_num_seqs=12, **options
    )
    generator = np.random.default_rng(2)
    prompts = [generator.integers(1, 2000, length).tolist() for length in LENGTHS]

    async def run() -> list[Answer]:
        client = await EngineClient.start(InProcessEngine, config)
        client.know(Vocabulary((), (), (), ""))
        answers: list[Answer] = []
        try:
            for first in (0, len(WISHES)):
                for index, wish in enumerate(WISHES, first):
                    sampling = SamplingParams(**{"max_tokens": 40, "seed": index, "ignore_eos": True, **wish})
                    token_ids = pack_ids(prompts[index % len(prompts)])
                    answers.append(Answer())
                    request = EngineRequest(
                        request_id=f"r{index}", token_ids=token_ids, sampling=sampling, end_token_ids=(7, 8)
                    )
                    client.submit(request, answers[-1])
                await asyncio.wait_for(asyncio.gather(*(answer.ended for answer in answers[first:])), 120)
        finally:
            await client.stop()
        return answers

    return asyncio.run(run())


def test_masks_penalties_biases_and_log_probabilities_agree_captured_or_not(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = partial(Constraints, backend=lambda _name, _vocabulary: EverySeventh())
    monkeypatch.setattr("tokenspeed.execution.sampler.Constraints", backend)
    used: list[bool] = []
    sampling = StepGraphs.sampling

    def spy(graphs: StepGraphs, size: StepSize) -> Any:
        sample = sampling(graphs, size)
        assert sample is not None

        def sampled(edits: StepEdits | None) -> Any:
            told = sample(edits)
            used.append(edits is not None and told is not None)
            return told

        return sampled

    monkeypatch.setattr("tokenspeed.execution.cuda_graph.TOKENS_MAX", 64)  # steps of more run op by op
    run = partial(edited, folder, dtype="float32", max_num_batched_tokens=128)
    expected = run(device="cpu")
    monkeypatch.setattr(StepGraphs, "sampling", spy)
    for options in ({"graphs": False}, {"graphs": True}, {"graphs": True, "overlap_depth": 0}):
        found = run(device="cuda", **options)
        for index, (answer, other) in enumerate(zip(found, expected, strict=True)):
            assert answer.token_ids == other.token_ids, (options, index)
            assert len(answer.logprobs) == len(other.logprobs), (options, index)
            for mine, its in zip(answer.logprobs, other.logprobs, strict=True):
                assert mine.token_id == its.token_id, (options, index)
                assert abs(mine.rank - its.rank) <= 1, (options, index)
                assert mine.logprob == pytest.approx(its.logprob, abs=1e-3)
                assert [value for _, value in mine.top] == pytest.approx([value for _, value in its.top], abs=1e-3)
    assert sum(used) > len(used) // 2


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_deterministic_tokens_depend_on_nothing_but_the_request(folder: Path, dtype: str) -> None:
    run = partial(tokens, folder, temperature=1.0, dtype=dtype, device="cuda", deterministic=True)
    alone = run(together=False)
    assert run(together=True) == alone
    assert run(together=True, again=True, max_num_batched_tokens=97) == alone
    assert run(together=True, graphs=False) == alone
