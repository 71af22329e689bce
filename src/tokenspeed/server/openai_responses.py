# SPDX-License-Identifier: Apache-2.0
"""The OpenAI Responses dialect, on its way in: body → neutral conversation. Knows no other dialect and no answer.

A conversation is a list of items. Their ids never show; items that this server does not know are left out, as clients
send new ones with every release.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from tokenspeed.core.errors import InvalidRequestError
from tokenspeed.core.request import SamplingParams
from tokenspeed.llm.sampling import INT32_MAX
from tokenspeed.server.chat import Conversation, Message, ToolCall
from tokenspeed.server.fields import Nothing, Refused, one_of, within
from tokenspeed.server.formats import Form, format_form
from tokenspeed.server.responses_store import Item, ResponsesStore, items_of
from tokenspeed.server.responses_tools import CUSTOM_FIELD, SEARCH, Toolbox, callable_name
from tokenspeed.server.sampling import SamplingFields, request_priority, sampling_params, under_its_name
from tokenspeed.server.served import ServedLLM
from tokenspeed.server.tool_choice import ToolChoice, read_tool_choice

ENCRYPTED_REASONING = "reasoning.encrypted_content"
COMPACTION = "compaction"
_LOGPROBS = "message.output_text.logprobs"
_SEAL = "tokenspeed:"
_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
_MEDIA = ("input_image", "input_file", "input_audio", "image", "file")
_OWN_TEMPLATE_NAMES = ("self", "messages", "tools", "add_generation_prompt")
_HEAD_TOOLS = "additional_tools"


class Reasoning(msgspec.Struct):
    """reasoning of the body."""

    effort: str | None = None
    summary: str | None = None


class TextField(msgspec.Struct):
    """text of the body."""

    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ResponsesBody(SamplingFields, kw_only=True):
    """The body of /v1/responses and of /v1/responses/input_tokens. Fields that change nothing here are only echoed."""

    input: str | list[Item] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: Annotated[int | None, within(1, INT32_MAX)] = None
    top_logprobs: Annotated[int | None, one_of(None, 0)] = None
    reasoning: Reasoning | None = None
    text: TextField | None = None
    include: list[str] | None = None
    n: Annotated[int | None, one_of(None, 1)] = None
    prompt_logprobs: Refused = None
    background: Nothing = None
    conversation: Refused = None
    prompt: Refused = None
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    session_id: str | None = None
    prompt_cache_key: str | None = None
    metadata: dict[str, Any] | None = None
    truncation: str | None = None
    user: str | None = None
    safety_identifier: str | None = None


@dataclass(frozen=True, slots=True)
class Asked:
    """A body as it was understood. history: the items before a stored answer, as the store has them."""

    body: ResponsesBody
    conversation: Conversation
    toolbox: Toolbox
    history: tuple[bytes, ...]


def read_form(text: TextField) -> Form | None:
    """What `text` asks for; any thread. Raises InvalidRequestError."""
    return format_form(text.format, "text.format")


def read(body: ResponsesBody, llm: ServedLLM, store: ResponsesStore, form: Form | None = None) -> Asked:
    """The neutral conversation and what else an answer needs. form: that of its text, read before. Raises
    InvalidRequestError that names the field, and HttpError for a response that is not stored."""
    _refuse(body)
    before = store.history(body.previous_response_id) if body.previous_response_id else ()
    new = [{"role": "user", "content": body.input}] if isinstance(body.input, str) else body.input or []
    items = [_referred(item, f"input[{index}]", store) for index, item in enumerate(new)]
    toolbox = Toolbox()
    toolbox.add(body.tools or (), "tools")
    messages = _messages([*items_of(before), *items], body.instructions, toolbox, -len(items))
    if not messages:
        raise InvalidRequestError("input is empty; send text or at least one item", "input")
    conversation = Conversation(
        messages=messages,
        tools=toolbox.tools,
        params=_params(body, llm),
        template_kwargs=_template_kwargs(body),
        priority=request_priority(body),
        choice=_tool_choice(body.tool_choice, toolbox),
        parallel_tool_calls=body.parallel_tool_calls is not False,
        told_later=toolbox.told_later,
        form=form,
    )
    is_kept = body.store is not False
    return Asked(body, conversation, toolbox, (*before, msgspec.json.encode(items)) if is_kept else ())


class _Turns:
    """Messages put together from items: what the assistant says, thinks and calls between two others is one message,
    as it was one reply. Two texts without anything between them were two."""

    def __init__(self) -> None:
        self._messages: list[Message] = []
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self._calls: list[ToolCall] = []
        self._ends_in_text = False

    def said(self, text: str) -> None:
        """Text of the assistant."""
        if self._ends_in_text:
            self._flush()
        self._texts.append(text)
        self._ends_in_text = True

    def thought(self, text: str) -> None:
        """Reasoning of the assistant."""
        if text:
            self._thoughts.append(text)
            self._ends_in_text = False

    def called(self, call: ToolCall) -> None:
        """A call of the assistant."""
        self._calls.append(call)
        self._ends_in_text = False

    def other(self, message: Message) -> None:
        """A message of anyone else."""
        self._flush()
        self._messages.append(message)

    def messages(self) -> tuple[Message, ...]:
        """All of them."""
        self._flush()
        return tuple(self._messages)

    def _flush(self) -> None:
        if self._texts or self._thoughts or self._calls:
            text, reasoning = "".join(self._texts), "".join(self._thoughts) or None
            self._messages.append(Message("assistant", text, reasoning=reasoning, tool_calls=tuple(self._calls)))
        self._texts, self._thoughts, self._calls, self._ends_in_text = [], [], [], False


def sealed(reasoning: str) -> str:
    """Reasoning as a client keeps it that shows it to nobody; it hides nothing from the client."""
    return base64.b64encode(f"{_SEAL}{reasoning}".encode("utf-8", "surrogatepass")).decode()


def _unsealed(text: object) -> str | None:
    if not isinstance(text, str):
        return None
    try:
        opened = base64.b64decode(text, validate=True).decode("utf-8", "surrogatepass")
    except (binascii.Error, ValueError):
        return None
    return opened.removeprefix(_SEAL) if opened.startswith(_SEAL) else None


def _refuse(body: ResponsesBody) -> None:
    """What this server does not do, by name."""
    if body.top_logprobs or _LOGPROBS in (body.include or ()):
        raise InvalidRequestError("log-probabilities are not offered here; use /v1/chat/completions", "top_logprobs")
    for name in ("background", "conversation", "prompt", "prompt_logprobs"):
        if getattr(body, name) not in (None, False):
            raise InvalidRequestError(f"{name} is not supported by this server; leave it out", name)
    if body.n not in (None, 1):
        raise InvalidRequestError("n is not part of this API; a response is one", "n")


def _tool_choice(value: object, toolbox: Toolbox) -> ToolChoice:
    """The choice, in the names by which the model knows the tools."""
    choice = read_tool_choice(value)
    called = None if choice.called is None else toolbox.callable(choice.called)
    among = None if choice.among is None else frozenset(map(toolbox.callable, choice.among))
    return ToolChoice(choice.may_call, choice.must_call, called, among)


def _params(body: ResponsesBody, llm: ServedLLM) -> SamplingParams:
    max_tokens = body.max_output_tokens if body.max_output_tokens is not None else body.max_tokens
    try:
        return sampling_params(body, llm, max_tokens=max_tokens, logprobs=None, prompt_logprobs=None)
    except InvalidRequestError as error:
        names = {} if body.max_output_tokens is None else {"max_tokens": "max_output_tokens"}
        raise under_its_name(error, names) from None


def _template_kwargs(body: ResponsesBody) -> dict[str, object]:
    for name in _OWN_TEMPLATE_NAMES:
        if name in (body.chat_template_kwargs or {}):
            raise InvalidRequestError(f"chat_template_kwargs may not set {name!r}", "chat_template_kwargs")
    kwargs: dict[str, object] = {}
    if body.reasoning is not None and body.reasoning.effort is not None:
        kwargs["reasoning_effort"] = body.reasoning.effort
        kwargs["enable_thinking"] = body.reasoning.effort != "none"
    if body.enable_thinking is not None:
        kwargs["enable_thinking"] = body.enable_thinking
    return {**kwargs, **(body.chat_template_kwargs or {})}


def _referred(item: Item, where: str, store: ResponsesStore) -> Item:
    """The item itself, where only its id was sent."""
    if item.get("type") != "item_reference" and set(item) != {"id"}:
        return item
    found = store.item(str(item.get("id")))
    if found is None:
        raise InvalidRequestError(f"{where}: item {item.get('id')!r} is not stored here; send it whole", where)
    return found


def _messages(items: Sequence[Item], instructions: str | None, toolbox: Toolbox, first: int) -> tuple[Message, ...]:
    """first: the index of the first item that was sent now, counted from the end."""
    turns = _Turns()
    if instructions:
        turns.other(Message("system", instructions))
    offset = len(items) + first if first else len(items)
    is_head = True
    for index, item in enumerate(items):
        where = f"input[{index - offset}]" if index >= offset else "previous_response_id"
        if item.get("type") == _HEAD_TOOLS and is_head:
            toolbox.add(_list(item.get("tools")), f"{where}.tools")
            continue
        is_head = False
        _take(item, where, toolbox, turns)
    return turns.messages()


def _take(item: Item, where: str, toolbox: Toolbox, turns: _Turns) -> None:
    """One item into the turns."""
    kind = item.get("type") or ("message" if "role" in item else "")
    if not isinstance(kind, str):
        raise InvalidRequestError(f"{where}.type is no text", f"{where}.type")
    if kind == "message":
        _take_message(item, where, turns)
    elif kind == "reasoning":
        turns.thought(_reasoning(item))
    elif kind == "function_call":
        turns.called(ToolCall(_called(item), _as_text(item.get("arguments"))))
    elif kind == "custom_tool_call":
        turns.called(ToolCall(_called(item), _as_text({CUSTOM_FIELD: item.get("input") or ""})))
    elif kind == f"{SEARCH}_call":
        turns.called(ToolCall(SEARCH, _as_text(item.get("arguments"))))
    elif kind == f"{SEARCH}_output":
        text = toolbox.tell_later(_list(item.get("tools")), f"{where}.tools")
        turns.other(Message("tool", text, tool_call_id=_id(item)))
    elif kind == COMPACTION:
        turns.other(Message("user", _compaction(item, where)))
    elif kind == _HEAD_TOOLS:
        turns.other(Message("system", toolbox.tell_later(_list(item.get("tools")), f"{where}.tools")))
    elif kind.endswith("_output") and "output" in item:
        turns.other(Message("tool", _output_text(item["output"]), tool_call_id=_id(item)))
    elif kind.endswith("_call") and _id(item) is not None:
        turns.called(ToolCall(kind.removesuffix("_call"), _as_text(item.get("action") or item.get("operation"))))


def _take_message(item: Item, where: str, turns: _Turns) -> None:
    role = _ROLES.get(str(item.get("role")))
    if role is None:
        raise InvalidRequestError(
            f"{where}.role is {item.get('role')!r}; use one of {', '.join(_ROLES)}", f"{where}.role"
        )
    text = _content_text(item.get("content"), f"{where}.content")
    if role == "assistant":
        turns.said(text)
    else:
        turns.other(Message(role, text))


def _content_text(content: object, where: str) -> str:
    """The text of a message. InvalidRequestError for pictures, files and sound."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise InvalidRequestError(f"{where} is neither text nor a list of parts", where)
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in _MEDIA:
            param = f"{where}[{index}].type"
            raise InvalidRequestError(f"{param} is {kind!r}; this model takes text parts only", param)
        text = _part_text(part)
        if text is not None:
            texts.append(text)
    return "\n".join(texts)


def _output_text(output: object) -> str:
    """The text of a tool's output. What is no text is said to be left out, as a client that ran the tool cannot mend
    it and would send it in each turn."""
    if not isinstance(output, list):
        return _as_text(output)
    texts = [
        f"[{part.get('type')} left out: this model takes text only]"
        if isinstance(part, dict) and part.get("type") in _MEDIA
        else _part_text(part)
        for part in output
    ]
    return "\n".join(text for text in texts if text is not None)


def _part_text(part: object) -> str | None:
    if not isinstance(part, dict):
        return part if isinstance(part, str) else None
    text = part.get("text", part.get("refusal"))
    return text if isinstance(text, str) else None


def _reasoning(item: Item) -> str:
    """What was thought: as this server sealed it, else whole, else in summary."""
    found = _unsealed(item.get("encrypted_content"))
    if found is not None:
        return found
    for parts in (item.get("content"), item.get("summary")):
        texts = [text for part in _list(parts) if (text := _part_text(part)) is not None]
        if texts:
            return "\n".join(texts)
    return ""


def _compaction(item: Item, where: str) -> str:
    """What stands for the messages that were made short."""
    summary = _unsealed(item.get("encrypted_content"))
    if summary is None:
        raise InvalidRequestError(
            f"{where}.encrypted_content was not made by this server; send the conversation itself",
            f"{where}.encrypted_content",
        )
    return f"Summary of the conversation so far:\n{summary}"


def _called(item: Item) -> str:
    namespace = item.get("namespace")
    return callable_name(str(item.get("name") or ""), namespace if isinstance(namespace, str) else None)


def _id(item: Item) -> str | None:
    call_id = item.get("call_id")
    return call_id if isinstance(call_id, str) else None


def _as_text(value: object) -> str:
    return value if isinstance(value, str) else "" if value is None else msgspec.json.encode(value).decode()


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
