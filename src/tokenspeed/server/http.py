# SPDX-License-Identifier: Apache-2.0
"""The HTTP server and the event loop that it runs on. Knows no engine and no endpoint."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import uvicorn
from starlette.types import ASGIApp

from tokenspeed.server.sse import DirectWrites

T = TypeVar("T")

DRAIN_S = 10
_KEEP_ALIVE_S = 75  # longer than clients keep idle connections, so that they never meet a closing one


def run(work: Coroutine[Any, Any, T]) -> T:
    """The result of `work` on an event loop of the kind that serves."""
    return asyncio.run(work)


def http_config(app: ASGIApp) -> uvicorn.Config:
    """How `app` is served. Running requests have DRAIN_S to finish when it ends."""
    return uvicorn.Config(
        DirectWrites(app),
        log_config=None,
        access_log=False,
        lifespan="off",
        server_header=False,
        timeout_graceful_shutdown=DRAIN_S,
        timeout_keep_alive=_KEEP_ALIVE_S,
    )
