# SPDX-License-Identifier: Apache-2.0
"""The procedures of TokenSpeedScheduler. Each answers, or ends with a status that says what to do.

A request that fails harms no other; one whose client has gone is cancelled in the engine. Knows gRPC and the engine as
a ServedLLM; listens on nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
from collections.abc import AsyncIterator
from typing import Any, Protocol

import grpc
from smg_grpc_proto import tokenspeed_scheduler_pb2 as scheduler_pb2
from smg_grpc_proto.generated import common_pb2

from tokenspeed.core.errors import EngineDeadError, OverloadedError, RequestError
from tokenspeed.server.app import health_problem
from tokenspeed.server.errors import GenerationError, failure_of
from tokenspeed.server.generation import Job, Tally, pieces
from tokenspeed.server.grpc import facts, tokenizer_files
from tokenspeed.server.grpc.answers import Answer
from tokenspeed.server.grpc.cache_feed import CacheFeed, SlowSubscriberError
from tokenspeed.server.grpc.requests import read_job
from tokenspeed.server.load import LoadMeter
from tokenspeed.server.served import Served

SERVICE_NAME = "tokenspeed.grpc.scheduler.TokenSpeedScheduler"
_CHUNK_BYTES = 64 * 1024
_log = logging.getLogger(__name__)


class Context(Protocol):
    """The part of a grpc.aio.ServicerContext that is used."""

    def invocation_metadata(self) -> Any: ...
    async def abort(self, code: Any, details: str = "", trailing_metadata: Any = ()) -> None: ...
    async def write(self, message: Any) -> None: ...


class StatusError(Exception):
    """A status that only gRPC knows."""

    def __init__(self, code: Any, message: str) -> None:
        super().__init__(message)
        self.code = code


class SchedulerService:
    """One served model. feed: None where the cache keeps no prefixes."""

    def __init__(self, served: Served, feed: CacheFeed | None) -> None:
        self._served = served
        self._feed = feed
        self._meter = LoadMeter(served.llm)
        self._running: dict[str, list[asyncio.Event]] = {}
        self._archive: asyncio.Future[tokenizer_files.Archive] | None = None

    async def Generate(self, request: Any, context: Context) -> None:
        """Streams the answer: chunks where they are asked for, then a last message for each completion."""
        async with self._answered(context):
            job = read_job(request, self._served)
            aborted = asyncio.Event()
            self._running.setdefault(job.request_id, []).append(aborted)
            try:
                await self._generate(request, job, aborted, context)
            finally:
                self._running[job.request_id].remove(aborted)
                if not self._running[job.request_id]:
                    del self._running[job.request_id]

    async def Abort(self, request: Any, context: Context) -> Any:
        """Ends a running request; its completions end with the reason `abort`."""
        async with self._answered(context):
            running = self._running.get(request.request_id, [])
            for aborted in running:
                aborted.set()
            message = "aborted" if running else f"no request {request.request_id!r} is running"
            return scheduler_pb2.AbortResponse(success=bool(running), message=message)

    async def HealthCheck(self, request: Any, context: Context) -> Any:
        """Whether the engine makes progress."""
        problem = health_problem(self._served)
        return scheduler_pb2.HealthCheckResponse(healthy=problem is None, message=problem or "")

    async def GetModelInfo(self, request: Any, context: Context) -> Any:
        """The model's name, limits, end tokens and sampling defaults."""
        async with self._answered(context):
            return facts.model_info(self._served)

    async def GetServerInfo(self, request: Any, context: Context) -> Any:
        """What runs here, since when, and how much of it."""
        async with self._answered(context):
            return facts.server_info(self._served, self._meter)

    async def GetLoads(self, request: Any, context: Context) -> Any:
        """How busy the engine is. Partitions are its own matter: it is one rank to others."""
        async with self._answered(context):
            return facts.loads(self._served, self._meter, list(request.include))

    async def FlushCache(self, request: Any, context: Context) -> Any:
        """Refused: the engine has no such operation."""
        async with self._answered(context):
            message = "the prefix cache cannot be flushed; restart the server, or send prompts that share nothing"
            return common_pb2.FlushCacheResponse(success=False, message=message)

    async def StartProfile(self, request: Any, context: Context) -> Any:
        """Unimplemented."""
        async with self._answered(context):
            raise StatusError(
                grpc.StatusCode.UNIMPLEMENTED, "this server has no profiler; profile its process from outside"
            )

    async def StopProfile(self, request: Any, context: Context) -> Any:
        """Unimplemented."""
        await self.StartProfile(request, context)

    async def GetTokenizer(self, request: Any, context: Context) -> None:
        """Streams a zip archive of the tokenizer's files; the last piece carries the SHA-256 of the whole."""
        async with self._answered(context):
            archive = await self._packed()
            for start in range(0, len(archive.data), _CHUNK_BYTES):
                is_last = start + _CHUNK_BYTES >= len(archive.data)
                data = archive.data[start : start + _CHUNK_BYTES]
                await context.write(common_pb2.GetTokenizerChunk(data=data, sha256=archive.sha256 if is_last else ""))

    async def SubscribeKvEvents(self, request: Any, context: Context) -> None:
        """Streams the state of the prefix cache and then its changes, until the subscriber goes. The state comes
        whatever number was asked for: it holds all that an older one could."""
        async with self._answered(context):
            if self._feed is None:
                raise StatusError(grpc.StatusCode.UNIMPLEMENTED, "the server was started with --no-prefix-caching")
            async with contextlib.aclosing(self._feed.batches()) as batches:
                async for batch in batches:
                    await context.write(batch)

    async def _generate(self, request: Any, job: Job, aborted: asyncio.Event, context: Context) -> None:
        answer = Answer(request, job.request_id, job.num_choices)
        stop = asyncio.ensure_future(aborted.wait())
        try:
            async with contextlib.aclosing(pieces(self._served, job, Tally())) as news:
                while True:
                    coming = asyncio.ensure_future(anext(news, None))
                    try:
                        await asyncio.wait({coming, stop}, return_when=asyncio.FIRST_COMPLETED)
                    finally:
                        if not coming.done():  # aborted, or the client has gone
                            coming.cancel()
                            await asyncio.gather(coming, return_exceptions=True)
                    piece = None if coming.cancelled() else coming.result()
                    if piece is None:
                        break
                    for message in answer.messages(piece):
                        await context.write(message)
        finally:
            stop.cancel()
        if aborted.is_set():
            for message in answer.aborted():
                await context.write(message)

    async def _packed(self) -> tokenizer_files.Archive:
        """The archive, made once."""
        if self._archive is None:
            llm = self._served.llm
            template = llm.input_processor.template_text
            self._archive = asyncio.ensure_future(
                asyncio.to_thread(tokenizer_files.pack, llm.source, llm.tokenizer, template)
            )
        return await asyncio.shield(self._archive)

    @contextlib.asynccontextmanager
    async def _answered(self, context: Context) -> AsyncIterator[None]:
        """Asks for the API key, and ends the call with a status for whatever is raised."""
        try:
            self._check_key(context)
            yield
        except Exception as error:  # noqa: BLE001 - whatever happens, the client gets a status
            code, message, metadata = _status_of(error)
            if code is grpc.StatusCode.INTERNAL and failure_of(error).is_bug:
                _log.exception("a gRPC call failed")
            await context.abort(code, message, metadata)

    def _check_key(self, context: Context) -> None:
        expected = self._served.config.api_key
        if expected is None:
            return
        metadata = {str(key).lower(): value for key, value in context.invocation_metadata() or ()}
        scheme, _, bearer = metadata.get("authorization", "").partition(" ")
        given = metadata.get("x-api-key") or (bearer if scheme == "Bearer" else "")
        if not hmac.compare_digest(given.encode(), expected.encode()):
            message = "the API key is missing or wrong; send the metadata `authorization: Bearer KEY`"
            raise StatusError(grpc.StatusCode.UNAUTHENTICATED, message)


def _status_of(error: Exception) -> tuple[Any, str, tuple[tuple[str, str], ...]]:
    """Code, message and metadata."""
    failure = failure_of(error)
    metadata = tuple((name, value) for name, value in failure.headers.items() if name == "retry-after")
    match error:
        case StatusError():
            return error.code, str(error), ()
        case RequestError():
            code = grpc.StatusCode.INVALID_ARGUMENT
        case OverloadedError():
            code = grpc.StatusCode.RESOURCE_EXHAUSTED
        case EngineDeadError():
            code = grpc.StatusCode.UNAVAILABLE
        case SlowSubscriberError():
            return grpc.StatusCode.DATA_LOSS, str(error), ()
        case GenerationError():
            code = grpc.StatusCode.INTERNAL
        case _:
            code = grpc.StatusCode.INTERNAL
    return code, failure.body.error.message, metadata
