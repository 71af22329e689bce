# SPDX-License-Identifier: Apache-2.0
"""Data is not control: the text of a control token inside data is marked before a template sees it, so that it can be
told from what the template writes itself.

Data is what users, tools and the system say, arguments of calls and descriptions of tools; what the assistant wrote
outside of calls is not, since templates look into it. Knows no token ids.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenspeed.chat import Message, Tool

_MARKS = tuple(chr(code) for code in range(0xF8C0, 0xF8F0))
"""Characters for private use, of which one that no text of the conversation has is taken."""
_NOTHING = "(?!)"


@dataclass(frozen=True, slots=True)
class Marked:
    """A conversation whose data holds control text, each broken by `mark` after its first character."""

    messages: Sequence[Message]
    tools: Sequence[Tool] | None
    mark: str


class ControlTexts:
    """The control texts of a vocabulary, of which there may be thousands, each of two characters or more."""

    def __init__(self, texts: Iterable[str]) -> None:
        self.texts = frozenset(texts)
        assert all(len(text) > 1 for text in self.texts), sorted(self.texts, key=len)[:1]
        self._lengths = {begin: sorted({len(t) for t in group}) for begin, group in _by_beginning(self.texts).items()}
        self._begun = re.compile(_any_of(self._lengths) or _NOTHING)

    def held_by(self, text: str) -> set[str]:
        """Those that the text holds, one inside the other too."""
        found: set[str] = set()
        begun = self._begun.search(text)
        while begun:
            place = begun.start()
            found.update(text[place : place + length] for length in self._lengths[begun[0]])
            begun = self._begun.search(text, place + 1)
        return found & self.texts

    def at(self, text: str, place: int, gap: int = 0) -> str | None:
        """The longest that stands at `place` when the `gap` characters after its first one are left out."""
        rest = place + 1 + gap
        for length in reversed(self._lengths.get(text[place] + text[rest : rest + 1], ())):
            candidate = text[place] + text[rest : rest + length - 1]
            if candidate in self.texts:
                return candidate
        return None


def mark_data(messages: Sequence[Message], tools: Sequence[Tool] | None, controls: ControlTexts) -> Marked | None:
    """The conversation with its data marked; None where data holds no control text, or nothing to mark it with is
    left."""
    strings: list[str] = []
    for message in messages:
        _gather(_data_of(message), strings)
    _gather(tools or (), strings)
    data = "\0".join(strings)
    found = controls.held_by(data)
    if not found:
        return None
    mark = next((mark for mark in _MARKS if mark not in data), None)
    if mark is None:
        return None
    held = re.compile("|".join(map(re.escape, sorted(found, key=len, reverse=True))))
    marked = [{**message, **_broken(_data_of(message), held, mark)} for message in messages]
    return Marked(marked, None if tools is None else _broken(list(tools), held, mark), mark)


def _data_of(message: Message) -> dict[str, object]:
    """The fields of a message that are data."""
    names = ("tool_calls",) if message.get("role") == "assistant" else ("content",)
    return {name: message[name] for name in names if message.get(name) is not None}


def _gather(value: object, strings: list[str]) -> None:
    """Adds every string of a value."""
    if isinstance(value, str):
        strings.append(value)
    elif isinstance(value, dict | Mapping):
        for key, each in value.items():
            _gather(key, strings)
            _gather(each, strings)
    elif isinstance(value, list | tuple):
        for each in value:
            _gather(each, strings)


def _by_beginning(texts: Iterable[str]) -> dict[str, list[str]]:
    """Texts by their first two characters."""
    groups: dict[str, list[str]] = {}
    for text in texts:
        groups.setdefault(text[:2], []).append(text)
    return groups


def _any_of(beginnings: Iterable[str]) -> str:
    """A pattern for any of these pairs of characters, of which few begin differently."""
    seconds: dict[str, str] = {}
    for pair in sorted(beginnings):
        seconds[pair[0]] = seconds.get(pair[0], "") + re.escape(pair[1])
    return "|".join(f"{re.escape(first)}[{each}]" for first, each in seconds.items())


def _broken(value: Any, held: re.Pattern[str], mark: str) -> Any:
    """The same value with all its strings broken where they hold control text."""
    if isinstance(value, str):
        return held.sub(lambda match: match[0][0] + mark + match[0][1:], value)
    if isinstance(value, Mapping):
        return {_broken(key, held, mark): _broken(each, held, mark) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_broken(each, held, mark) for each in value]
    return value
