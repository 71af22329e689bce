# SPDX-License-Identifier: Apache-2.0
"""A name for every answer, errors included, so that a client and the log can speak of the same request.

A client that names its request in x-request-id gets that name back; else the endpoint's own name, or a fresh one. Knows
headers; knows no endpoint.
"""

from __future__ import annotations

import logging
import re
import uuid

from starlette.types import ASGIApp, Message, Receive, Scope, Send

_NAME, _ANTHROPIC_NAME, _ANTHROPIC_PATH = b"x-request-id", b"request-id", "/v1/messages"
_SENSIBLE = re.compile(rb"[A-Za-z0-9][A-Za-z0-9._:/+=@-]{0,127}")
_log = logging.getLogger(__name__)


class RequestIds:
    """ASGI middleware, the outermost one. Clients of the Messages API look for request-id instead."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, with the name in the head of the answer."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        asked = _asked(scope)

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                _put_name(scope, message, asked)
            await send(message)

        await self._app(scope, receive, named)


def _asked(scope: Scope) -> bytes | None:
    """The client's own name, when it is one that can be sent back and logged as it is."""
    given = next((value for name, value in scope["headers"] if name == _NAME), b"")
    return given if _SENSIBLE.fullmatch(given) else None


def _put_name(scope: Scope, message: Message, asked: bytes | None) -> None:
    headers = [(name.lower(), value) for name, value in message.get("headers", ())]
    own = next((value for name, value in headers if name in (_NAME, _ANTHROPIC_NAME)), None)
    if asked is not None and own is not None:
        _log.debug("%s is the client's %s", own.decode("latin-1"), asked.decode("ascii"))
    chosen = asked or own or f"req_{uuid.uuid4().hex}".encode()
    rest = [(name, value) for name, value in headers if name not in (_NAME, _ANTHROPIC_NAME)]
    names = [_NAME]
    if scope["path"].startswith(_ANTHROPIC_PATH) or any(name == b"anthropic-version" for name, _ in scope["headers"]):
        names.append(_ANTHROPIC_NAME)
    message["headers"] = [*rest, *((name, chosen) for name in names)]
