# SPDX-License-Identifier: Apache-2.0
"""The HTTP server and the event loop that it runs on. Knows no engine and no endpoint."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from tokenspeed.server.sse import DirectWrites

T = TypeVar("T")

DRAIN_S = 10
FLUSH_S = 2
_KEEP_ALIVE_S = 75  # longer than clients keep idle connections, so that they never meet a closing one
_log = logging.getLogger(__name__)


def run(work: Coroutine[Any, Any, T]) -> T:
    """The result of `work` on an event loop of the kind that serves."""
    return asyncio.run(work)


def http_config(app: ASGIApp) -> uvicorn.Config:
    """How `app` is served. When it ends, running requests have DRAIN_S to finish, and FLUSH_S after that to send the
    error that they are ended with; what has not been read by then is cut."""
    return uvicorn.Config(
        _CutQuietly(DirectWrites(app)),
        log_config=None,
        access_log=False,
        lifespan="off",
        server_header=False,
        timeout_graceful_shutdown=DRAIN_S + FLUSH_S,
        timeout_keep_alive=_KEEP_ALIVE_S,
    )


class _CutQuietly:
    """An application whose tasks are cancelled only when the server ends: no fault to show a traceback of."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on."""
        try:
            await self._app(scope, receive, send)
        except asyncio.CancelledError:
            _log.warning("%s %s was cut: its client did not read the end of the answer", scope["method"], scope["path"])
