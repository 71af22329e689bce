# SPDX-License-Identifier: Apache-2.0
"""The Anthropic Messages dialect, on its way out: a reply as content blocks, whole or as named events, and errors in
that API's shape. Knows no other dialect and no request.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Any

import msgspec
from starlette.responses import Response

from tokenspeed.chat.parsers import ContentDelta, Delta, ReasoningDelta, ToolCallArguments, ToolCallEnd, ToolCallStart
from tokenspeed.core.errors import ContextLengthError
from tokenspeed.server.errors import Failure
from tokenspeed.server.generation import Job, Tally
from tokenspeed.server.served import Served
from tokenspeed.server.turn import End, Reply, news_of

_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "overloaded_error",
    503: "api_error",
}
OVERLOADED = 529
_encoder = msgspec.json.Encoder()


class Usage(msgspec.Struct, frozen=True):
    """Counts that do not overlap: input_tokens were computed, the others came from the cache."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int = 0

    @classmethod
    def of(cls, tally: Tally) -> Usage:
        """The counts so far."""
        usage = tally.usage()
        cached = usage.prompt_tokens_details.cached_tokens
        return cls(usage.prompt_tokens - cached, usage.completion_tokens, cached)


class TextBlock(msgspec.Struct, frozen=True, tag="text"):
    """Text."""

    text: str


class ThinkingBlock(msgspec.Struct, frozen=True, tag="thinking"):
    """Reasoning. signature: of its text, which a client sends back with it."""

    thinking: str
    signature: str


class ToolUseBlock(msgspec.Struct, frozen=True, tag="tool_use"):
    """A call."""

    id: str
    name: str
    input: Any


ContentBlock = TextBlock | ThinkingBlock | ToolUseBlock


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """A whole answer."""

    id: str
    type: str = "message"
    role: str = "assistant"
    model: str
    content: list[ContentBlock]
    stop_reason: str | None
    stop_sequence: str | None
    usage: Usage


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A model as this API lists it."""

    type: str = "model"
    id: str
    display_name: str
    created_at: str

    @classmethod
    def of(cls, served: Served) -> ModelInfo:
        """The served one."""
        created = datetime.fromtimestamp(served.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        return cls(id=served.model_name, display_name=served.model_name, created_at=created)


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """The models there are: one."""

    data: list[ModelInfo]
    has_more: bool = False
    first_id: str
    last_id: str

    @classmethod
    def of(cls, served: Served) -> ModelList:
        """All of them."""
        return cls(data=[ModelInfo.of(served)], first_id=served.model_name, last_id=served.model_name)


class TokenCount(msgspec.Struct, frozen=True):
    """The answer of count_tokens."""

    input_tokens: int


class ErrorDetail(msgspec.Struct, frozen=True, omit_defaults=True):
    """The inner object of an error."""

    type: str
    message: str
    details: dict[str, str] | None = None


class ErrorBody(msgspec.Struct, frozen=True, tag="error"):
    """An error."""

    error: ErrorDetail


def error_of(failure: Failure) -> tuple[int, ErrorBody]:
    """A failure in this API's words: (status, body)."""
    detail, error = failure.body.error, failure.error
    status = OVERLOADED if failure.status == 429 else failure.status
    message = detail.message
    if isinstance(error, ContextLengthError):
        message = f"prompt is too long: {error.num_prompt_tokens} tokens > {error.max_model_len - 1} maximum"
    details = {"error_code": detail.code} if detail.code and detail.code.startswith("thread_") else None
    return status, ErrorBody(ErrorDetail(_KINDS.get(failure.status, "api_error"), message, details))


def error_response(failure: Failure) -> Response:
    """The HTTP answer of a failure."""
    status, body = error_of(failure)
    return Response(_encoder.encode(body), status, {"content-type": "application/json", **failure.headers})


def error_frame(failure: Failure) -> bytes:
    """The event that ends a broken stream."""
    return _frame("error", error_of(failure)[1])


async def whole_answer(served: Served, job: Job, reply: Reply) -> Answer:
    """Runs `job` to its end."""
    tally, blocks, end = Tally(), _Blocks(), End("stop")
    async with aclosing(news_of(served, job, reply, tally)) as found:
        async for news in found:
            end = news.end or end
            for delta in news.deltas:
                blocks.take(delta)
    reason, sequence = _stop(end)
    return Answer(
        id=job.request_id,
        model=served.model_name,
        content=blocks.blocks(),
        stop_reason=reason,
        stop_sequence=sequence,
        usage=Usage.of(tally),
    )


async def event_frames(served: Served, job: Job, reply: Reply) -> AsyncGenerator[bytes, None]:
    """The frames of a streamed answer."""
    tally, writer = Tally(), _EventWriter()
    has_begun = False
    async with aclosing(news_of(served, job, reply, tally)) as found:
        async for news in found:
            if not has_begun:
                has_begun = True
                yield _message_start(served, job, tally)
            for delta in news.deltas:
                for frame in writer.frames(delta):
                    yield frame
            if news.end is not None:
                for frame in writer.end(news.end, tally):
                    yield frame
    yield _frame("message_stop", {"type": "message_stop"})


def signature_of(thinking: str) -> str:
    """What a client keeps with reasoning and gives back; it proves nothing and may be checked."""
    return base64.b64encode(hashlib.sha256(thinking.encode()).digest()).decode()


class _Blocks:
    """Content blocks as they grow."""

    def __init__(self) -> None:
        self._parts: list[tuple[str, list[str], ToolCallStart | None]] = []

    def take(self, delta: Delta) -> None:
        kind = _kind_of(delta)
        if isinstance(delta, ToolCallStart):
            self._parts.append((kind, [], delta))
        elif not isinstance(delta, ToolCallEnd):
            if not self._parts or self._parts[-1][0] != kind:
                self._parts.append((kind, [], None))
            self._parts[-1][1].append(delta.text)

    def blocks(self) -> list[ContentBlock]:
        made: list[ContentBlock] = []
        for kind, texts, start in self._parts:
            text = "".join(texts)
            if kind == "thinking":
                made.append(ThinkingBlock(text, signature_of(text)))
            elif start is not None:
                made.append(ToolUseBlock(start.id, start.name, _input_of(text)))
            else:
                made.append(TextBlock(text))
        return made


class _EventWriter:
    """Named events of the blocks of one reply."""

    def __init__(self) -> None:
        self._index = -1
        self._open: str | None = None
        self._thinking: list[str] = []

    def frames(self, delta: Delta) -> Iterator[bytes]:
        """The events that one piece of a reply makes."""
        kind = _kind_of(delta)
        if kind != self._open or isinstance(delta, ToolCallStart):
            yield from self._close()
            yield self._start(kind, delta)
        if isinstance(delta, ContentDelta):
            yield self._delta({"type": "text_delta", "text": delta.text})
        elif isinstance(delta, ReasoningDelta):
            self._thinking.append(delta.text)
            yield self._delta({"type": "thinking_delta", "thinking": delta.text})
        elif isinstance(delta, ToolCallArguments):
            yield self._delta({"type": "input_json_delta", "partial_json": delta.text})
        elif isinstance(delta, ToolCallEnd):
            yield from self._close()

    def end(self, end: End, tally: Tally) -> Iterator[bytes]:
        """The last block's end, and why the reply ended."""
        yield from self._close()
        reason, sequence = _stop(end)
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        yield _frame("message_delta", {"type": "message_delta", "delta": delta, "usage": Usage.of(tally)})

    def _start(self, kind: str, delta: Delta) -> bytes:
        self._index, self._open, self._thinking = self._index + 1, kind, []
        block: dict[str, object] = {"type": kind}
        if isinstance(delta, ToolCallStart):
            block |= {"id": delta.id, "name": delta.name, "input": {}}
        else:
            block |= {"thinking": "", "signature": ""} if kind == "thinking" else {"text": ""}
        return _frame(
            "content_block_start", {"type": "content_block_start", "index": self._index, "content_block": block}
        )

    def _close(self) -> Iterator[bytes]:
        if self._open is None:
            return
        if self._open == "thinking":
            yield self._delta({"type": "signature_delta", "signature": signature_of("".join(self._thinking))})
        yield _frame("content_block_stop", {"type": "content_block_stop", "index": self._index})
        self._open = None

    def _delta(self, delta: dict[str, str]) -> bytes:
        return _frame("content_block_delta", {"type": "content_block_delta", "index": self._index, "delta": delta})


def _kind_of(delta: Delta) -> str:
    if isinstance(delta, ContentDelta):
        return "text"
    return "thinking" if isinstance(delta, ReasoningDelta) else "tool_use"


def _stop(end: End) -> tuple[str, str | None]:
    """(stop_reason, stop_sequence)."""
    known = {"tool_calls": "tool_use", "length": "max_tokens"}
    if end.reason in known:
        return known[end.reason], None
    return ("stop_sequence", end.stopped_by) if isinstance(end.stopped_by, str) else ("end_turn", None)


def _input_of(arguments: str) -> object:
    """The arguments as JSON; what was cut off is given as text, so that nothing is lost."""
    try:
        return msgspec.json.decode(arguments) if arguments.strip() else {}
    except msgspec.DecodeError:
        return {"_unparsed": arguments}


def _message_start(served: Served, job: Job, tally: Tally) -> bytes:
    message = Answer(
        id=job.request_id,
        model=served.model_name,
        content=[],
        stop_reason=None,
        stop_sequence=None,
        usage=msgspec.structs.replace(Usage.of(tally), output_tokens=0),
    )
    return _frame("message_start", {"type": "message_start", "message": message})


def _frame(name: str, data: object) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + _encoder.encode(data) + b"\n\n"
