# SPDX-License-Identifier: Apache-2.0
"""The OpenAI chat dialect: body → neutral conversation, outputs → answer or chunks. Knows no other dialect."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Any

import msgspec

from tokenspeed.chat import parsers
from tokenspeed.chat.parsers import ContentDelta, ReasoningDelta, ToolCallArguments, ToolCallEnd, ToolCallStart
from tokenspeed.core.errors import InvalidRequestError
from tokenspeed.core.request import SamplingParams
from tokenspeed.llm.outputs import LogprobEntry
from tokenspeed.llm.sampling import INT32_MAX, LOGPROBS_MAX
from tokenspeed.server.chat import ROLES, Conversation, Message, ToolCall
from tokenspeed.server.fields import Nothing, Refused, at_least_one, one_of, within
from tokenspeed.server.formats import Form, form_of, format_form
from tokenspeed.server.generation import Job, Tally, Usage
from tokenspeed.server.openai_logprobs import ChatLogprobs, PromptLogprob, chat_logprobs, prompt_logprobs
from tokenspeed.server.sampling import (
    SamplingFields,
    request_priority,
    sampling_params,
    thinking_budget,
    under_its_name,
)
from tokenspeed.server.served import Served, ServedLLM
from tokenspeed.server.sse import DONE, data_frame, data_text
from tokenspeed.server.tool_choice import read_tool_choice
from tokenspeed.server.turn import End, News, Reply, TextNews, news_of

# What the request itself says to the template.
_OWN_TEMPLATE_NAMES = ("self", "messages", "tools", "add_generation_prompt")
_TEXT_PARTS = ("text", "input_text", "output_text")
_OTHER_ROLES = {"developer": "system", "function": "tool"}


class ContentPart(msgspec.Struct):
    """A part of a message's content."""

    type: Annotated[str, one_of(*_TEXT_PARTS)]
    text: str | None = None


class FunctionCall(msgspec.Struct):
    """Name and arguments of a call in the history."""

    name: str
    arguments: Any = ""


class ToolCallField(msgspec.Struct):
    """A call in the history."""

    function: FunctionCall


class MessageField(msgspec.Struct):
    """One message of the body."""

    role: Annotated[str, one_of(*ROLES, *_OTHER_ROLES)]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCallField] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class ChatBody(SamplingFields, kw_only=True):
    """The body of /v1/chat/completions."""

    messages: Annotated[list[MessageField], at_least_one()]
    max_completion_tokens: Annotated[int | None, within(1, INT32_MAX)] = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, within(0, LOGPROBS_MAX)] = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    functions: Annotated[list[Any] | None, one_of(None, [])] = None
    function_call: Refused = None
    add_generation_prompt: bool | None = None
    continue_final_message: Nothing = None
    chat_template_kwargs: dict[str, Any] | None = None
    session_id: str | None = None
    prompt_cache_key: str | None = None
    reasoning_effort: str | None = None
    thinking_token_budget: Annotated[int | None, within(0, INT32_MAX)] = None
    enable_thinking: bool | None = None


class CalledFunction(msgspec.Struct, frozen=True, omit_defaults=True):
    """Name and arguments of a call, or what a chunk adds to them."""

    name: str | None = None
    arguments: str = ""


class ToolCallAnswer(msgspec.Struct, frozen=True):
    """A call of a whole answer."""

    id: str
    type: str
    function: CalledFunction


class AnswerMessage(msgspec.Struct, frozen=True):
    """The message of a choice. reasoning: the same as reasoning_content, under the name that some clients read."""

    role: str
    content: str | None
    refusal: None = None
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    reasoning: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[ToolCallAnswer] | msgspec.UnsetType = msgspec.UNSET


class AnswerChoice(msgspec.Struct, frozen=True):
    """A choice of a whole answer."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """A whole answer."""

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[AnswerChoice]
    usage: Usage
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | msgspec.UnsetType = msgspec.UNSET


class ToolCallDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a chunk adds to a call: its id and name, then pieces of its arguments."""

    index: int
    id: str | None = None
    type: str | None = None
    function: CalledFunction | None = None

    @classmethod
    def of(cls, delta: ToolCallStart | ToolCallArguments) -> ToolCallDelta:
        """A parser's delta."""
        if isinstance(delta, ToolCallStart):
            return cls(delta.index, delta.id, "function", CalledFunction(delta.name))
        return cls(delta.index, function=CalledFunction(arguments=delta.text))


class Delta(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a chunk adds to the message."""

    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChunkChoice(msgspec.Struct, frozen=True):
    """A choice of a chunk."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | msgspec.UnsetType | None = msgspec.UNSET


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """A chunk of a streamed answer."""

    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET


def read_conversation(body: ChatBody, llm: ServedLLM) -> Conversation:
    """The neutral conversation. Raises InvalidRequestError that names the field."""
    _refuse_old_forms(body)
    if not body.messages:
        raise InvalidRequestError("messages is empty; send at least one message", "messages")
    return Conversation(
        messages=tuple(_message(index, message) for index, message in enumerate(body.messages)),
        tools=tuple(_tool(index, tool) for index, tool in enumerate(body.tools or [])),
        params=_params(body, llm),
        add_generation_prompt=body.add_generation_prompt is not False,
        template_kwargs=_template_kwargs(body),
        priority=request_priority(body),
        choice=read_tool_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls is not False,
        form=_form(body),
        thinking_budget=thinking_budget(body.thinking_token_budget, "thinking_token_budget"),
    )


async def whole_answer(served: Served, job: Job, reply: Reply, body: ChatBody) -> Answer:
    """Runs `job` to its end."""
    tally, choices, first = Tally(), [_Choice() for _ in range(job.num_choices)], None
    async with aclosing(news_of(served, job, reply, tally)) as found:
        async for news in found:
            first = first or news.output
            choices[news.choice].take(news)
    answer = Answer(
        id=job.request_id,
        created=int(time.time()),
        model=served.model_name,
        choices=[choice.answer(index, body) for index, choice in enumerate(choices)],
        usage=tally.usage(),
    )
    if first is None or first.prompt_logprobs is None:
        return answer
    return msgspec.structs.replace(answer, prompt_logprobs=prompt_logprobs(first.prompt_logprobs))


async def chunk_frames(served: Served, job: Job, reply: Reply, body: ChatBody) -> AsyncGenerator[bytes, None]:
    """The frames of a streamed answer: roles, deltas, finishes, usage when asked for, [DONE]."""
    writer = _ChunkWriter(served, job, body)
    has_begun, text_news = False, TextNews()
    async with aclosing(news_of(served, job, reply, writer.tally, text_news)) as found:
        async for news in found:
            if not has_begun:
                has_begun = True
                yield writer.roles(job.num_choices)
            frames = writer.frames(news)
            if frames:
                yield frames
            while (delta := await text_news.next()) is not None:
                yield writer.text_frame(delta)
    if writer.wants_usage:
        yield writer.usage_frame()
    yield DONE


class _ChunkWriter:
    """Makes the chunks of one answer."""

    def __init__(self, served: Served, job: Job, body: ChatBody) -> None:
        options = body.stream_options
        self.tally = Tally()
        self.wants_usage = options is not None and bool(options.include_usage)
        self._usage_in_each = options is not None and bool(options.continuous_usage_stats)
        self._id, self._created, self._model = job.request_id, int(time.time()), served.model_name
        self._num_top = body.top_logprobs or 0 if body.logprobs else None
        self._is_plain = self._num_top is None and not self._usage_in_each
        self._around: dict[int, tuple[bytes, bytes]] = {}

    def roles(self, num_choices: int) -> bytes:
        """The first chunk of each choice."""
        chunks = [self.frame([ChunkChoice(index, Delta(role="assistant", content=""))]) for index in range(num_choices)]
        return b"".join(chunks)

    def frames(self, news: News) -> bytes:
        """The chunks that say what is new of one choice; maybe none."""
        if self._is_plain and news.end is None and len(news.deltas) == 1:
            (delta,) = news.deltas
            if isinstance(delta, ContentDelta):
                return self.text_frame(delta, news.choice)
        return b"".join([self.frame([choice]) for choice in self._choices(news)])

    def text_frame(self, delta: parsers.Delta, choice: int = 0) -> bytes:
        """The chunk of a delta that has no log-probabilities."""
        if self._is_plain and isinstance(delta, ContentDelta):
            before, after = self._around.get(choice) or self._content_frame(choice)
            return before + data_text(delta.text) + after
        return self.frame([ChunkChoice(choice, _delta(delta) or Delta())])

    def _content_frame(self, choice: int) -> tuple[bytes, bytes]:
        """What stands before and after the text in a chunk of content, which is the same in each of them."""
        place = uuid.uuid4().hex
        before, after = self.frame([ChunkChoice(choice, Delta(content=place))]).split(data_text(place))
        self._around[choice] = before, after
        return before, after

    def _choices(self, news: News) -> list[ChunkChoice]:
        """What is new of one choice: deltas, an end, both or nothing. Log-probabilities go with the first delta, or
        alone while the text is withheld."""
        made = [ChunkChoice(news.choice, delta) for delta in map(_delta, news.deltas) if delta is not None]
        if self._num_top is not None and (made or news.logprobs):
            first = made[0] if made else ChunkChoice(news.choice, Delta())
            logprobs = chat_logprobs(news.logprobs, self._num_top)
            made[:1] = [msgspec.structs.replace(first, logprobs=logprobs)]
        if news.end is not None:
            made.append(ChunkChoice(news.choice, Delta(), None, news.end.reason, news.end.stopped_by))
        return made

    def frame(self, choices: list[ChunkChoice]) -> bytes:
        """One chunk."""
        usage = self.tally.usage() if self._usage_in_each else None if self.wants_usage else msgspec.UNSET
        return data_frame(self._chunk(choices, usage))

    def usage_frame(self) -> bytes:
        """The chunk without choices that carries the counts."""
        return data_frame(self._chunk([], self.tally.usage()))

    def _chunk(self, choices: list[ChunkChoice], usage: Usage | msgspec.UnsetType | None) -> Chunk:
        return Chunk(id=self._id, created=self._created, model=self._model, choices=choices, usage=usage)


class _Choice:
    """A choice put together from its news."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[tuple[ToolCallStart, list[str]]] = []
        self._logprobs: list[LogprobEntry] = []
        self._end: End | None = None

    def take(self, news: News) -> None:
        self._logprobs += news.logprobs
        self._end = news.end or self._end
        for delta in news.deltas:
            if isinstance(delta, ContentDelta):
                self._content.append(delta.text)
            elif isinstance(delta, ReasoningDelta):
                self._reasoning.append(delta.text)
            elif isinstance(delta, ToolCallStart):
                self._calls.append((delta, []))
            elif isinstance(delta, ToolCallArguments):
                self._calls[-1][1].append(delta.text)

    def answer(self, index: int, body: ChatBody) -> AnswerChoice:
        logprobs = chat_logprobs(self._logprobs, body.top_logprobs or 0) if body.logprobs else None
        end = self._end or End("abort")
        return AnswerChoice(index, self._message(), logprobs, end.reason, end.stopped_by)

    def _message(self) -> AnswerMessage:
        content, reasoning = "".join(self._content), "".join(self._reasoning) or msgspec.UNSET
        calls = [
            ToolCallAnswer(start.id, "function", CalledFunction(start.name, "".join(texts)))
            for start, texts in self._calls
        ]
        shown = None if calls and not content else content
        return AnswerMessage("assistant", shown, None, reasoning, reasoning, calls or msgspec.UNSET)


def _delta(delta: parsers.Delta) -> Delta | None:
    """A parser's delta on the wire; the end of a call is not said."""
    if isinstance(delta, ContentDelta):
        return Delta(content=delta.text)
    if isinstance(delta, ReasoningDelta):
        return Delta(reasoning_content=delta.text, reasoning=delta.text)
    return None if isinstance(delta, ToolCallEnd) else Delta(tool_calls=[ToolCallDelta.of(delta)])


def _form(body: ChatBody) -> Form | None:
    asked, also = format_form(body.response_format, "response_format"), form_of(body)
    if asked is not None and also is not None:
        raise InvalidRequestError("response_format and another field each ask for a form; send one", "response_format")
    return asked or also


def _refuse_old_forms(body: ChatBody) -> None:
    for name in ("functions", "function_call"):
        if getattr(body, name):
            raise InvalidRequestError(f"{name} is the old form and not supported; send tools", name)
    if body.continue_final_message:
        raise InvalidRequestError("continue_final_message is not supported; leave it out", "continue_final_message")


def _message(index: int, message: MessageField) -> Message:
    role = _OTHER_ROLES.get(message.role, message.role)
    if role not in ROLES:
        raise InvalidRequestError(
            f"messages[{index}].role is {message.role!r}; use one of {', '.join((*ROLES, *_OTHER_ROLES))}",
            f"messages[{index}].role",
        )
    return Message(
        role=role,
        text=_text(message.content, f"messages[{index}].content"),
        name=message.name,
        reasoning=message.reasoning_content or message.reasoning,
        tool_calls=tuple(_tool_call(call) for call in message.tool_calls or ()),
        tool_call_id=message.tool_call_id,
    )


def _text(content: str | list[ContentPart] | None, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    for index, part in enumerate(content):
        if part.text is None and part.type == "text":
            raise InvalidRequestError(f"{where}[{index}].text is missing", f"{where}[{index}].text")
        if part.type not in _TEXT_PARTS or part.text is None:
            param = f"{where}[{index}].type"
            raise InvalidRequestError(f"{param} is {part.type!r}; this model takes text parts only", param)
    return "\n".join(part.text or "" for part in content)


def _tool_call(call: ToolCallField) -> ToolCall:
    arguments = call.function.arguments
    as_text = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()
    return ToolCall(call.function.name, as_text)


def _tool(index: int, tool: dict[str, Any]) -> dict[str, object]:
    function = tool.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        param = f"tools[{index}].function.name"
        raise InvalidRequestError(f"{param} is missing; a tool is {{type, function: {{name, …}}}}", param)
    return tool


def _params(body: ChatBody, llm: ServedLLM) -> SamplingParams:
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequestError("top_logprobs needs logprobs: true", "top_logprobs")
    if body.prompt_logprobs is not None and body.stream:
        raise InvalidRequestError("prompt_logprobs is not available with stream: true", "prompt_logprobs")
    max_tokens = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    logprobs = body.top_logprobs or 0 if body.logprobs else None
    names = {"logprobs": "top_logprobs"}
    if body.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    asked = body.prompt_logprobs
    try:
        return sampling_params(body, llm, max_tokens=max_tokens, logprobs=logprobs, prompt_logprobs=asked)
    except InvalidRequestError as error:
        raise under_its_name(error, names) from None


def _template_kwargs(body: ChatBody) -> dict[str, object]:
    for name in _OWN_TEMPLATE_NAMES:
        if name in (body.chat_template_kwargs or {}):
            raise InvalidRequestError(f"chat_template_kwargs may not set {name!r}", "chat_template_kwargs")
    kwargs: dict[str, object] = {}
    if body.reasoning_effort is not None:
        kwargs["reasoning_effort"] = body.reasoning_effort
        kwargs["enable_thinking"] = body.reasoning_effort != "none"
    if body.enable_thinking is not None:
        kwargs["enable_thinking"] = body.enable_thinking
    return {**kwargs, **(body.chat_template_kwargs or {})}
