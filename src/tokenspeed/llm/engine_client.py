# SPDX-License-Identifier: Apache-2.0
"""The API process's end of the stream to an engine: start-up handshake, dispatch of updates, detection of its death.

Knows core.ipc and who waits for which request id; knows no text and no sampling.
"""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol, SupportsIndex

from tokenspeed.core.config import EngineConfig
from tokenspeed.core.errors import START_ERRORS, EngineDeadError, StartError, TokenSpeedError
from tokenspeed.core.ipc import (
    CacheChanges,
    Cancel,
    EngineInfo,
    EngineStats,
    Finish,
    FrameBuffer,
    FromEngine,
    Progress,
    Release,
    Retain,
    Shutdown,
    Start,
    StartFailed,
    Submit,
    ToEngine,
    Updates,
    Vocabulary,
    WatchCache,
    decode_from_engine,
    encode_frame,
)
from tokenspeed.core.request import EngineRequest, SequenceUpdate
from tokenspeed.engine.process import Engine

ProgressFn = Callable[[str, int, int, str], None]

_READ_BYTES = 1 << 20
_HANDLE_MAX = (1 << 31) - 1
_END_WAIT_S = 2.0
_SILENCE_MARGIN_S = 10.0
_SILENCE_CHECK_S = 1.0
_ABANDON_GRACE_S = 0.2
_RETRY_AFTER_S_MAX = 60  # clients ignore what asks for more

_log = logging.getLogger("tokenspeed.llm")


class Sink(Protocol):
    """Who waits for the updates of some sequences."""

    def push(self, update: SequenceUpdate) -> None:
        """Take one update."""
        ...

    def push_tokens(self, request_id: str, token_ids: Sequence[int]) -> None:
        """Take tokens of one sequence of which there is no other news."""
        ...

    def fail(self, error: TokenSpeedError) -> None:
        """No further update will come."""
        ...


class Reader(asyncio.StreamReader):
    """on_data: called with what comes in place of keeping it; nobody has read less than all before it is set."""

    on_data: Callable[[bytes], None] | None = None

    def feed_data(self, data: Iterable[SupportsIndex]) -> None:
        """Called by the loop."""
        if self.on_data is None:
            super().feed_data(data)
        else:
            self.on_data(bytes(data))


class EngineClient:
    """A started engine. All methods belong to one event loop; sending never waits."""

    def __init__(self, engine: Engine, reader: Reader, writer: asyncio.StreamWriter) -> None:
        self.stats = EngineStats()
        self._engine = engine
        self._reader = reader
        self._writer = writer
        self._frames = FrameBuffer()
        self._knows_vocabulary = False
        self._sinks: dict[str, tuple[int, Sink]] = {}  # with the handle
        self._by_handle: dict[int, tuple[str, Callable[[str, Sequence[int]], None], Sink]] = {}
        self._num_submitted = 0
        self._info: EngineInfo | None = None
        self._death: EngineDeadError | None = None
        self._died = asyncio.Event()
        self._start_s = 0.0
        self._reading: asyncio.Task[None] | None = None
        self._progress_at = time.monotonic()
        self._watching: asyncio.Task[None] | None = None
        self._on_cache: Callable[[CacheChanges], None] | None = None

    @classmethod
    async def start(
        cls, launch: Callable[[], Engine], config: EngineConfig, progress: ProgressFn | None = None
    ) -> EngineClient:
        """Launch an engine, hand it its configuration and wait until it can serve. Raises the StartError that the
        engine met."""
        began = time.monotonic()
        engine = await _launched(launch)
        reader, writer = await _connected(engine.sock)
        client = cls(engine, reader, writer)
        try:
            client._send(Start(config))
            client._info = await client._handshake(progress)
        except BaseException:
            writer.transport.abort()
            await asyncio.shield(asyncio.to_thread(engine.stop, _ABANDON_GRACE_S))
            raise
        client._progress_at = time.monotonic()
        client._start_s = client._progress_at - began
        reader.on_data = client._take
        client._reading = asyncio.create_task(client._read_updates(), name="tokenspeed-engine-updates")
        if config.parallel.num_ranks > 1:
            silence_s = config.parallel.rank_timeout_s + _SILENCE_MARGIN_S
            client._watching = asyncio.create_task(client._end_silence(silence_s), name="tokenspeed-engine-silence")
        return client

    @property
    def info(self) -> EngineInfo:
        """What the engine said when it could serve."""
        assert self._info is not None, "the engine has not started"
        return self._info

    @property
    def is_alive(self) -> bool:
        """False once the engine has ended or has been stopped."""
        return self._death is None

    @property
    def death(self) -> EngineDeadError | None:
        """Why no request can be served any more."""
        return self._death

    async def wait_death(self) -> EngineDeadError:
        """Why no request can be served any more, once that is so."""
        await self._died.wait()
        assert self._death is not None
        return self._death

    @property
    def num_live(self) -> int:
        """Sequences that wait for further updates."""
        return len(self._sinks)

    @property
    def last_progress_s(self) -> float:
        """time.monotonic() of the engine's last report: soon after each step and, when idle, every second."""
        return self._progress_at

    def submit(self, request: EngineRequest, sink: Sink) -> None:
        """Send one sequence; its updates go to `sink`. Raises EngineDeadError."""
        self._require_alive()
        assert request.request_id not in self._sinks, f"request id {request.request_id!r} is live already"
        self._num_submitted += 1
        handle = self._num_submitted & _HANDLE_MAX
        self._sinks[request.request_id] = handle, sink
        self._by_handle[handle] = request.request_id, sink.push_tokens, sink
        self._send(Submit(request, handle))

    @property
    def knows_vocabulary(self) -> bool:
        """Whether requests may have grammars."""
        return self._knows_vocabulary

    def know(self, vocabulary: Vocabulary) -> None:
        """From now on requests may have grammars."""
        if self.is_alive and not self._knows_vocabulary:
            self._knows_vocabulary = True
            self._send(vocabulary)

    def cancel(self, request_id: str) -> None:
        """Drop the sequence; no further update of it is delivered. Ids that are not live are ignored."""
        if self._forget(request_id) and self.is_alive:
            self._send(Cancel(request_id))

    def finish(self, request_id: str, keep_tokens: int) -> None:
        """End the sequence at its first keep_tokens generated tokens; no further update of it is delivered."""
        if self._forget(request_id) and self.is_alive:
            self._send(Finish(request_id, keep_tokens))

    def watch_cache(self, on_changes: Callable[[CacheChanges], None] | None) -> None:
        """Call with what the prefix cache gains and loses from now on; None ends it. See core.ipc.WatchCache."""
        self._on_cache = on_changes
        if self.is_alive:
            self._send(WatchCache(on_changes is not None))

    def retain(self, request_id: str, ttl_s: float) -> None:
        """Keep the sequence's pages for ttl_s seconds from now, at its end or after it; see core.ipc.Retain."""
        if self.is_alive:
            self._send(Retain(request_id, ttl_s))

    def release(self, request_id: str) -> None:
        """Let go of the sequence's pages, at its end or after it; see core.ipc.Release."""
        if self.is_alive:
            self._send(Release(request_id))

    async def bury(self) -> None:
        """Clear away what is left of an engine that has died. Idempotent."""
        assert not self.is_alive, "the engine lives"
        for task in (self._reading, self._watching):
            if task is not None:
                task.cancel()
        self._writer.transport.abort()
        await asyncio.to_thread(self._engine.stop, _ABANDON_GRACE_S)

    def tell_stacks(self) -> None:
        """Let the engine's process write the stacks of its threads to stderr."""
        if self.is_alive:
            self._engine.tell_stacks()

    async def stop(self, reason: str = "the engine has been shut down") -> None:
        """End the engine. Whoever still waits gets EngineDeadError, with the reason. Idempotent."""
        if self.is_alive:
            self._send(Shutdown())
        self._die(EngineDeadError(reason))
        for task in (self._reading, self._watching):
            if task is not None:
                task.cancel()
        await self._wait_for_end()
        self._writer.transport.abort()
        self._engine.stop()

    async def _wait_for_end(self) -> None:
        """Until the engine has ended, at most _END_WAIT_S. Polls: while the interpreter exits, when a plain script's
        LLM is shut down, no thread can be had to wait on."""
        deadline = time.monotonic() + _END_WAIT_S
        while not self._engine.wait(0.0) and time.monotonic() < deadline:
            await asyncio.sleep(0.01)

    def _send(self, message: ToEngine) -> None:
        self._writer.write(encode_frame(message))

    def _require_alive(self) -> None:
        if self._death is not None:
            raise EngineDeadError(str(self._death), self._death.retry_after_s)

    async def _read(self) -> list[FromEngine]:
        """The next messages; none at the end of the stream."""
        while True:
            try:
                data = await self._reader.read(_READ_BYTES)
            except OSError:
                data = b""
            messages = [decode_from_engine(body) for body in self._frames.feed(data)]
            if messages or not data:
                return messages

    async def _handshake(self, progress: ProgressFn | None) -> EngineInfo:
        while messages := await self._read():
            for message in messages:
                match message:
                    case Progress(stage, done, total, unit):
                        if progress is not None:
                            progress(stage, done, total, unit)
                    case EngineInfo():
                        return message
                    case StartFailed():
                        raise _start_error(message)
                    case Updates():
                        raise AssertionError("updates before the engine said that it can serve")
        await self._wait_for_end()
        raise StartError(f"the engine ended {self._engine.describe_end()} while starting")

    def _take(self, data: bytes) -> None:
        """What has come, as soon as it has: a task that waited for it would need another turn of the loop."""
        for body in self._frames.feed(data):
            message = decode_from_engine(body)
            if isinstance(message, Updates):
                self._dispatch(message)
                continue
            assert isinstance(message, CacheChanges), f"unexpected {type(message).__name__}"
            self._tell_cache(message)

    async def _read_updates(self) -> None:
        """Until the stream ends; `_take` has all that comes."""
        left = await self._read()
        assert not left, f"{len(left)} messages that nobody took"
        await self._wait_for_end()
        self._die(self._lost(f"the engine ended {self._engine.describe_end()}"))

    async def _end_silence(self, silence_s: float) -> None:
        """Ends an engine that says nothing for so long: rank 0 watches the other ranks, and nobody else watches it."""
        while self.is_alive:
            await asyncio.sleep(_SILENCE_CHECK_S)
            if time.monotonic() - self._progress_at > silence_s:
                self._die(self._lost(f"the engine has said nothing for {silence_s:.0f} s"))
                await asyncio.to_thread(self._engine.stop, 0.0)

    def _dispatch(self, message: Updates) -> None:
        self._progress_at = time.monotonic()
        if message.stats is not None:
            self.stats = message.stats
        if message.handles:
            self._dispatch_tokens(message)
        for update in message.updates:
            known = self._sinks.get(update.request_id)
            if known is None:
                continue  # cancelled or finished by us while the update was on its way
            if update.finish_reason is not None:
                self._forget(update.request_id)
            try:
                known[1].push(update)
            except Exception:  # noqa: BLE001 contained, see _broke
                self._broke(update.request_id, known[1])

    def _dispatch_tokens(self, message: Updates) -> None:
        token_ids, counts = message.token_ids, message.counts
        pieces = _cut(token_ids, counts) if counts else zip(token_ids, strict=True)
        found = map(self._by_handle.get, message.handles)
        for known, piece in zip(found, pieces, strict=True):
            if known is None:
                continue  # as in _dispatch
            request_id, push, sink = known
            try:
                push(request_id, piece)
            except Exception:  # noqa: BLE001 contained, see _broke
                self._broke(request_id, sink)

    def _tell_cache(self, changes: CacheChanges) -> None:
        if self._on_cache is not None:  # else the watch ended while the message was on its way
            self._on_cache(changes)

    def _broke(self, request_id: str, sink: Sink) -> None:
        """A fault in one stream's text must not end the others: it ends that stream, and is logged as the bug it is."""
        _log.exception("request %s: its output could not be processed", request_id)
        self.cancel(request_id)
        sink.fail(TokenSpeedError("internal error while processing the output of this request"))

    def _forget(self, request_id: str) -> bool:
        """No further update of the sequence is delivered. False when it was not live."""
        known = self._sinks.pop(request_id, None)
        if known is not None:
            del self._by_handle[known[0]]
        return known is not None

    def _lost(self, what: str) -> EngineDeadError:
        """The end that nobody asked for. A new engine would need about as long as this one did."""
        retry_after_s = min(max(1, math.ceil(self._start_s)), _RETRY_AFTER_S_MAX)
        return EngineDeadError(what, retry_after_s)

    def _die(self, error: EngineDeadError) -> None:
        if self._death is not None:
            return
        self._death = error
        self._died.set()
        self.stats = EngineStats(total_blocks=self.stats.total_blocks, host_total_blocks=self.stats.host_total_blocks)
        sinks = {sink for _, sink in self._sinks.values()}
        self._sinks, self._by_handle = {}, {}
        for sink in sinks:
            sink.fail(error)


def _cut(token_ids: Sequence[int], counts: Sequence[int]) -> Iterator[Sequence[int]]:
    start = 0
    for count in counts:
        yield token_ids[start : start + count]
        start += count


async def _connected(sock: socket.socket) -> tuple[Reader, asyncio.StreamWriter]:
    loop = asyncio.get_running_loop()
    reader = Reader(limit=_READ_BYTES, loop=loop)
    protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
    transport, _ = await loop.create_connection(lambda: protocol, sock=sock)
    return reader, asyncio.StreamWriter(transport, protocol, reader, loop)


async def _launched(launch: Callable[[], Engine]) -> Engine:
    """The engine, launched on a thread; ended again when the caller is cancelled meanwhile."""
    launching = asyncio.ensure_future(asyncio.to_thread(launch))
    try:
        return await asyncio.shield(launching)
    except asyncio.CancelledError:
        engine = await launching
        await asyncio.to_thread(engine.stop, _ABANDON_GRACE_S)
        raise


def _start_error(failure: StartFailed) -> StartError:
    error = START_ERRORS.get(failure.kind, StartError)(failure.message)
    if failure.details:
        error.add_note(failure.details)
    return error
