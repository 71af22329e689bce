# SPDX-License-Identifier: Apache-2.0
"""The OpenAI Responses dialect, on its way out: a reply as output items, whole or as named events. Knows no other
dialect; the request only as far as an answer repeats it.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any

import msgspec

from tokenspeed.chat.parsers import ContentDelta, Delta, ReasoningDelta, ToolCallEnd, ToolCallStart
from tokenspeed.core.errors import RequestError
from tokenspeed.server.errors import Failure, failure_of
from tokenspeed.server.generation import Job, Tally
from tokenspeed.server.openai_responses import ENCRYPTED_REASONING, Asked, sealed
from tokenspeed.server.responses_store import Item, ResponsesStore
from tokenspeed.server.responses_tools import CUSTOM, CUSTOM_FIELD, FUNCTION, Origin
from tokenspeed.server.served import Served
from tokenspeed.server.turn import End, Reply, news_of

Event = dict[str, Any]
"""An event of a stream, without its number."""

_IN_PROGRESS, _COMPLETED, _INCOMPLETE = "in_progress", "completed", "incomplete"
_FAILED, _CANCELLED = "failed", "cancelled"
_encoder = msgspec.json.Encoder()
_log = logging.getLogger(__name__)


class InputDetails(msgspec.Struct, frozen=True):
    """Part of Usage."""

    cached_tokens: int


class OutputDetails(msgspec.Struct, frozen=True):
    """Part of Usage."""

    reasoning_tokens: int


class Usage(msgspec.Struct, frozen=True):
    """Token counts."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ErrorDetail(msgspec.Struct, frozen=True):
    """Why a response failed."""

    code: str
    message: str


class IncompleteDetails(msgspec.Struct, frozen=True):
    """Why a response is incomplete."""

    reason: str


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """A response, whole or as far as it is."""

    id: str
    object: str = "response"
    created_at: int
    completed_at: int | None
    status: str
    background: bool = False
    error: ErrorDetail | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, Any]
    model: str
    output: list[Item]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: dict[str, str | None]
    safety_identifier: str | None
    service_tier: str = "default"
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str
    tools: list[dict[str, Any]]
    top_p: float
    truncation: str
    usage: Usage | None
    user: str | None


class TokenCount(msgspec.Struct, frozen=True):
    """The answer of /v1/responses/input_tokens."""

    input_tokens: int
    object: str = "response.input_tokens"


class Deleted(msgspec.Struct, frozen=True):
    """The answer of DELETE."""

    id: str
    object: str = "response"
    deleted: bool = True


class Answering:
    """One response while it is made. Stored from its first token on, unless the request says otherwise."""

    def __init__(self, served: Served, job: Job, asked: Asked, store: ResponsesStore) -> None:
        self._served, self._job, self._asked = served, job, asked
        self._store = store if asked.body.store is not False else None
        self._tally = Tally()
        self._items = _Items(asked)
        self._created_at = int(time.time())
        self._completed_at: int | None = None
        self._status = _IN_PROGRESS
        self._usage: Usage | None = None
        self._error: ErrorDetail | None = None
        self._has_begun, self._is_stopped, self._num_frames = False, False, 0

    async def whole(self, reply: Reply) -> Answer:
        """Runs the job to its end."""
        async with aclosing(self._events(reply)) as events:
            async for _ in events:
                pass
        return self._answer()

    async def frames(self, reply: Reply) -> AsyncGenerator[bytes, None]:
        """The frames of a streamed answer. What breaks after the first is told in it."""
        try:
            async with aclosing(self._events(reply)) as events:
                async for event in events:
                    yield self._frame(event)
        except Exception as error:
            if not self._has_begun:
                raise
            failure = failure_of(error)
            if failure.is_bug:
                _log.exception("%s failed", self._job.request_id)
            yield self.error_frame(failure)
            yield self._frame({"type": "response.failed", "response": self._answer()})

    def error_frame(self, failure: Failure) -> bytes:
        """The event that says what broke a stream."""
        detail = failure.body.error
        fields = {"code": detail.code, "message": detail.message, "param": detail.param}
        return self._frame({"type": "error", **fields})

    async def _events(self, reply: Reply) -> AsyncGenerator[Event, None]:
        end = End("abort")
        try:
            async with aclosing(news_of(self._served, self._job, reply, self._tally)) as found:
                async for news in found:
                    if not self._has_begun:
                        self._begin()
                        yield {"type": "response.created", "response": self._answer()}
                        yield {"type": "response.in_progress", "response": self._answer()}
                    if self._is_stopped:
                        break
                    for delta in news.deltas:
                        for event in self._items.take(delta):
                            yield event
                    end = news.end or end
            is_whole = end.reason in ("stop", "tool_calls") and not self._is_stopped
            for event in self._items.close(_COMPLETED if is_whole else _INCOMPLETE):
                yield event
            is_cut = end.reason == "length" and not self._is_stopped
            await self._finish(_COMPLETED if is_whole else _INCOMPLETE if is_cut else _CANCELLED)
            yield {"type": f"response.{_COMPLETED if is_whole else _INCOMPLETE}", "response": self._answer()}
        except Exception as error:
            name_input(error)
            self._error = ErrorDetail("server_error", failure_of(error).body.error.message)
            self._keep(_FAILED)
            raise
        finally:
            if self._status == _IN_PROGRESS:
                self._keep(_CANCELLED)

    def _begin(self) -> None:
        self._has_begun = True
        if self._store is not None:
            body = _encoder.encode(self._answer())
            self._store.begin(self._job.request_id, body, self._asked.history, self._stop)

    async def _finish(self, status: str) -> None:
        self._usage = await usage_of(self._served, self._tally, self._items.reasoning())
        self._completed_at = int(time.time()) if status == _COMPLETED else None
        self._keep(status)

    def _keep(self, status: str) -> None:
        """The status from now on, for those who ask later too."""
        self._status = status
        if self._store is not None and self._has_begun:
            self._store.finish(self._job.request_id, _encoder.encode(self._answer()), self._items.done)

    def _stop(self) -> bytes:
        """Ends the reply at its next token; the response as it will be."""
        self._is_stopped = True
        return _encoder.encode(msgspec.structs.replace(self._answer(), status=_CANCELLED))

    def _answer(self) -> Answer:
        body, params = self._asked.body, self._job.params
        effort, summary = (body.reasoning.effort, body.reasoning.summary) if body.reasoning else (None, None)
        verbosity = body.text.verbosity if body.text is not None else None
        asked_format = body.text.format if body.text is not None else None
        return Answer(
            id=self._job.request_id,
            created_at=self._created_at,
            completed_at=self._completed_at,
            status=self._status,
            error=self._error,
            incomplete_details=IncompleteDetails("max_output_tokens") if self._status == _INCOMPLETE else None,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            metadata=body.metadata or {},
            model=self._served.model_name,
            output=list(self._items.done),
            parallel_tool_calls=body.parallel_tool_calls is not False,
            previous_response_id=body.previous_response_id,
            prompt_cache_key=body.prompt_cache_key,
            reasoning={"effort": effort, "summary": summary},
            safety_identifier=body.safety_identifier,
            store=self._store is not None,
            temperature=params.temperature,
            text={"format": asked_format or {"type": "text"}, **({"verbosity": verbosity} if verbosity else {})},
            tool_choice=body.tool_choice or "auto",
            tools=body.tools or [],
            top_p=params.top_p,
            truncation=body.truncation or "disabled",
            usage=self._usage,
            user=body.user,
        )

    def _frame(self, event: Event) -> bytes:
        data = _encoder.encode({**event, "sequence_number": self._num_frames})
        self._num_frames += 1
        return b"event: " + str(event["type"]).encode() + b"\ndata: " + data + b"\n\n"


def name_input(error: Exception) -> None:
    """Let an error about a conversation name it as this API does."""
    if isinstance(error, RequestError) and error.param == "messages":
        error.param = "input"


async def usage_of(served: Served, tally: Tally, reasoning: str) -> Usage:
    """The counts of a reply that thought this."""
    usage, num_reasoning = tally.usage(), 0
    if reasoning:
        ids = await asyncio.to_thread(served.llm.tokenizer.encode, reasoning, add_special_tokens=False)
        num_reasoning = min(len(ids), usage.completion_tokens)
    return Usage(
        usage.prompt_tokens,
        InputDetails(usage.prompt_tokens_details.cached_tokens),
        usage.completion_tokens,
        OutputDetails(num_reasoning),
        usage.total_tokens,
    )


class _Items:
    """Output items as they grow, and the events that tell of it. done: those that are over."""

    def __init__(self, asked: Asked) -> None:
        self.done: list[Item] = []
        self._toolbox = asked.toolbox
        self._seals = ENCRYPTED_REASONING in (asked.body.include or ())
        self._open: _Open | None = None
        self._reasoning: list[str] = []

    def take(self, delta: Delta) -> Iterator[Event]:
        """The events that one piece of a reply makes."""
        if isinstance(delta, ToolCallEnd):
            yield from self.close(_COMPLETED if delta.complete else _INCOMPLETE)
            return
        if isinstance(delta, ToolCallStart):
            yield from self._begin(_Call(delta.id, self._toolbox.origin(delta.name)))
            return
        if isinstance(delta, ContentDelta) and not isinstance(self._open, _Message):
            yield from self._begin(_Message())
        elif isinstance(delta, ReasoningDelta) and not isinstance(self._open, _Reasoning):
            yield from self._begin(_Reasoning(self._seals))
        if isinstance(delta, ReasoningDelta):
            self._reasoning.append(delta.text)
        assert self._open is not None, delta
        yield from self._open.more(delta.text)

    def close(self, status: str) -> Iterator[Event]:
        """The end of the item that is open, if one is."""
        if self._open is None:
            return
        yield from self._open.end()
        item = self._open.item(status)
        index, self._open = self._open.index, None
        self.done.append(item)
        yield {"type": "response.output_item.done", "output_index": index, "item": item}

    def reasoning(self) -> str:
        """All that was thought."""
        return "".join(self._reasoning)

    def _begin(self, item: _Open) -> Iterator[Event]:
        yield from self.close(_COMPLETED)
        item.index = len(self.done)
        self._open = item
        yield {"type": "response.output_item.added", "output_index": item.index, "item": item.item(_IN_PROGRESS)}
        yield from item.begin()


class _Open:
    """An item that grows. index: its place in the output."""

    prefix = ""

    def __init__(self) -> None:
        self.index = 0
        self.id = f"{self.prefix}_{uuid.uuid4().hex}"
        self._texts: list[str] = []

    @property
    def text(self) -> str:
        """All of it so far."""
        return "".join(self._texts)

    def begin(self) -> Iterator[Event]:
        """What follows the item's announcement."""
        yield from ()

    def more(self, text: str) -> Iterator[Event]:
        """More of its text."""
        self._texts.append(text)
        yield from ()

    def end(self) -> Iterator[Event]:
        """What comes before the item is said to be done."""
        yield from ()

    def item(self, status: str) -> Item:
        """The item, empty while in progress."""
        raise NotImplementedError

    def event(self, name: str, /, **fields: object) -> Event:
        """An event about this item."""
        return {"type": f"response.{name}", "item_id": self.id, "output_index": self.index, **fields}


class _Message(_Open):
    """Text of the assistant."""

    prefix = "msg"

    def begin(self) -> Iterator[Event]:
        yield self.event("content_part.added", content_index=0, part=_text_part(""))

    def more(self, text: str) -> Iterator[Event]:
        self._texts.append(text)
        yield self.event("output_text.delta", content_index=0, delta=text, logprobs=[])

    def end(self) -> Iterator[Event]:
        yield self.event("output_text.done", content_index=0, text=self.text, logprobs=[])
        yield self.event("content_part.done", content_index=0, part=_text_part(self.text))

    def item(self, status: str) -> Item:
        content = [] if status == _IN_PROGRESS else [_text_part(self.text)]
        return {"id": self.id, "type": "message", "status": status, "role": "assistant", "content": content}


class _Reasoning(_Open):
    """Reasoning, all of it given as its one summary."""

    prefix = "rs"

    def __init__(self, seals: bool) -> None:
        super().__init__()
        self._seals = seals

    def begin(self) -> Iterator[Event]:
        yield self.event("reasoning_summary_part.added", summary_index=0, part=_summary_part(""))

    def more(self, text: str) -> Iterator[Event]:
        self._texts.append(text)
        yield self.event("reasoning_summary_text.delta", summary_index=0, delta=text)

    def end(self) -> Iterator[Event]:
        yield self.event("reasoning_summary_text.done", summary_index=0, text=self.text)
        yield self.event("reasoning_summary_part.done", summary_index=0, part=_summary_part(self.text))

    def item(self, status: str) -> Item:
        is_over = status != _IN_PROGRESS
        item: Item = {"id": self.id, "type": "reasoning", "status": status}
        item["summary"] = [_summary_part(self.text)] if is_over else []
        if self._seals and is_over:
            item["encrypted_content"] = sealed(self.text)
        return item


class _Call(_Open):
    """A call, said as its tool wants it."""

    def __init__(self, call_id: str, origin: Origin) -> None:
        self.prefix = {FUNCTION: "fc", CUSTOM: "ctc"}.get(origin.kind, "tsc")
        super().__init__()
        self._call_id, self._origin = call_id, origin

    def more(self, text: str) -> Iterator[Event]:
        self._texts.append(text)
        if self._origin.kind == FUNCTION:
            yield self.event("function_call_arguments.delta", delta=text)

    def end(self) -> Iterator[Event]:
        if self._origin.kind == FUNCTION:
            arguments = self.text or "{}"
            yield self.event("function_call_arguments.done", name=self._origin.name, arguments=arguments)
        elif self._origin.kind == CUSTOM:
            text = self._custom_input()
            yield self.event("custom_tool_call_input.delta", delta=text)
            yield self.event("custom_tool_call_input.done", input=text)

    def item(self, status: str) -> Item:
        is_over, origin = status != _IN_PROGRESS, self._origin
        item: Item = {"id": self.id, "type": f"{origin.kind}_call", "status": status, "call_id": self._call_id}
        if origin.kind == FUNCTION:
            item |= {"name": origin.name, "arguments": (self.text or "{}") if is_over else ""}
        elif origin.kind == CUSTOM:
            item |= {"type": "custom_tool_call", "name": origin.name, "input": self._custom_input() if is_over else ""}
        else:
            item |= {"execution": "client", "arguments": _object(self.text) if is_over else {}}
        return item if origin.namespace is None else {**item, "namespace": origin.namespace}

    def _custom_input(self) -> str:
        """The one string of the arguments; what is not of that form is given as it is, so that nothing is lost."""
        found = _object(self.text).get(CUSTOM_FIELD)
        return found if isinstance(found, str) else self.text


def _object(text: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError:
        return {}


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _summary_part(text: str) -> dict[str, Any]:
    return {"type": "summary_text", "text": text}
