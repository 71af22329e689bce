# SPDX-License-Identifier: Apache-2.0
"""The OpenAPI 3.1 document of the server, made from its route table and from the structs that its handlers read and
write. Knows no dialect and no single route: what a handler does is said where the handler is.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
from starlette.responses import Response

Handler = Callable[..., Awaitable[Response]]
Table = Iterable[tuple[str, str, Callable[..., object]]]
"""Rows of (method, path, handler)."""

_REF = "#/components/schemas/{name}"
_MODULES = "tokenspeed.server."
_REASONS = {
    400: "The request is wrong; the message names the field.",
    401: "The API key is missing or wrong.",
    404: "There is nothing of that name.",
    413: "The body is too large.",
    429: "Too many requests wait; retry after the seconds of Retry-After.",
    500: "The server failed; its log says how.",
    503: "The engine has ended and is started again; retry after the seconds of Retry-After.",
    529: "Too many requests wait; retry after the seconds of Retry-After.",
}


@dataclass(frozen=True, slots=True)
class Operation:
    """What a handler does. answer: a struct, several where the asker chooses, or a media type. events: what each event
    of a streamed answer holds, as a struct or in words. failures: the statuses that this operation alone has."""

    summary: str
    body: type[msgspec.Struct] | None = None
    answer: type[msgspec.Struct] | tuple[type[msgspec.Struct], ...] | str | None = None
    events: type[msgspec.Struct] | str | None = None
    example: Mapping[str, object] | None = None
    failures: tuple[int, ...] = ()

    def of(self, handler: Handler) -> Described:
        """Decorates a handler."""
        return Described(handler, self)

    def structs(self) -> list[type[msgspec.Struct]]:
        """All that the document has to explain."""
        answers = self.answer if isinstance(self.answer, tuple) else (self.answer,)
        return [each for each in (self.body, *answers, self.events) if each is not None and not isinstance(each, str)]


@dataclass(frozen=True, slots=True)
class Described:
    """A handler with what is said of it."""

    handler: Handler
    operation: Operation

    async def __call__(self, *arguments: Any) -> Response:
        """The handler's answer."""
        return await self.handler(*arguments)


def operation_of(handler: Callable[..., object]) -> Operation | None:
    """What was said of a handler, the first arguments of which may be bound; None when nothing was."""
    while isinstance(handler, partial):
        handler = handler.func
    return handler.operation if isinstance(handler, Described) else None


@dataclass(frozen=True, slots=True)
class Rules:
    """What holds for all routes. error_of: the struct of a path's errors. busy_of: the status when too many wait.
    open_paths: those that need no key. has_key: whether the others do."""

    error_of: Callable[[str], type[msgspec.Struct]]
    busy_of: Callable[[str], int]
    open_paths: frozenset[str]
    has_key: bool


def document(table: Table, rules: Rules, version: str) -> dict[str, Any]:
    """The document, ready to be encoded. A handler of which nothing was said appears with its path alone."""
    rows = [(method, path, operation_of(handler) or Operation(path)) for method, path, handler in table]
    structs = list(dict.fromkeys(each for _, path, row in rows for each in (*row.structs(), rules.error_of(path))))
    refs, components = msgspec.json.schema_components(structs, ref_template=_REF)
    schemas = dict(zip(structs, refs, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for method, path, operation in rows:
        entry = _Entry(method, path, operation, rules, schemas)
        paths.setdefault(_plain(path), {})[method.lower()] = entry.written()
    made = {
        "openapi": "3.1.0",
        "info": {
            "title": "TokenSpeed",
            "version": version,
            "description": "Three dialects around one pipeline. Fields that are not listed here are ignored.",
        },
        "servers": [{"url": "/"}],
        "security": [{"bearer": []}, {"x-api-key": []}] if rules.has_key else [],
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": _SCHEMES},
    }
    return _with_short_names(made)


_SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}


@dataclass(frozen=True, slots=True)
class _Entry:
    """One operation as the document has it."""

    method: str
    path: str
    operation: Operation
    rules: Rules
    schemas: Mapping[type[msgspec.Struct], Mapping[str, Any]]

    def written(self) -> dict[str, Any]:
        operation = self.operation
        segments = [segment for segment in _plain(self.path).split("/") if segment]
        written: dict[str, Any] = {
            "operationId": "_".join([self.method.lower(), *(re.sub(r"\W", "", segment) for segment in segments)]),
            "summary": operation.summary,
            "tags": ["/" + "/".join(segments[:2]) if segments[:1] == ["v1"] else "server"],
            "responses": {"200": self._answer(), **self._failures()},
        }
        names = re.findall(r"{(\w+)", self.path)
        if names:
            written["parameters"] = [
                {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
            ]
        if operation.body is not None:
            content: dict[str, Any] = {"schema": self.schemas[operation.body]}
            if operation.example is not None:
                content["example"] = dict(operation.example)
            written["requestBody"] = {"required": True, "content": {"application/json": content}}
        if self.path in self.rules.open_paths:
            written["security"] = []
        return written

    def _answer(self) -> dict[str, Any]:
        answer, events = self.operation.answer, self.operation.events
        content: dict[str, Any] = {}
        if isinstance(answer, str):
            content[answer] = {"schema": {"type": "object" if answer.endswith("json") else "string"}}
        elif isinstance(answer, tuple):
            content["application/json"] = {"schema": {"anyOf": [self.schemas[each] for each in answer]}}
        elif answer is not None:
            content["application/json"] = {"schema": self.schemas[answer]}
        if events is not None:
            stream: dict[str, Any] = {}  # no type: to some readers it describes the stream, to others one event
            if isinstance(events, str):
                stream["description"] = events
            else:
                stream["description"] = "Events whose data is what x-event says, then one whose data is [DONE]."
                stream["x-event"] = self.schemas[events]
            content["text/event-stream"] = {"schema": stream}
        return {"description": "Done." if content else "Nothing but the status.", **_if_any("content", content)}

    def _failures(self) -> dict[str, Any]:
        operation, path = self.operation, self.path
        statuses = set(operation.failures)
        if operation.body is not None:
            statuses |= {400, 404, 413, self.rules.busy_of(path), 500, 503}
        if "{" in path:
            statuses.add(404)
        if self.rules.has_key and path not in self.rules.open_paths:
            statuses.add(401)
        is_text = operation.answer == "text/plain"
        schema = {"type": "string"} if is_text else self.schemas[self.rules.error_of(path)]
        content = {"text/plain" if is_text else "application/json": {"schema": schema}}
        return {str(status): {"description": _REASONS[status], "content": content} for status in sorted(statuses)}


def _plain(path: str) -> str:
    """Without the converters of Starlette."""
    return re.sub(r"{(\w+):\w+}", r"{\1}", path)


def _if_any(name: str, value: dict[str, Any]) -> dict[str, Any]:
    return {name: value} if value else {}


def _with_short_names(made: dict[str, Any]) -> dict[str, Any]:
    """Structs of one name in two modules are told apart by their module; its package adds nothing."""
    return msgspec.json.decode(msgspec.json.encode(made).replace(_MODULES.encode(), b""), type=dict[str, Any])
