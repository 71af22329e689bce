# SPDX-License-Identifier: Apache-2.0
"""The neutral conversation that every dialect is read into, and how it is handed to the chat template.

Requests that mean the same become the same messages, so that they render to the same tokens: content as text or as
parts is one thing, ids never show, arguments are parsed, replayed reasoning is trimmed. Knows no wire field names of
a dialect and no template.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from tokenspeed.core.request import SamplingParams
from tokenspeed.llm.input_processor import ChatPrompt
from tokenspeed.server.formats import Form
from tokenspeed.server.tool_choice import ToolChoice

ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call in the history. arguments: JSON as text, valid or not."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Message:
    """One turn. role is one of ROLES."""

    role: str
    text: str
    name: str | None = None
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None


@dataclass(frozen=True, slots=True)
class Conversation:
    """What is asked, whichever dialect it came in. tools: as sent, key order kept. told_later: names of those that a
    message tells of, so that the head of the prompt does not. choice: whether a call in the reply is one, or text, and
    has to come. form: what an answer has to match. thinking_budget: tokens of reasoning at the most. sound_calls: a
    grammar sees to it that calls are well formed."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, object], ...]
    params: SamplingParams
    add_generation_prompt: bool = True
    template_kwargs: Mapping[str, object] = field(default_factory=dict)
    priority: int = 0
    parallel_tool_calls: bool = True
    told_later: frozenset[str] = frozenset()
    choice: ToolChoice = field(default_factory=ToolChoice)
    form: Form | None = None
    thinking_budget: int | None = None
    sound_calls: bool = False

    @property
    def callable_tools(self) -> tuple[Mapping[str, object], ...]:
        """Those that the reply may call."""
        if not self.choice.may_call:
            return ()
        among = self.choice.among
        return tuple(tool for tool in self.tools if among is None or _name(tool) in among)

    def prompt(self) -> ChatPrompt:
        """The conversation as the template sees it."""
        return ChatPrompt(
            messages=template_messages(self.messages),
            tools=[dict(tool) for tool in self.tools if not self._is_told_later(tool)] or None,
            add_generation_prompt=self.add_generation_prompt,
            template_kwargs=dict(self.template_kwargs),
        )

    def _is_told_later(self, tool: Mapping[str, object]) -> bool:
        return _name(tool) in self.told_later


def _name(tool: Mapping[str, object]) -> object:
    function = tool.get("function")
    return function.get("name") if isinstance(function, Mapping) else None


def template_messages(messages: Sequence[Message]) -> list[dict[str, object]]:
    """Messages in the shape that Hugging Face chat templates read."""
    return [_template_message(message) for message in messages]


def _template_message(message: Message) -> dict[str, object]:
    rendered: dict[str, object] = {"role": message.role, "content": message.text}
    if message.name is not None:
        rendered["name"] = message.name
    if message.reasoning is not None and message.reasoning.strip():
        rendered["reasoning_content"] = message.reasoning.strip()
    if message.tool_calls:
        rendered["tool_calls"] = [
            {"type": "function", "function": {"name": call.name, "arguments": _arguments(call.arguments)}}
            for call in message.tool_calls
        ]
    return rendered


def _arguments(text: str) -> object:
    """Templates write arguments as JSON themselves; what is not a JSON object stays the text that it was."""
    if not text.strip():
        return {}
    try:
        return msgspec.json.decode(text, type=dict[str, object])
    except msgspec.DecodeError:
        return text
