# SPDX-License-Identifier: Apache-2.0
"""Tagged parameters, whose strings are written without quotes: as JSON, by the types of the schema.

Knows the schemas of the request's tools; knows no mark that begins a call.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from tokenspeed.chat.parsers import Schema
from tokenspeed.chat.parsers import _json as json_reading
from tokenspeed.chat.parsers._calls import NAME
from tokenspeed.chat.parsers._machine import Output, Reader
from tokenspeed.chat.parsers._python import from_python
from tokenspeed.chat.parsers._scanner import Marks, Reading, Scanner, Sink
from tokenspeed.chat.parsers._schema import type_of, types_of


@dataclass(frozen=True, slots=True)
class Tags:
    """How one parameter is tagged: open KEY key_close, then, if there is one, value_open, VALUE close. key_close: what
    may stand there, each with what it says of the value: that it is TEXT, JSON, or of a type BY_SCHEMA. after: what may
    follow close; anything else means that close was part of the value. lines: a line break at either end of VALUE is
    layout. key_escapes: what keys write for what they mean. quotes: what may stand around VALUE to say that it is
    text."""

    open: str
    key_close: Mapping[str, str]
    close: str
    after: tuple[str, ...]
    value_open: str = ""
    lines: bool = False
    key_escapes: tuple[tuple[str, str], ...] = ()
    quotes: tuple[str, str] = ("", "")
    marks: Marks = field(init=False)
    quoted_marks: Marks = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "marks", Marks((self.close,)))
        object.__setattr__(self, "quoted_marks", Marks((self.quotes[1] + self.close,)))


@dataclass(frozen=True, slots=True)
class TaggedCall:
    """How a call with tagged parameters is written: open NAME name_close, parameters, close."""

    open: str
    name_close: str
    close: str
    tags: Tags


def tagged_call(scanner: Scanner, out: Output, form: TaggedCall, *, known_only: bool = False) -> Reading[bool]:
    """Read a call after its `open`. known_only: only the name of a given tool begins a call."""
    name = yield from scanner.word(NAME)
    if not name or (known_only and name not in out.context.tools) or not (yield from scanner.accept(form.name_close)):
        return False
    out.start(name)
    if not (yield from tagged_parameters(scanner, out, out.context.tools.get(name, {}), form.tags)):
        return False
    if not (yield from scanner.accept(form.close)):
        return False
    out.end()
    return True


def tagged_calls(form: TaggedCall, *closes: str) -> Reader:
    """A reader of one call or more, up to one of `closes`, which a model may forget."""

    def read(scanner: Scanner, out: Output) -> Reading[bool]:
        yield from scanner.space()
        mark = yield from scanner.accept(form.open)
        if not mark:
            return False
        while mark == form.open:
            if not (yield from tagged_call(scanner, out, form)):
                return False
            yield from scanner.space()
            mark = yield from scanner.accept(*closes, form.open)
        return True

    return read


TEXT, JSON, BY_SCHEMA = "text", "json", "by schema"
_KEY = re.compile(r"[^<>\"\r\n]+")


def tagged_parameters(scanner: Scanner, out: Output, schema: Schema, tags: Tags) -> Reading[bool]:
    """Read parameters until something else comes, as the arguments of the call that began last."""
    keys: set[str] = set()
    yield from scanner.space()
    while (yield from scanner.accept(tags.open)):
        key = (yield from scanner.word(_KEY)).strip()
        key_close = yield from scanner.accept(*tags.key_close)
        for written, meant in tags.key_escapes:
            key = key.replace(written, meant)
        if not key or key in keys or not key_close:
            return False
        if tags.value_open:
            yield from scanner.space()
            if not (yield from scanner.accept(tags.value_open)):
                return False
        out.arguments(f'{", " if keys else "{"}"{json_reading.quoted(key)}": ')
        keys.add(key)
        if not (yield from _tagged_value(scanner, out, tags.key_close[key_close], types_of(schema, key), tags)):
            return False
        yield from scanner.space()
    out.arguments("}" if keys else "{}")
    return True


def _tagged_value(scanner: Scanner, out: Output, kind: str, types: frozenset[str], tags: Tags) -> Reading[bool]:
    """Read a value up to and with its closing tag. Text leaves as it comes; what may be another type waits."""
    opening, _ = tags.quotes
    is_quoted = bool(opening) and bool((yield from scanner.accept(opening)))
    marks = tags.quoted_marks if is_quoted else tags.marks
    is_text = is_quoted or kind == TEXT or (kind == BY_SCHEMA and types == {"string"})
    pieces: list[str] = []
    sink = _Lines(lambda text: out.arguments(json_reading.quoted(text)) if is_text else pieces.append(text), tags.lines)
    if tags.lines:
        yield from scanner.accept("\r\n", "\n")
    if is_text:
        out.arguments('"')
    while True:
        mark = yield from scanner.until(marks, sink)
        if not mark:
            return False
        if (yield from scanner.follows(tags.after)):
            break
        sink(mark)
    whole = "".join(pieces)
    out.arguments('"' if is_text else typed(whole, types) if kind == BY_SCHEMA else _json(whole))
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


def _json(text: str) -> str:
    """The JSON text of a value that is marked as JSON; a string if it is none."""
    stripped = text.strip()
    try:
        json_reading.parsed(stripped)
    except ValueError:
        return f'"{json_reading.quoted(text)}"'
    return stripped


_PYTHON = {"True": "true", "False": "false", "None": "null"}


def typed(text: str, types: frozenset[str]) -> str:
    """The JSON text of a tagged value. types: what the schema allows; anything if empty."""
    stripped = text.strip()
    candidate = _PYTHON.get(stripped, stripped)
    if stripped[:1] in ("[", "{") and types and "string" not in types:
        candidate = from_python(stripped) or stripped
    try:
        kind = type_of(json_reading.parsed(candidate))
    except ValueError:
        kind = "string"
    fits = not types or kind in types or (kind == "integer" and "number" in types)
    if kind != "string" and (fits or "string" not in types):
        return candidate
    return f'"{json_reading.quoted(text)}"'
