# SPDX-License-Identifier: Apache-2.0
"""Holds and time limits as a caller asks for them: what reaches the engine, what is refused."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine

import pytest

from fakes import FakeSource, FakeWorker, byte_tokenizer
from joined_outputs import joined
from tokenspeed.core.config import EngineConfig
from tokenspeed.core.errors import InvalidRequestError
from tokenspeed.core.ipc import Release, Retain, Submit
from tokenspeed.core.request import PRIORITY_ABS_MAX, FinishReason, Retention, SamplingParams
from tokenspeed.engine.process import InProcessEngine
from tokenspeed.llm import async_llm
from tokenspeed.llm.async_llm import AsyncLLM
from tokenspeed.llm.engine_client import EngineClient
from tokenspeed.llm.input_processor import TokensPrompt
from tokenspeed.llm.outputs import RequestOutput
from tokenspeed.llm.retention import SECONDS_MAX, checked_retention, checked_seconds

PROMPT = TokensPrompt([1, 2, 3])
SHORT = SamplingParams(max_tokens=2)
KEEP = Retention("session", 30.0, 1)


def run(worker: FakeWorker, scenario: Callable[[AsyncLLM], Coroutine[object, object, None]]) -> None:
    """The scenario over an AsyncLLM whose engine is the worker."""

    async def main() -> None:
        client = await EngineClient.start(lambda: InProcessEngine(worker), EngineConfig())
        llm = AsyncLLM(EngineConfig(), FakeSource(), byte_tokenizer(), client)
        try:
            await scenario(llm)
        finally:
            await llm.shutdown()

    asyncio.run(asyncio.wait_for(main(), 20.0))


async def whole(llm: AsyncLLM, params: SamplingParams = SHORT, **fields: object) -> RequestOutput:
    return joined([output async for output in llm.generate(PROMPT, params, **fields)])  # type: ignore[arg-type]


def test_a_request_carries_what_was_asked() -> None:
    worker = FakeWorker()

    async def scenario(llm: AsyncLLM) -> None:
        await whole(llm, retain=KEEP, timeout_s=7)
        await whole(llm)

    run(worker, scenario)
    first, second = (message.request for message in worker.received if isinstance(message, Submit))
    assert (first.retain, first.timeout_s) == (KEEP, 7.0)
    assert (second.retain, second.timeout_s) == (None, None)


def test_of_n_sequences_the_first_is_kept() -> None:
    worker = FakeWorker()

    async def scenario(llm: AsyncLLM) -> None:
        await whole(llm, SamplingParams(max_tokens=2, n=3), retain=KEEP, request_id="a")
        llm.release("a")
        await asyncio.sleep(0.1)

    run(worker, scenario)
    requests = [message.request for message in worker.received if isinstance(message, Submit)]
    assert [request.retain for request in requests] == [KEEP, None, None]
    assert Release(requests[0].request_id) in worker.received


def test_holds_name_the_last_request_of_an_id() -> None:
    """An id may be used again; ids that were never kept, or are released already, are ignored."""
    worker = FakeWorker()

    async def scenario(llm: AsyncLLM) -> None:
        await whole(llm, request_id="plain")
        for _ in range(2):
            await whole(llm, retain=KEEP, request_id="a")
        llm.retain("a", 5)
        llm.release("a")
        for request_id in ("a", "plain", "nobody"):
            llm.retain(request_id, 5)
            llm.release(request_id)
        await asyncio.sleep(0.1)

    run(worker, scenario)
    *_, last = (message.request.request_id for message in worker.received if isinstance(message, Submit))
    told = [message for message in worker.received if isinstance(message, (Retain, Release))]
    assert told == [Retain(last, 5.0), Release(last)]
    assert [deadline is None for _, deadline in worker.control.holds] == [False, True]


def test_the_oldest_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_llm, "NUM_RETAINED_MAX", 2)
    worker = FakeWorker()

    async def scenario(llm: AsyncLLM) -> None:
        for request_id in "abc":
            await whole(llm, retain=KEEP, request_id=request_id)
        for request_id in "abc":
            llm.release(request_id)
        await asyncio.sleep(0.1)

    run(worker, scenario)
    released = [message.request_id[0] for message in worker.received if isinstance(message, Release)]
    assert released == ["b", "c"]


def test_a_request_ends_with_its_time() -> None:
    async def scenario(llm: AsyncLLM) -> None:
        began = time.monotonic()
        output = await whole(llm, SamplingParams(max_tokens=500), timeout_s=0.1)
        (completion,) = output.outputs
        assert completion.finish_reason is FinishReason.ERROR
        assert completion.error == "the request's time limit of 0.1 s passed"
        assert 0.1 <= time.monotonic() - began < 2.0

    worker = FakeWorker()
    worker.runner.pace = lambda: time.sleep(0.005)
    run(worker, scenario)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"retain": Retention("", 1.0)}, "retain"),
        ({"retain": Retention("x" * 513, 1.0)}, "retain"),
        ({"retain": Retention("s", 0.0)}, "retain.ttl_s"),
        ({"retain": Retention("s", float("nan"))}, "retain.ttl_s"),
        ({"retain": Retention("s", 1.0, PRIORITY_ABS_MAX + 1)}, "retain.priority"),
        ({"priority": -PRIORITY_ABS_MAX - 1}, "priority"),
        ({"retain": Retention(5, 1.0)}, "retain"),  # type: ignore[arg-type]
        ({"retain": "session"}, "retain"),
        ({"timeout_s": 0.0}, "timeout_s"),
        ({"timeout_s": SECONDS_MAX + 1}, "timeout_s"),
        ({"timeout_s": "5"}, "timeout_s"),
        ({"timeout_s": True}, "timeout_s"),
    ],
)
def test_what_makes_no_sense_is_refused_with_its_name(fields: dict[str, object], param: str) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        with pytest.raises(InvalidRequestError) as caught:
            await whole(llm, **fields)
        assert caught.value.param == param
        assert param in str(caught.value)
        assert llm.num_live == 0

    run(FakeWorker(), scenario)


def test_the_bounds_themselves_are_taken() -> None:
    assert checked_seconds(SECONDS_MAX, "x") == SECONDS_MAX
    keep = Retention("x" * 512, 1, -PRIORITY_ABS_MAX)
    assert checked_retention(keep) == keep


def test_a_hold_of_no_time_is_refused() -> None:
    async def scenario(llm: AsyncLLM) -> None:
        with pytest.raises(InvalidRequestError, match="ttl_s"):
            llm.retain("a", 0.0)

    run(FakeWorker(), scenario)
