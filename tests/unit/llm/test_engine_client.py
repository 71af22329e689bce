# SPDX-License-Identifier: Apache-2.0
"""The API process's end: handshake, dispatch, death."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field

import pytest

from fakes import EOS, FakeRunner, FakeWorker, engine_info
from tokenspeed.core.config import EngineConfig, ParallelConfig
from tokenspeed.core.errors import CapacityError, EngineDeadError, StartError, TokenSpeedError
from tokenspeed.core.ipc import EngineStats, Shutdown, StartFailed, Submit, Updates
from tokenspeed.core.request import EngineRequest, SamplingParams, SequenceUpdate, pack_ids
from tokenspeed.engine.channel import Channel
from tokenspeed.engine.process import InProcessEngine
from tokenspeed.llm.engine_client import EngineClient, ProgressFn


@dataclass
class Sink:
    """Keeps what it gets."""

    updates: list[SequenceUpdate] = field(default_factory=list)
    error: TokenSpeedError | None = None
    news: asyncio.Event = field(default_factory=asyncio.Event)
    breaks: bool = False

    def __hash__(self) -> int:
        return id(self)

    def push(self, update: SequenceUpdate) -> None:
        assert not self.breaks
        self.updates.append(update)
        self.news.set()

    def push_tokens(self, request_id: str, token_ids: Sequence[int]) -> None:
        self.push(SequenceUpdate(request_id=request_id, token_ids=tuple(token_ids)))

    def fail(self, error: TokenSpeedError) -> None:
        self.error = error
        self.news.set()

    async def until(self, count: int) -> None:
        while len(self.updates) < count and self.error is None:
            self.news.clear()
            await self.news.wait()


def request(request_id: str, max_tokens: int = 4) -> EngineRequest:
    sampling = SamplingParams(max_tokens=max_tokens, seed=1)
    return EngineRequest(request_id=request_id, token_ids=pack_ids([1, 2]), sampling=sampling, end_token_ids=(EOS,))


async def started(worker: FakeWorker, progress: ProgressFn | None = None) -> EngineClient:
    return await EngineClient.start(lambda: InProcessEngine(worker), EngineConfig(), progress)


def run(work: Coroutine[object, object, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 20.0))


def test_handshake_progress_and_dispatch() -> None:
    async def scenario() -> None:
        seen: list[tuple[str, int, int, str]] = []
        client = await started(FakeWorker(), lambda *progress: seen.append(progress))
        assert seen == [("load", 1, 2, "tensors")] and client.info.model_type == "fake"
        sinks = {name: Sink() for name in "ab"}
        for name, sink in sinks.items():
            client.submit(request(name), sink)
        for name, sink in sinks.items():
            await sink.until(5)
            assert [update.request_id for update in sink.updates] == [name] * 5
        assert client.num_live == 0
        await client.stop()
        await client.stop()

    run(scenario())


def test_tokens_are_dealt_by_their_counts_and_counters_stay_until_the_next() -> None:
    """Several for one sequence and one for another; then one each."""

    def worker(sock: socket.socket) -> int:
        channel = Channel(sock)
        channel.receive(10.0)
        channel.send(engine_info())
        handles: list[int] = []
        while len(handles) < 2:
            handles += [message.handle for message in channel.receive(10.0) if isinstance(message, Submit)]
        stats = EngineStats(num_running=2)
        channel.send(Updates(handles=handles, token_ids=[5, 6, 7], counts=[2, 1], stats=stats))
        channel.send(Updates(handles=handles[::-1], token_ids=[8, 9]))
        while not any(isinstance(message, Shutdown) for message in channel.receive(10.0)):
            pass
        return 0

    async def scenario() -> None:
        client = await EngineClient.start(lambda: InProcessEngine(worker), EngineConfig())
        sinks = [Sink(), Sink()]
        for name, sink in zip("ab", sinks, strict=True):
            client.submit(request(name), sink)
        for sink in sinks:
            await sink.until(2)
        told = [[update.token_ids for update in sink.updates] for sink in sinks]
        assert told == [[(5, 6), (9,)], [(7,), (8,)]]
        assert client.stats.num_running == 2
        await client.stop()

    run(scenario())


def test_an_idle_engine_gives_signs_of_life() -> None:
    async def scenario() -> None:
        client = await started(FakeWorker())
        first = client.last_progress_s
        await asyncio.sleep(0.2)
        assert client.last_progress_s > first and client.is_alive
        await client.stop()
        assert not client.is_alive

    run(scenario())


def test_a_failed_start_is_the_error_that_the_engine_met() -> None:
    async def scenario() -> None:
        with pytest.raises(CapacityError, match="too small"):
            await started(FakeWorker(fail=StartFailed("CapacityError", "the pool is too small", "trace")))
        with pytest.raises(StartError, match="odd"):
            await started(FakeWorker(fail=StartFailed("NoSuchKind", "odd")))

    run(scenario())


def test_an_engine_that_ends_while_starting_is_told() -> None:
    async def scenario() -> None:
        with pytest.raises(StartError, match="with exit code 7 while starting"):
            await EngineClient.start(lambda: InProcessEngine(lambda sock: 7), EngineConfig())

    run(scenario())


def test_death_reaches_everyone_who_waits() -> None:
    async def scenario() -> None:
        worker = FakeWorker()
        client = await started(worker)
        sinks = [Sink() for _ in range(5)]
        for index, sink in enumerate(sinks):
            client.submit(request(f"r{index}", 10_000_000), sink)
        await sinks[-1].until(3)
        worker.crash.set()
        for sink in sinks:
            while sink.error is None:
                await asyncio.sleep(0.01)
            assert isinstance(sink.error, EngineDeadError) and "exit code 3" in str(sink.error)
        assert not client.is_alive and client.num_live == 0
        with pytest.raises(EngineDeadError):
            client.submit(request("late"), Sink())
        client.cancel("r0")
        await client.stop()

    run(scenario())


def test_cancelled_requests_get_nothing_more_and_leave_the_engine() -> None:
    async def scenario() -> None:
        worker = FakeWorker()
        client = await started(worker)
        sink = Sink()
        client.submit(request("a", 10_000_000), sink)
        await sink.until(2)
        client.cancel("a")
        count = len(sink.updates)
        client.cancel("a")
        while client.stats.num_running:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        assert len(sink.updates) == count and worker.control.stats().num_running == 0
        await client.stop()

    run(scenario())


def test_a_sink_that_breaks_harms_no_other(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        client = await started(FakeWorker(runner=FakeRunner()))
        broken, good = Sink(breaks=True), Sink()
        client.submit(request("broken", 1_000_000), broken)
        client.submit(request("good"), good)
        await good.until(5)
        assert isinstance(broken.error, TokenSpeedError) and len(good.updates) == 5
        while client.stats.num_running:
            await asyncio.sleep(0.01)
        await client.stop()

    run(scenario())
    assert "broken" in caplog.text


def test_an_engine_of_several_ranks_that_says_nothing_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 watches the others, and the client rank 0."""
    monkeypatch.setattr("tokenspeed.llm.engine_client._SILENCE_MARGIN_S", 0.1)
    monkeypatch.setattr("tokenspeed.llm.engine_client._SILENCE_CHECK_S", 0.02)
    hangs = threading.Event()

    async def scenario() -> None:
        config = EngineConfig(parallel=ParallelConfig(tp=2, rank_timeout_s=0.1))
        worker, sink = FakeWorker(runner=FakeRunner(pace=hangs.wait)), Sink()
        client = await EngineClient.start(lambda: InProcessEngine(worker), config)
        client.submit(request("a"), sink)
        await sink.until(1)
        hangs.set()
        assert str(sink.error).startswith("the engine has said nothing for 0 s") and not client.is_alive
        await client.stop()
        alone = await EngineClient.start(lambda: InProcessEngine(FakeWorker()), EngineConfig())
        assert alone._watching is None
        await alone.stop()

    try:
        run(scenario())
    finally:
        hangs.set()
