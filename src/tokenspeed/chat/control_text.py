# SPDX-License-Identifier: Apache-2.0
"""Data is not control: the text of a control token inside data is marked before a template sees it, so that it can be
told from what the template writes itself.

Data is what users, tools and the system say, arguments of calls and descriptions of tools; what the assistant wrote
outside of calls is not, since templates look into it. Knows no token ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenspeed.chat import Message, Tool

_MARKS = tuple(chr(code) for code in range(0xF8C0, 0xF8F0))
"""Characters for private use, of which one that no text of the conversation has is taken."""


@dataclass(frozen=True, slots=True)
class Marked:
    """A conversation whose data holds control text, each broken by `mark` after its first character."""

    messages: Sequence[Message]
    tools: Sequence[Tool] | None
    mark: str


def mark_data(messages: Sequence[Message], tools: Sequence[Tool] | None, control_texts: Sequence[str]) -> Marked | None:
    """The conversation with its data marked; None where data holds no control text, or nothing to mark it with is
    left."""
    strings = [text for message in messages for text in _strings(_data_of(message))]
    strings += _strings(list(tools or ()))
    begun = {start for start in {control[:2] for control in control_texts} if any(start in text for text in strings)}
    likely = [control for control in control_texts if control[:2] in begun]  # most texts have none, vocabularies many
    found = [control for control in likely if any(control in text for text in strings)]
    if not found:
        return None
    free = [mark for mark in _MARKS if not any(mark in text for text in strings)]
    if not free:
        return None
    breaks = {control: control[0] + free[0] + control[1:] for control in sorted(found, key=len, reverse=True)}
    marked = [{**message, **_broken(_data_of(message), breaks)} for message in messages]
    return Marked(marked, None if tools is None else _broken(list(tools), breaks), free[0])


def _data_of(message: Message) -> dict[str, object]:
    """The fields of a message that are data."""
    names = ("tool_calls",) if message.get("role") == "assistant" else ("content",)
    return {name: message[name] for name in names if message.get(name) is not None}


def _strings(value: object) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        return [text for key, each in value.items() for text in (*_strings(key), *_strings(each))]
    if isinstance(value, list | tuple):
        return [text for each in value for text in _strings(each)]
    return []


def _broken(value: Any, breaks: Mapping[str, str]) -> Any:
    """The same value with all its strings broken where they hold control text."""
    if isinstance(value, str):
        for control, broken in breaks.items():
            value = value.replace(control, broken)
        return value
    if isinstance(value, Mapping):
        return {_broken(key, breaks): _broken(each, breaks) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_broken(each, breaks) for each in value]
    return value
