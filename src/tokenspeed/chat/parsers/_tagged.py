# SPDX-License-Identifier: Apache-2.0
"""Tagged parameters, whose strings are written without quotes: as JSON, by the types of the schema.

Knows the schemas of the request's tools; knows no mark that begins a call.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from tokenspeed.chat.parsers import Schema
from tokenspeed.chat.parsers import _json as json_reading
from tokenspeed.chat.parsers._machine import Output
from tokenspeed.chat.parsers._scanner import Marks, Reading, Scanner, Sink
from tokenspeed.chat.parsers._schema import type_of, types_of


@dataclass(frozen=True, slots=True)
class Tags:
    """How one parameter is tagged: open KEY key_close, then, if there is one, value_open, VALUE close. after: what may
    follow close; anything else means that close was part of the value. lines: a line break at either end of VALUE is
    layout."""

    open: str
    key_close: str
    close: str
    after: tuple[str, ...]
    value_open: str = ""
    lines: bool = False
    marks: Marks = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "marks", Marks((self.close,)))


_KEY = re.compile(r"[^<>\"\r\n]+")


def tagged_parameters(scanner: Scanner, out: Output, schema: Schema, tags: Tags) -> Reading[bool]:
    """Read parameters until something else comes, as the arguments of the call that began last."""
    keys: set[str] = set()
    yield from scanner.space()
    while (yield from scanner.accept(tags.open)):
        key = (yield from scanner.word(_KEY)).strip()
        if not key or key in keys or not (yield from scanner.accept(tags.key_close)):
            return False
        if tags.value_open:
            yield from scanner.space()
            if not (yield from scanner.accept(tags.value_open)):
                return False
        out.arguments(f'{", " if keys else "{"}"{json_reading.quoted(key)}": ')
        keys.add(key)
        if not (yield from _tagged_value(scanner, out, types_of(schema, key), tags)):
            return False
        yield from scanner.space()
    out.arguments("}" if keys else "{}")
    return True


def _tagged_value(scanner: Scanner, out: Output, types: frozenset[str], tags: Tags) -> Reading[bool]:
    """Read a value up to and with its closing tag. Text leaves as it comes; what may be another type waits."""
    is_text = types == {"string"}
    pieces: list[str] = []
    sink = _Lines(lambda text: out.arguments(json_reading.quoted(text)) if is_text else pieces.append(text), tags.lines)
    if tags.lines:
        yield from scanner.accept("\r\n", "\n")
    if is_text:
        out.arguments('"')
    while True:
        mark = yield from scanner.until(tags.marks, sink)
        if not mark:
            return False
        if (yield from scanner.follows(tags.after)):
            break
        sink(mark)
    out.arguments('"' if is_text else _typed("".join(pieces), types))
    return True


class _Lines:
    """A sink that withholds a line break until more comes, if line breaks at the end are layout."""

    def __init__(self, sink: Sink, active: bool) -> None:
        self._sink = sink
        self._active = active
        self._held = ""

    def __call__(self, text: str) -> None:
        text = self._held + text
        end = len(text)
        if self._active:
            end -= len("\r\n") if text.endswith("\r\n") else int(text.endswith(("\n", "\r")))
        self._held = text[end:]
        if end:
            self._sink(text[:end])


_PYTHON = {"True": "true", "False": "false", "None": "null"}


def _typed(text: str, types: frozenset[str]) -> str:
    """The JSON text of a tagged value. types: what the schema allows; anything if empty."""
    stripped = text.strip()
    candidate = _PYTHON.get(stripped, stripped)
    try:
        kind = type_of(json_reading.parsed(candidate))
    except ValueError:
        kind = "string"
    fits = not types or kind in types or (kind == "integer" and "number" in types)
    if kind != "string" and (fits or "string" not in types):
        return candidate
    return f'"{json_reading.quoted(text)}"'
