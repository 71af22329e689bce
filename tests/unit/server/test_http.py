# SPDX-License-Identifier: Apache-2.0
"""The HTTP server's own end: what a client never reads is cut, and said in one line."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send

from tokenspeed.server import http

HEAD = b"GET /slow HTTP/1.1\r\nhost: x\r\n\r\n"


@pytest.mark.parametrize("starts", [True, False])
def test_what_is_not_read_by_the_end_is_cut_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, starts: bool
) -> None:
    monkeypatch.setattr(http, "DRAIN_S", 0.1)
    monkeypatch.setattr(http, "FLUSH_S", 0.1)
    asked = asyncio.Event()

    async def endless(scope: Scope, _: Receive, send: Send) -> None:
        if starts:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        asked.set()
        await asyncio.Event().wait()

    async def run(sock: socket.socket) -> None:
        server = uvicorn.Server(http.http_config(endless))
        serving = asyncio.ensure_future(server._serve([sock]))
        _, writer = await asyncio.open_connection(*sock.getsockname())
        writer.write(HEAD)
        await asyncio.wait_for(asked.wait(), 10.0)
        server.should_exit = True
        await asyncio.wait_for(serving, 10.0)
        await asyncio.sleep(0.1)
        writer.close()

    with caplog.at_level(logging.INFO), contextlib.closing(socket.create_server(("127.0.0.1", 0))) as sock:
        asyncio.run(run(sock))
    assert "GET /slow was cut" in caplog.text
    assert not [record for record in caplog.records if record.exc_info]
