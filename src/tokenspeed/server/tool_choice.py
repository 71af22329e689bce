# SPDX-License-Identifier: Apache-2.0
"""Which tools may or must be called, in the words of the OpenAI dialects: a word, one tool, or some of them.

Knows the field, not the tools.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tokenspeed.core.errors import InvalidRequestError

_MODES = ("auto", "required", "any", "none")
_ONE = ("function", "custom", "tool")
_SOME = "allowed_tools"


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """As in server.chat.Conversation. among: the only tools that may be called; None: all."""

    may_call: bool = True
    must_call: bool = False
    called: str | None = None
    among: frozenset[str] | None = None


def read_tool_choice(value: object) -> ToolChoice:
    """None is auto. InvalidRequestError for what is neither a known word nor a tool."""
    if value is None:
        return ToolChoice()
    if isinstance(value, str):
        return _mode(value)
    if isinstance(value, Mapping):
        kind = value.get("type")
        if kind in _ONE:
            return ToolChoice(must_call=True, called=_name(value))
        if kind == _SOME:
            inner = value.get(_SOME)
            return _some(inner if isinstance(inner, Mapping) else value)
    raise InvalidRequestError(
        f"tool_choice is {value!r}; use auto, required, none or {{type: function, …}} with the name of a tool",
        "tool_choice",
    )


def _mode(word: str) -> ToolChoice:
    if word not in _MODES:
        raise InvalidRequestError(f"tool_choice is {word!r}; use auto, required or none, or name a tool", "tool_choice")
    return ToolChoice(may_call=word != "none", must_call=word in ("required", "any"))


def _some(value: Mapping[str, object]) -> ToolChoice:
    tools, mode = value.get("tools"), _mode(str(value.get("mode") or "auto"))
    if not isinstance(tools, list) or not tools:
        raise InvalidRequestError("tool_choice.tools is missing; it lists the tools that may be called", "tool_choice")
    names = frozenset(_name(tool) for tool in tools if isinstance(tool, Mapping))
    return ToolChoice(mode.may_call, mode.must_call, among=names)


def _name(value: Mapping[str, object]) -> str:
    inner = value.get("function") or value.get("custom")
    fields = inner if isinstance(inner, Mapping) else value
    name = fields.get("name")
    if not isinstance(name, str) or not name:
        raise InvalidRequestError("tool_choice names no tool; it needs the name of one", "tool_choice")
    return name
