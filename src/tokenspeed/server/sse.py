# SPDX-License-Identifier: Apache-2.0
"""Server-sent events: an answer that is an error as long as nothing was sent, and an error frame afterwards.

Knows frames, pings and disconnects; knows no dialect.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing

import msgspec
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from tokenspeed.server.connection import while_connected
from tokenspeed.server.errors import Failure, failure_of

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"
_DIRECT = "tokenspeed.direct_write"
_encoder = msgspec.json.Encoder()
_log = logging.getLogger(__name__)


def data_frame(message: msgspec.Struct) -> bytes:
    """`message` as one event without a name."""
    return b"data: " + _encoder.encode(message) + b"\n\n"


def data_text(text: str) -> bytes:
    """`text` as it stands in the JSON of an event."""
    return _encoder.encode(text)


def error_frame(failure: Failure) -> bytes:
    """The event that ends a broken stream."""
    return data_frame(failure.body)


class DirectWrites:
    """An application whose event streams write past what others wrap around `send`: of a body that has begun, nothing
    is left for them to see. To be put around all of them."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on."""
        scope[_DIRECT] = send
        await self._app(scope, receive, send)


class EventStream(Response):
    """Sends `frames` as they come.

    An exception before the first byte becomes an ordinary error answer; a later one an error frame, after which
    nothing follows. A stream silent for ping_s sends a comment. When the client leaves, `frames` is closed at once.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        frames: AsyncGenerator[bytes, None],
        ping_s: float,
        headers: Mapping[str, str],
        frame_of_failure: Callable[[Failure], bytes] = error_frame,
        answer_of_failure: Callable[[Failure], Response] = Failure.response,
    ) -> None:
        super().__init__(None, 200, {"cache-control": "no-cache", "x-accel-buffering": "no", **headers})
        del self.headers["content-length"]
        self._frames, self._ping_s = frames, ping_s
        self._frame_of_failure, self._answer_of_failure = frame_of_failure, answer_of_failure
        self._started = False
        self._last_sent_s = time.monotonic()
        self._starting = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI application of this one answer."""
        try:
            await while_connected(receive, self._answer(scope, receive, send))
        except ClientDisconnect:
            _log.debug("client left a stream")

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        pinger = asyncio.ensure_future(self._ping(send))
        write = scope.get(_DIRECT, send)
        try:
            async with aclosing(self._frames) as frames:
                async for frame in frames:
                    if not self._started:
                        await self._start(send)
                    self._last_sent_s = time.monotonic()
                    await write({"type": "http.response.body", "body": frame, "more_body": True})
        except Exception as error:  # noqa: BLE001 - whatever happens, the client is told
            failure = failure_of(error)
            if failure.is_bug:
                _log.exception("request failed")
            pinger.cancel()
            if not self._started:
                await self._answer_of_failure(failure)(scope, receive, send)
                return
            await send({"type": "http.response.body", "body": self._frame_of_failure(failure), "more_body": True})
        finally:
            pinger.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _start(self, send: Send) -> None:
        async with self._starting:
            if not self._started:
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                self._started = True

    async def _ping(self, send: Send) -> None:
        while True:
            wait_s = self._last_sent_s + self._ping_s - time.monotonic()
            if wait_s <= 0.0:
                await self._start(send)
                self._last_sent_s = time.monotonic()
                await send({"type": "http.response.body", "body": PING, "more_body": True})
            else:
                await asyncio.sleep(wait_s)
