# SPDX-License-Identifier: Apache-2.0
"""The Anthropic Messages dialect, on its way in: body → neutral conversation. Knows no other dialect and no answer.

What this server cannot run itself (tools that Anthropic hosts) or need not know (cache hints, context edits) is left
out; fields that it does not know are ignored, as clients send new ones with every release.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any

import msgspec

from tokenspeed.core.errors import InvalidRequestError
from tokenspeed.core.request import SamplingParams
from tokenspeed.llm.sampling import INT32_MAX, TEMPERATURE_MAX, checked, default_sampling
from tokenspeed.server.chat import Conversation, Message, ToolCall
from tokenspeed.server.errors import HttpError
from tokenspeed.server.fields import Refused, above, at_least_one, one_of, within
from tokenspeed.server.formats import Form, format_form
from tokenspeed.server.sampling import thinking_budget
from tokenspeed.server.served import ServedLLM
from tokenspeed.server.tool_choice import ToolChoice, read_tool_choice

_BILLING_PREFIX = "x-anthropic-billing-header:"
_THREAD_CODE = "thread_unsupported_request"
_ROLES = ("user", "assistant", "system")
_REASONING_BLOCKS = ("thinking", "redacted_thinking")


class CacheControl(msgspec.Struct):
    """A hint that what ends here is asked for again."""

    type: str
    ttl: str | None = None


class Block(msgspec.Struct):
    """A content block of any type; the fields that its type has are set."""

    type: str
    cache_control: CacheControl | None = None
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: Any = None
    tool_use_id: str | None = None
    content: Any = None
    is_error: bool | None = None
    tool_name: str | None = None


class MessageField(msgspec.Struct):
    """One message of the body."""

    role: Annotated[str, one_of(*_ROLES)]
    content: str | list[Block]


class ToolField(msgspec.Struct):
    """A tool. type: absent or "custom" for those that the client runs."""

    name: str = ""
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    type: str | None = None
    defer_loading: bool | None = None


class ToolChoiceField(msgspec.Struct):
    """Which tools may be called."""

    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct):
    """Whether the model thinks first."""

    type: str
    budget_tokens: int | None = None
    display: str | None = None


class OutputConfig(msgspec.Struct):
    """output_config of the body."""

    effort: str | None = None
    format: dict[str, Any] | None = None


class CountBody(msgspec.Struct, kw_only=True):
    """The body of /v1/messages/count_tokens."""

    messages: Annotated[list[MessageField], at_least_one()]
    model: str | None = None
    system: str | list[Block] | None = None
    tools: list[ToolField] | None = None
    tool_choice: ToolChoiceField | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: dict[str, Any] | None = None
    thread: Refused = None
    metadata: dict[str, Any] | None = None


class MessagesBody(CountBody, kw_only=True):
    """The body of /v1/messages."""

    max_tokens: Annotated[int | None, within(1, INT32_MAX)] = None
    stream: bool | None = None
    temperature: Annotated[float | None, within(0, TEMPERATURE_MAX)] = None
    top_p: Annotated[float | None, above(0, 1)] = None
    top_k: Annotated[int | None, within(-1, INT32_MAX)] = None
    stop_sequences: list[str] | None = None


def read_conversation(body: CountBody, llm: ServedLLM) -> Conversation:
    """The neutral conversation. Raises InvalidRequestError that names the field, and HttpError for a thread, which a
    client takes as a wish for the whole history."""
    if body.thread is not None:
        raise HttpError(
            400, "threads are not kept here; send the whole conversation", code=_THREAD_CODE, param="thread"
        )
    if not body.messages:
        raise InvalidRequestError("messages: at least one message is required", "messages")
    tools = [tool for tool in body.tools or () if tool.type in (None, "custom")]
    schemas = {tool.name: _tool(tool) for tool in tools}
    messages = [*_system(body.system)]
    for index, message in enumerate(body.messages):
        messages += _messages(message, f"messages.{index}", schemas)
    return Conversation(
        messages=tuple(messages),
        tools=tuple(schemas[tool.name] for tool in tools if not tool.defer_loading),
        params=_params(body, llm),
        template_kwargs=_template_kwargs(body),
        choice=_tool_choice(body.tool_choice),
        parallel_tool_calls=body.tool_choice is None or not body.tool_choice.disable_parallel_tool_use,
        form=_form(body),
        thinking_budget=_thinking_budget(body.thinking),
    )


def cache_ttls(body: CountBody) -> Iterator[str | None]:
    """How long the client wants to find again what it marks."""
    blocks = [] if body.system is None or isinstance(body.system, str) else list(body.system)
    for message in body.messages:
        blocks += [] if isinstance(message.content, str) else message.content
    return (block.cache_control.ttl for block in blocks if block.cache_control is not None)


def _tool_choice(choice: ToolChoiceField | None) -> ToolChoice:
    if choice is None:
        return ToolChoice()
    return read_tool_choice({"type": "tool", "name": choice.name} if choice.type == "tool" else choice.type)


def _form(body: CountBody) -> Form | None:
    if body.output_config is not None and body.output_config.format is not None:
        return format_form(body.output_config.format, "output_config.format")
    return format_form(body.output_format, "output_format")


def _thinking_budget(thinking: Thinking | None) -> int | None:
    if thinking is None or thinking.type != "enabled":
        return None
    return thinking_budget(thinking.budget_tokens, "thinking.budget_tokens")


def _params(body: CountBody, llm: ServedLLM) -> SamplingParams:
    if not isinstance(body, MessagesBody):
        return SamplingParams()
    names = ("temperature", "top_p", "top_k", "max_tokens")
    given = {name: getattr(body, name) for name in names if getattr(body, name) is not None}
    params = SamplingParams(**{**default_sampling(llm.source), **given, "stop": tuple(body.stop_sequences or ())})
    return checked(params, llm.info.vocab_size)


def _template_kwargs(body: CountBody) -> dict[str, object]:
    """What the template is told of thinking. Adaptive leaves it to the model's own default."""
    kwargs: dict[str, object] = {}
    if body.output_config is not None and body.output_config.effort is not None:
        kwargs["reasoning_effort"] = body.output_config.effort
    if body.thinking is not None and body.thinking.type in ("enabled", "disabled"):
        kwargs["enable_thinking"] = body.thinking.type == "enabled"
    return kwargs


def _tool(tool: ToolField) -> Mapping[str, object]:
    """In the shape that templates read, keys in the order that they were sent in."""
    function: dict[str, object] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    function["parameters"] = tool.input_schema or {"type": "object", "properties": {}}
    return {"type": "function", "function": function}


def _system(system: str | list[Block] | None) -> list[Message]:
    text = system if isinstance(system, str) else _joined(system or (), "system")
    return [Message("system", text)] if text else []


def _messages(message: MessageField, where: str, schemas: Mapping[str, object]) -> list[Message]:
    if message.role not in _ROLES:
        raise InvalidRequestError(f"{where}.role is {message.role!r}; use user, assistant or system", f"{where}.role")
    blocks = [Block("text", text=message.content)] if isinstance(message.content, str) else message.content
    if message.role == "assistant":
        return [_assistant(blocks, where)]
    results = [_result(block, f"{where}.content", schemas) for block in blocks if block.type == "tool_result"]
    rest = [block for block in blocks if block.type != "tool_result"]
    text = _joined(rest, f"{where}.content")
    return [*results, Message(message.role, text)] if text or not results else results


def _assistant(blocks: list[Block], where: str) -> Message:
    text = [block for block in blocks if block.type not in (*_REASONING_BLOCKS, "tool_use")]
    thoughts = [block.thinking for block in blocks if block.type == "thinking" and block.thinking]
    calls = [
        ToolCall(block.name or "", msgspec.json.encode(block.input or {}).decode())
        for block in blocks
        if block.type == "tool_use"
    ]
    reasoning = "\n".join(thoughts) or None
    return Message("assistant", _joined(text, f"{where}.content"), reasoning=reasoning, tool_calls=tuple(calls))


def _result(block: Block, where: str, schemas: Mapping[str, object]) -> Message:
    """A tool's answer. A reference to a tool whose loading was deferred becomes its schema, here and not at the top of
    the prompt, so that what was said before stays as it was."""
    content = block.content
    if isinstance(content, list):
        try:
            inner = msgspec.convert(content, list[Block])
        except msgspec.ValidationError as error:
            raise InvalidRequestError(f"{where}: a tool_result holds content blocks: {error}", where) from None
        content = "\n".join(_text_of(each, where, schemas) for each in inner)
    text = content if isinstance(content, str) else ""
    return Message("tool", f"Error: {text}" if block.is_error else text, tool_call_id=block.tool_use_id)


def _text_of(block: Block, where: str, schemas: Mapping[str, object]) -> str:
    if block.type == "tool_reference" and block.tool_name is not None:
        return msgspec.json.encode(schemas.get(block.tool_name, {"name": block.tool_name})).decode()
    return _joined([block], where)


def _joined(blocks: Iterable[Block], where: str) -> str:
    """The text of blocks; hints of billing and what servers of Anthropic did themselves are no text."""
    texts = []
    for block in blocks:
        if block.type == "text" and block.text is not None:
            if not block.text.startswith(_BILLING_PREFIX):
                texts.append(block.text)
        elif block.type in ("image", "document"):
            raise InvalidRequestError(f"{where} has a block of type {block.type!r}; this model takes text only", where)
    return "\n".join(texts)
