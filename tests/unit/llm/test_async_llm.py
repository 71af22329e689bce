# SPDX-License-Identifier: Apache-2.0
"""AsyncLLM through a real engine process: real control plane, real sampler, scripted text."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest

from joined_outputs import joined
from scripted import write_scripted_model
from tokenspeed.core.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from tokenspeed.core.errors import (
    ConfigError,
    ContextLengthError,
    EngineDeadError,
    InvalidRequestError,
    ModelNotFoundError,
    OverloadedError,
    TokenizerError,
)
from tokenspeed.core.request import PRIORITY_ABS_MAX, FinishReason, Retention, SamplingParams
from tokenspeed.engine.process import EngineProcess
from tokenspeed.llm.async_llm import AsyncLLM
from tokenspeed.llm.engine_client import EngineClient
from tokenspeed.llm.input_processor import ChatPrompt, Prompt, TextPrompt, TokensPrompt
from tokenspeed.llm.output_processor import RequestStream
from tokenspeed.llm.outputs import RequestOutput
from tokenspeed.llm.tokenizer import Tokenizer

T = TypeVar("T")
REPLIES = (
    ("emoji", "naïve 🧪 東京"),
    ("stop", "alpha-DEFGHIJ-omega"),
    ("near miss", "alpha-DEFGHIX-omega"),
    ("count", "".join(f"{number} " for number in range(60))),
    ("long", "0123456789" * 400),
    ("", "fine"),
)


@dataclass
class Running:
    """An engine and the loop that it belongs to."""

    loop: asyncio.AbstractEventLoop
    llm: AsyncLLM

    def __call__(self, work: Coroutine[object, object, T], timeout_s: float = 60.0) -> T:
        return self.loop.run_until_complete(asyncio.wait_for(work, timeout_s))

    async def whole(self, prompt: Prompt, **fields: object) -> RequestOutput:
        params = SamplingParams(**fields)  # type: ignore[arg-type]
        return joined([output async for output in self.llm.generate(prompt, params)])

    async def idle(self, within_s: float = 2.0) -> None:
        """Wait until nothing runs, waits or holds a block."""
        deadline = time.monotonic() + within_s
        while self.llm.num_live or self.llm.stats.num_running or self.llm.stats.used_blocks:
            assert time.monotonic() < deadline, f"not idle: {self.llm.stats}"
            await asyncio.sleep(0.01)


def config(folder: Path, kv_tokens: int = 16_384, **scheduler: int) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(model=str(folder), load_format="scripted"),
        cache=CacheConfig(kv_tokens=kv_tokens),
        scheduler=SchedulerConfig(**scheduler),
    )


@contextlib.contextmanager
def started(config: EngineConfig) -> Iterator[Running]:
    loop = asyncio.new_event_loop()
    running = Running(loop, loop.run_until_complete(AsyncLLM.start(config)))
    yield running
    running(running.llm.shutdown())
    loop.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_scripted_model(tmp_path_factory.mktemp("scripted") / "model", REPLIES, step_s=0.001)


@pytest.fixture(scope="module")
def run(folder: Path) -> Iterator[Running]:
    with started(config(folder, max_num_waiting=100)) as running:
        yield running


def chat(text: str) -> ChatPrompt:
    return ChatPrompt([{"role": "user", "content": text}])


def test_text_streams_whole_characters(run: Running) -> None:
    async def scenario() -> list[RequestOutput]:
        return [output async for output in run.llm.generate(chat("emoji"))]

    outputs = run(scenario())
    assert len(outputs) > 5
    assert all("\ufffd" not in output.outputs[0].text for output in outputs)
    whole = joined(outputs)
    (completion,) = whole.outputs
    assert completion.text == "naïve 🧪 東京"
    assert completion.finish_reason is FinishReason.STOP and completion.stop_reason is None
    assert completion.num_tokens == len("naïve 🧪 東京".encode()) + 1
    assert whole.finished and not any(output.finished for output in outputs[:-1])
    assert whole.times.first_token is not None and whole.times.arrived <= whole.times.first_token


def test_stop_strings_end_the_request_in_the_engine_too(run: Running) -> None:
    (stopped,) = run(run.whole(chat("stop"), stop=("DEFGHIJ",))).outputs
    assert (stopped.text, stopped.stop_reason) == ("alpha-", "DEFGHIJ")
    assert stopped.num_tokens == len("alpha-DEFGHIJ")
    (missed,) = run(run.whole(chat("near miss"), stop=("DEFGHIJ",))).outputs
    assert (missed.text, missed.finish_reason) == ("alpha-DEFGHIX-omega", FinishReason.STOP)
    run(run.idle())


def test_n_sequences_come_in_one_stream(run: Running) -> None:
    output = run(run.whole(chat("emoji"), n=3))
    assert [(each.index, each.text) for each in output.outputs] == [(index, "naïve 🧪 東京") for index in range(3)]


def test_logprobs_add_up_to_the_text(run: Running) -> None:
    (completion,) = run(run.whole(chat("emoji"), logprobs=3)).outputs
    assert completion.logprobs is not None
    assert b"".join(entry.token.bytes for entry in completion.logprobs) == completion.text.encode()
    assert len(completion.logprobs) == completion.num_tokens - 1
    assert all(len(entry.top) == 3 and entry.token.logprob <= 0 for entry in completion.logprobs)


def test_prompt_logprobs_cover_the_prompt_even_when_it_is_cached(run: Running) -> None:
    prompt = TokensPrompt([5] * 70)
    run(run.whole(prompt, max_tokens=1))
    assert run(run.whole(prompt, max_tokens=1)).cached_len >= 48
    output = run(run.whole(prompt, max_tokens=1, prompt_logprobs=1))
    assert output.cached_len == 0 and output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None and len(output.prompt_logprobs) == 70
    assert all(entry is not None and entry.token.token_id == 5 for entry in output.prompt_logprobs[1:])


def test_max_tokens_and_ignore_eos(run: Running) -> None:
    (cut,) = run(run.whole(chat("emoji"), max_tokens=9)).outputs
    assert (cut.num_tokens, cut.finish_reason) == (9, FinishReason.LENGTH)
    (full,) = run(run.whole(chat("hello"), max_tokens=9, ignore_eos=True)).outputs
    assert (full.num_tokens, full.finish_reason) == (9, FinishReason.LENGTH)


def test_64_streams_at_once(run: Running) -> None:
    async def scenario() -> list[RequestOutput]:
        return await asyncio.gather(*(run.whole(chat(f"emoji {index}")) for index in range(64)))

    assert [output.outputs[0].text for output in run(scenario())] == ["naïve 🧪 東京"] * 64
    run(run.idle())


@pytest.mark.parametrize("after", [0, 3])
def test_closing_a_stream_frees_everything(run: Running, after: int) -> None:
    """Before the first token, and in the middle."""

    async def scenario() -> None:
        for _ in range(10):
            stream = await run.llm.submit(chat("long"), SamplingParams(ignore_eos=True, max_tokens=4000))
            for _ in range(after):
                await anext(stream)
            stream.close()
            await run.idle()

    run(scenario())


def test_cancelling_the_task_that_waits_cancels_the_request(run: Running) -> None:
    async def scenario() -> None:
        task = asyncio.create_task(run.whole(chat("long"), ignore_eos=True, max_tokens=4000))
        while not run.llm.stats.num_running:
            await asyncio.sleep(0.005)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await run.idle()

    run(scenario())


def test_one_id_may_be_used_again_at_once(run: Running) -> None:
    async def scenario() -> None:
        for _ in range(5):
            stream = await run.llm.submit(chat("long"), request_id="same")
            await anext(stream)
            stream.close()
        assert [output.request_id async for output in run.llm.generate(chat("x"), request_id="same")][-1] == "same"

    run(scenario())


def test_wrong_requests_harm_no_other(run: Running) -> None:
    async def scenario() -> None:
        good = asyncio.create_task(run.whole(chat("emoji")))
        for params in (SamplingParams(temperature=-1.0), SamplingParams(n=1000), SamplingParams(stop=("",))):
            with pytest.raises(InvalidRequestError):
                await run.llm.submit(chat("x"), params)
        with pytest.raises(InvalidRequestError):
            await run.llm.submit(TokensPrompt([10**9]))
        assert (await good).outputs[0].text == "naïve 🧪 東京"

    run(scenario())


@pytest.mark.parametrize("sign", [-1, 1])
def test_every_priority_that_is_taken_is_served(run: Running, sign: int) -> None:
    async def scenario() -> None:
        with pytest.raises(InvalidRequestError, match="priority"):
            await run.llm.submit(chat("x"), priority=sign * (PRIORITY_ABS_MAX + 1))
        (last,) = [out async for out in run.llm.generate(chat("x"), priority=sign * PRIORITY_ABS_MAX) if out.finished]
        assert last.finished and run.llm.is_alive

    run(scenario())


def test_a_long_prompt_is_encoded_without_stopping_the_loop(run: Running) -> None:
    """Beyond the window it is refused with both counts; other tasks run meanwhile."""

    async def scenario() -> None:
        with pytest.raises(Exception, match="8192") as caught:
            await run.llm.submit(TextPrompt("word " * 100_000))
        assert "500000" in str(caught.value)

    run(scenario())


def test_megabytes_are_refused_without_being_encoded(run: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        def encode(*_: object, **__: object) -> list[int]:
            raise AssertionError("encoded all the same")

        monkeypatch.setattr(type(run.llm.tokenizer), "encode", encode)
        with pytest.raises(ContextLengthError, match=r"8192 tokens.*at least \d+ tokens") as caught:
            await run.llm.submit(TextPrompt("word " * 1_000_000))
        assert caught.value.num_prompt_tokens >= 8192

    run(scenario())


def test_a_full_queue_turns_newcomers_away(run: Running) -> None:
    async def scenario() -> None:
        streams: list[RequestStream] = []

        async def flood() -> None:
            while len(streams) < 300:
                streams.append(await run.llm.submit(chat("long"), SamplingParams(max_tokens=3000)))

        with pytest.raises(OverloadedError) as caught:
            await flood()
        assert caught.value.retry_after_s >= 1 and 100 <= len(streams) <= 164
        for stream in streams[:2]:
            stream.close()
        assert run.llm.num_live <= 162
        with pytest.raises(OverloadedError):
            await run.llm.submit(chat("long"), SamplingParams(max_tokens=3000, n=100))
        for stream in streams:
            stream.close()
        await run.idle()

    run(scenario())


def test_a_small_pool_preempts_and_still_finishes_everything(folder: Path) -> None:
    """Text and log-probabilities are as on an idle engine: preempted requests go on where they were."""
    with started(config(folder, kv_tokens=1024)) as run:

        async def scenario() -> list[RequestOutput]:
            return await asyncio.gather(*(run.whole(chat("count"), logprobs=0) for _ in range(32)))

        outputs = run(scenario())
        assert run.llm.stats.num_preemptions > 0
        for output in outputs:
            (completion,) = output.outputs
            assert completion.text == dict(REPLIES)["count"] and completion.logprobs is not None
            assert b"".join(entry.token.bytes for entry in completion.logprobs) == completion.text.encode()
        run(run.idle())


def test_a_killed_engine_is_told_to_everyone(folder: Path) -> None:
    with started(config(folder)) as run:

        async def scenario() -> None:
            waiting = [asyncio.create_task(run.whole(chat("long"))) for _ in range(8)]
            while run.llm.stats.num_running < 8:
                await asyncio.sleep(0.01)
            engine = run.llm._client._engine
            assert isinstance(engine, EngineProcess)
            os.kill(engine.pid, signal.SIGKILL)
            for result in await asyncio.gather(*waiting, return_exceptions=True):
                assert isinstance(result, EngineDeadError) and "SIGKILL" in str(result)
            assert not run.llm.is_alive
            with pytest.raises(EngineDeadError):
                await run.llm.submit(chat("x"))

        run(scenario())


def test_starts_that_fail_leave_nothing_behind(folder: Path, tmp_path: Path) -> None:
    def start(config: EngineConfig) -> None:
        asyncio.run(AsyncLLM.start(config))

    with pytest.raises(ModelNotFoundError):
        start(EngineConfig(model=ModelConfig(model=str(tmp_path / "absent.gguf"))))
    with pytest.raises(ConfigError, match="block-size"):
        start(EngineConfig(cache=CacheConfig(block_size=7)))
    bare = write_scripted_model(tmp_path / "bare", REPLIES)
    (bare / "script.json").write_text('{"replies": []}')
    with pytest.raises(TokenizerError):
        start(config(bare))


@pytest.mark.parametrize("is_late", [False, True], ids=["at-once", "when-the-engine-runs"])
def test_a_tokenizer_that_cannot_be_built_ends_the_engine_beside_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, is_late: bool
) -> None:
    engines: list[EngineProcess] = []
    runs = threading.Event()
    spawn, start = EngineProcess.spawn, EngineClient.start

    def spawned(given: EngineConfig) -> EngineProcess:
        engines.append(spawn(given))
        return engines[-1]

    async def started_client(*args: Any) -> EngineClient:
        client = await start(*args)
        runs.set()
        return client

    def broken(source: object) -> Tokenizer:
        assert not is_late or runs.wait(60)
        raise TokenizerError("no such word")

    monkeypatch.setattr(EngineProcess, "spawn", spawned)
    monkeypatch.setattr(EngineClient, "start", started_client)
    monkeypatch.setattr(Tokenizer, "from_source", broken)
    with pytest.raises(TokenizerError, match="no such word"):
        asyncio.run(AsyncLLM.start(config(folder)))
    assert len(engines) == 1 or not is_late
    assert not any(engine.is_alive() for engine in engines)


def test_an_engine_is_started_again_at_the_size_it_had(folder: Path) -> None:
    measured = EngineConfig(model=ModelConfig(model=str(folder), load_format="scripted"))
    with started(measured) as run:

        async def scenario() -> None:
            sizes = run.llm.info.num_kv_blocks, run.llm.info.max_num_batched_tokens, run.llm.info.max_model_len
            kept = Retention("a session", ttl_s=60.0)
            async for _ in run.llm.generate(chat("emoji"), request_id="kept", retain=kept):
                pass
            while run.llm.stats.num_held == 0:
                await asyncio.sleep(0.01)
            assert run.llm.num_restarts == 0
            engine = run.llm._client._engine
            assert isinstance(engine, EngineProcess)
            os.kill(engine.pid, signal.SIGKILL)
            death = await run.llm.wait_death()
            assert "SIGKILL" in str(death) and death.retry_after_s is not None and death.retry_after_s >= 1
            await run.llm.restart()
            assert run.llm.is_alive and run.llm.num_restarts == 1 and run.llm.stats.num_held == 0
            run.llm.retain("kept", 60.0)
            run.llm.release("kept")
            info = run.llm.info
            assert (info.num_kv_blocks, info.max_num_batched_tokens, info.max_model_len) == sizes
            assert (await run.whole(chat("emoji"))).outputs[0].text == "naïve 🧪 東京"

        run(scenario())
