# SPDX-License-Identifier: Apache-2.0
"""Steps through the runner: chunking, batching, overlap, preemption and caching change no token; faults stay in."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tokenspeed.core.errors import ConfigError
from tokenspeed.core.plan import FinishCode, RowKind
from tokenspeed.core.request import SamplingParams
from tokenspeed.execution import ModelRunner

PREFILL, LAST, DECODE = RowKind.PREFILL, RowKind.PREFILL_LAST, RowKind.DECODE
NewLoop = Callable[..., Any]


def prompts(num: int, length: int = 40) -> list[list[int]]:
    generator = np.random.default_rng(num)
    return [generator.integers(0, 97, length - index).tolist() for index in range(num)]


def tokens_of(runner: ModelRunner, tools: Any, prompt: list[int], chunks: list[int], num: int) -> list[int]:
    """Greedy tokens of one sequence in seat 2, prefilled in chunks, by hand-made plans."""
    pages = [(2, index, 9 - index) for index in range(8)]
    handles = []
    start = 0
    for number, length in enumerate(chunks):
        kind = LAST if start + length == len(prompt) else PREFILL
        plan = tools.make_plan(
            number,
            [(2, kind, start, length)],
            prompt[start : start + length],
            seated=[2] if number == 0 else [],
            pages=pages if number == 0 else [],
        )
        handles.append(runner.launch(plan, [tools.make_seating(2, prompt)] if number == 0 else []))
        start += length
    # context_len of a decode row is only a lower bound; the device knows better
    handles += [runner.launch(tools.make_plan(100, [(2, DECODE, len(prompt), 1)]), []) for _ in range(num - 1)]
    return [int(token) for handle in handles for token in handle.wait().result.token_ids]


@pytest.fixture
def runner(tiny_path: Path, tools: Any) -> Any:
    made = tools.new_runner(tools.engine_config(tiny_path))
    yield made
    made.close()


def test_chunking_changes_no_token(runner: ModelRunner, tools: Any) -> None:
    prompt = prompts(1)[0]
    whole = tokens_of(runner, tools, prompt, [40], 12)
    assert len(set(whole)) > 2
    for chunks in ([1, 39], [7, 16, 17], [8, 8, 8, 8, 8], [39, 1]):
        assert tokens_of(runner, tools, prompt, chunks, 12) == whole


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 0.9, "top_p": 0.9, "top_k": 40}])
def test_alone_batched_overlapped_preempted_and_cached_runs_agree(
    new_loop: NewLoop, tools: Any, sampling: dict[str, float]
) -> None:
    wishes = [
        tools.Wish(prompt, 30, SamplingParams(seed=index, **sampling), arrives=index)
        for index, prompt in enumerate(prompts(6))
    ]
    plain = new_loop(overlap_depth=0)
    alone = [plain.run([tools.Wish(wish.prompt, 30, wish.sampling)])[0].token_ids for wish in wishes]
    assert all(len(tokens) == 30 for tokens in alone)
    for options in (
        {"overlap_depth": 0},
        {"overlap_depth": 1},
        {"max_num_batched_tokens": 13, "max_num_seqs": 3},
        {"kv_tokens": 200},
    ):
        loop = new_loop(**options)
        assert [request.token_ids for request in loop.run(wishes)] == alone, options
        assert (loop.control.stats().num_preemptions > 0) == ("kv_tokens" in options)
        again = loop.run(wishes)
        assert [request.token_ids for request in again] == alone, options
        # The tight pool evicts one prompt for the next, so that nothing of it need be left.
        assert "kv_tokens" in options or all(request.cached_len > 0 for request in again)


def test_a_pool_of_int8_gives_the_same_tokens_however_steps_are_cut(new_loop: NewLoop, tools: Any) -> None:
    wishes = [tools.Wish(prompt, 8, arrives=index) for index, prompt in enumerate(prompts(5))]
    plain = new_loop(overlap_depth=0, kv_dtype="int8")
    expected = [plain.run([wish])[0].token_ids for wish in wishes]
    for options in ({}, {"max_num_batched_tokens": 13, "max_num_seqs": 3}, {"kv_tokens": 100, "host_tokens": 400}):
        loop = new_loop(kv_dtype="int8", **options)
        for _ in range(2):  # again from the cache
            assert [request.token_ids for request in loop.run(wishes)] == expected, options
    exact = [request.token_ids for request in new_loop().run(wishes)]
    assert expected != exact, "numbers of 8 bits are no others than those of 32"
    assert plain.runner._host_step is not None, "a step of one token a row is not one call"
    assert sum(mine[0] == other[0] for mine, other in zip(expected, exact, strict=True)) >= 4


def test_a_pool_of_bf16_gives_the_same_tokens_however_steps_are_cut(new_loop: NewLoop, tools: Any) -> None:
    wishes = [tools.Wish(prompt, 8, arrives=index) for index, prompt in enumerate(prompts(5))]
    plain = new_loop(overlap_depth=0, kv_dtype="bf16")
    expected = [plain.run([wish])[0].token_ids for wish in wishes]
    for options in ({}, {"max_num_batched_tokens": 13, "max_num_seqs": 3}, {"kv_tokens": 100, "host_tokens": 400}):
        loop = new_loop(kv_dtype="bf16", **options)
        for _ in range(2):  # again from the cache
            assert [request.token_ids for request in loop.run(wishes)] == expected, options
    assert plain.runner._host_step is not None, "a step of one token a row is not one call"


def test_what_pools_cannot_keep_is_refused(tiny_path: Path, tools: Any) -> None:
    with pytest.raises(ConfigError, match="--kv-cache-dtype fp32: the model runs in bfloat16"):
        tools.new_runner(tools.engine_config(tiny_path, kv_dtype="fp32", dtype="bfloat16"))
    with pytest.raises(ConfigError, match="--kv-cache-dtype fp8: kernels of a CPU do not read it; use int8"):
        tools.new_runner(tools.engine_config(tiny_path, kv_dtype="fp8"))
    with pytest.raises(ConfigError, match="--kv-cache-dtype bf16: the model runs in float16"):
        tools.new_runner(tools.engine_config(tiny_path, kv_dtype="bf16", dtype="float16"))


@pytest.mark.parametrize(
    ("kv_dtype", "dtype", "expected"),
    [
        ("auto", "float32", torch.float32),  # no weight of this checkpoint stays packed
        ("fp32", "float32", torch.float32),
        ("bf16", "float32", torch.bfloat16),
        ("int8", "float32", torch.int8),
        ("int8", "bfloat16", torch.int8),
        ("bf16", "bfloat16", torch.bfloat16),
        ("auto", "bfloat16", torch.bfloat16),
    ],
)
def test_what_pools_keep(kv_dtype: str, dtype: str, expected: torch.dtype, tiny_path: Path, tools: Any) -> None:
    runner = tools.new_runner(tools.engine_config(tiny_path, kv_dtype=kv_dtype, dtype=dtype))
    layers = runner._buffers.kv_layers
    assert {tensor.dtype for layer in layers for tensor in layer.tensors} == {expected}
    assert runner.info.kv_bytes == sum(tensor.nbytes for layer in layers for tensor in layer.tensors)
    ops = ("kv_write", "paged_attention", "decode_step")
    assert {binding.solution for binding in runner.info.kernels if binding.op.endswith(ops)} == {"cpu"}
    runner.close()


def test_penalties_and_seeds_survive_preemption(new_loop: NewLoop, tools: Any) -> None:
    sampling = {"temperature": 0.8, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2}
    wishes = [tools.Wish(prompt, 40, SamplingParams(seed=index, **sampling)) for index, prompt in enumerate(prompts(5))]
    roomy, tight = new_loop(), new_loop(kv_tokens=160)
    expected = [request.token_ids for request in roomy.run(wishes)]
    assert [request.token_ids for request in tight.run(wishes)] == expected
    assert tight.control.stats().num_preemptions > 0


def test_end_tokens_wait_for_min_tokens(new_loop: NewLoop, tools: Any) -> None:
    prompt = prompts(1)[0]
    loop = new_loop()
    first = loop.run([tools.Wish(prompt, 12)])[0].token_ids
    ended = loop.run([tools.Wish(prompt, 12, end_token_ids=(first[3],))])[0]
    assert ended.finish == FinishCode.STOP
    assert ended.token_ids == first[: first.index(first[3]) + 1]
    waiting = SamplingParams(temperature=0.0, seed=0, min_tokens=10)
    late = loop.run([tools.Wish(prompt, 12, waiting, end_token_ids=(first[0],))])[0]
    assert first[0] not in late.token_ids[:10]
    assert len(late.token_ids) >= 10


def test_log_probabilities_are_those_of_the_raw_logits(new_loop: NewLoop, tools: Any, tiny_path: Path) -> None:
    prompt = prompts(1)[0]
    sampling = SamplingParams(temperature=1.3, seed=4, top_k=5, presence_penalty=0.7, logprobs=3, prompt_logprobs=2)
    requests = [
        new_loop(max_num_batched_tokens=budget).run([tools.Wish(prompt, 9, sampling)])[0] for budget in (512, 11)
    ]
    whole, chunked = requests
    sequence = prompt + whole.token_ids
    logits = full_logits(tools, tiny_path, sequence)
    expected = torch.log_softmax(logits, -1)
    assert len(whole.prompt_logprobs) == len(prompt)
    assert whole.prompt_logprobs[0] is None
    for position, entry in enumerate([*whole.prompt_logprobs, *whole.logprobs]):
        if position == 0:
            continue
        row = expected[position - 1]
        assert entry.token_id == sequence[position]
        assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-4)
        assert entry.rank == 1 + int((row > row[entry.token_id]).sum())
        num_top = 2 if position < len(prompt) else 3
        values, ids = row.topk(num_top)
        assert [token for token, _ in entry.top] == ids.tolist()
        assert [value for _, value in entry.top] == pytest.approx(values.tolist(), abs=1e-4)
    assert chunked.token_ids == whole.token_ids
    for mine, other in zip(chunked.prompt_logprobs[1:], whole.prompt_logprobs[1:], strict=True):
        assert mine.logprob == pytest.approx(other.logprob, abs=1e-4)


def full_logits(tools: Any, path: Path, sequence: list[int]) -> torch.Tensor:
    """Logits of every position, from one prefill of the whole sequence through the model itself."""
    runner = tools.new_runner(tools.engine_config(path))
    captured: list[torch.Tensor] = []
    forward = runner._forward

    def spy(step: Any) -> torch.Tensor:
        logits, hidden = forward.logits_and_hidden(step)
        captured.append(forward.head(hidden))
        return logits

    forward.logits = spy
    pages = [(0, index, index + 1) for index in range(-(-len(sequence) // 8))]
    plan = tools.make_plan(0, [(0, LAST, 0, len(sequence))], sequence, seated=[0], pages=pages)
    runner.launch(plan, [tools.make_seating(0, sequence)]).wait()
    runner.close()
    return captured[0].clone()


def test_a_step_that_raises_is_a_fault_and_spoils_only_its_seats(
    runner: ModelRunner, tools: Any, caplog: pytest.LogCaptureFixture
) -> None:
    prompt = prompts(1)[0][:10]
    pages = [(seat, index, 1 + seat * 4 + index) for seat in range(3) for index in range(3)]
    logits = runner._forward.logits

    def explode(batch: Any) -> torch.Tensor:
        raise RuntimeError("out of luck")

    ok = runner.launch(
        tools.make_plan(0, [(0, LAST, 0, 10)], prompt, seated=[0], pages=pages), [tools.make_seating(0, prompt)]
    ).wait()
    assert not ok.result.fault
    runner._forward.logits = explode
    with caplog.at_level(logging.ERROR):
        failed = runner.launch(
            tools.make_plan(1, [(1, LAST, 0, 10)], prompt, seated=[1], pages=[]), [tools.make_seating(1, prompt)]
        ).wait()
    assert failed.result.fault
    assert failed.result.accepted_offsets.tolist() == [0, 0]
    assert "out of luck" in caplog.text
    runner._forward.logits = logits
    after = runner.launch(tools.make_plan(2, [(0, DECODE, 10, 1), (1, DECODE, 10, 1)]), []).wait()
    assert after.result.row_faults.tolist() == [0, 1]
    assert after.result.accepted_offsets.tolist() == [0, 1, 1]
    fresh = runner.launch(
        tools.make_plan(3, [(1, LAST, 0, 10)], prompt, seated=[1], pages=[(1, 0, 5), (1, 1, 6)]),
        [tools.make_seating(1, prompt)],
    ).wait()
    assert fresh.result.row_faults.tolist() == [0]
    assert fresh.result.token_ids.tolist() == ok.result.token_ids.tolist()


def test_nan_logits_end_their_own_row_only(runner: ModelRunner, tools: Any) -> None:
    prompt = prompts(1)[0][:10]
    compute_logits = runner._forward.logits

    def poison(step: Any) -> torch.Tensor:
        logits = compute_logits(step)
        logits[1, 5] = math.nan
        return logits

    runner._forward.logits = poison
    pages = [(seat, index, 1 + seat * 4 + index) for seat in range(3) for index in range(3)]
    asking = SamplingParams(temperature=0.0, seed=0, logprobs=1, presence_penalty=1.0)
    output = runner.launch(
        tools.make_plan(0, [(seat, LAST, 0, 10) for seat in range(3)], prompt * 3, seated=[0, 1, 2], pages=pages),
        [tools.make_seating(seat, prompt, asking) for seat in range(3)],
    ).wait()
    assert output.result.row_faults.tolist() == [0, 1, 0]
    assert output.result.accepted_offsets.tolist() == [0, 1, 1, 2]
    assert output.logprobs[1] is None
    assert output.logprobs[0] == output.logprobs[2]


def test_plans_are_copied_at_launch(runner: ModelRunner, tools: Any) -> None:
    prompt = prompts(1)[0]
    expected = tokens_of(runner, tools, prompt, [40], 1)
    plan = tools.make_plan(0, [(2, LAST, 0, 40)], prompt, seated=[2], pages=[(2, i, i + 1) for i in range(5)])
    handle = runner.launch(plan, [tools.make_seating(2, prompt)])
    for array in (plan.rows, plan.token_ids, plan.page_delta):
        array[:] = 1
    assert handle.wait().result.token_ids.tolist() == expected
    assert handle.is_launched


def test_info_says_what_runs(runner: ModelRunner, tools: Any, tiny_path: Path) -> None:
    info = runner.info
    assert (info.model_type, info.device, info.dtype, info.num_threads) == ("llama", "cpu", "float32", 1)
    assert (info.block_size, info.num_kv_blocks, info.max_model_len, info.vocab_size) == (8, 256, 160, 97)
    assert info.num_parameters == sum(tensor.numel() for tensor in tools.tiny_tensors(tools.CONFIG).values())
    assert info.kv_bytes == 257 * 8 * 2 * 2 * 2 * 8 * 4
    assert {binding.op for binding in info.kernels} >= {"sampling", "linear", "paged_attention"}
    assert info.load_s > 0


def test_progress_counts_tensors_and_warm_up(tiny_path: Path, tools: Any) -> None:
    from tokenspeed.checkpoints import open_model

    seen: list[tuple[str, int, int, str]] = []
    config = tools.engine_config(tiny_path)
    ModelRunner.create(config, open_model(config.model), lambda *event: seen.append(event)).close()
    load = [event for event in seen if event[0] == "load"]
    num_tensors = len(tools.tiny_tensors(tools.CONFIG))
    assert [done for _, done, _, _ in load] == list(range(1, num_tensors + 1))
    assert {total for _, _, total, _ in load} == {num_tensors}
    assert [event[0] for event in seen][-1] == "warmup"
