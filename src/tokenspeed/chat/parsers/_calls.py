# SPDX-License-Identifier: Apache-2.0
"""Forms of a call that several dialects share: a JSON object with a name in it, and tagged parameters.

Knows the schemas of the request's tools; knows no mark that begins a call.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from dataclasses import dataclass, field

from tokenspeed.chat.parsers import Context, Schema
from tokenspeed.chat.parsers import _json as json_reading
from tokenspeed.chat.parsers._machine import Output, Reader
from tokenspeed.chat.parsers._scanner import Marks, Reading, Scanner, Sink

NAME = re.compile(r"[^\s<>\"'{}()\[\]=|]+")
_ARGUMENT_KEYS = ("arguments", "parameters")
_CALL_KEYS = frozenset(("name", "type", "id", *_ARGUMENT_KEYS))


def named_object(
    scanner: Scanner, out: Output, *, known: Container[str] | None = None, tentative: bool = False
) -> Reading[bool]:
    """Read {"name": …, "arguments": {…}}, keys in any order; "parameters" means the same.

    known: where answers stand too, the names that are calls; other names and keys refuse it. tentative: the caller
    commits.
    """
    name = ""
    early: list[str] | None = None  # arguments that came before the name
    seen = False
    separator = yield from scanner.accept("{")
    while separator in ("{", ","):
        key = yield from json_reading.text_string(scanner)
        if key is None or (known is not None and key not in _CALL_KEYS):
            return False
        yield from scanner.space()
        if not (yield from scanner.accept(":")):
            return False
        if key == "name":
            again, name = name, (yield from json_reading.text_string(scanner)) or ""
            if again or not name or (known is not None and name not in known):
                return False
            out.start(name, tentative=tentative)
            if early is not None:
                out.arguments("".join(early))
        elif key in _ARGUMENT_KEYS:
            early = None if name else []
            if seen or not (yield from arguments(scanner, out.arguments if early is None else early.append)):
                return False
            seen = True
        elif not (yield from json_reading.value(scanner)):
            return False
        yield from scanner.space()
        separator = yield from scanner.accept(",", "}")
    if not separator or not name:
        return False
    if not seen:
        out.arguments("{}")
    out.end(tentative=tentative)
    return True


def arguments(scanner: Scanner, sink: Sink, ends: tuple[str, ...] = ()) -> Reading[bool]:
    """Read the arguments of a call: an object, the JSON text of one as a string, or null for none. Before one of
    `ends` there may also be nothing."""
    yield from scanner.space()
    char = yield from scanner.peek()
    if char and ends and (yield from scanner.follows(ends)):
        sink("{}")
        return True
    if char == "{":
        return (yield from json_reading.value(scanner, sink))
    if char == '"':
        text = ((yield from json_reading.text_string(scanner)) or "").strip() or "{}"
        if not is_object(text):
            return False
        sink(text)
        return True
    if not (yield from scanner.accept("null")):
        return False
    sink("{}")
    return True


def is_object(text: str) -> bool:
    """Whether text is one JSON object."""
    try:
        return isinstance(json_reading.parsed(text), dict)
    except ValueError:
        return False


def section(opening: str, opens: str, close: str, reader: Reader) -> dict[str, Reader]:
    """Readers, by their marks, of calls that each begin with `opens`, from `opening` up to `close`. A model may forget
    either of these two."""

    def read(scanner: Scanner, out: Output) -> Reading[bool]:
        yield from scanner.space()
        return bool((yield from scanner.accept(opens))) and (yield from rest(scanner, out))

    def rest(scanner: Scanner, out: Output) -> Reading[bool]:
        mark = opens
        while mark == opens:
            if not (yield from reader(scanner, out)):
                return False
            yield from scanner.space()
            mark = yield from scanner.accept(opens, close)
        return True

    return {opening: read, opens: rest}


def whole_call(context: Context, close: str = "") -> Reader:
    """A reader of one object or a list of them in a place where answers stand too: all of it must be calls of given
    tools with the arguments that they require, up to `close` or the end of the text."""

    def read(scanner: Scanner, out: Output) -> Reading[bool]:
        yield from scanner.space()
        separator = yield from scanner.accept("[")
        is_list = bool(separator)
        while True:
            yield from scanner.space()
            if not (yield from named_object(scanner, out, known=context.tools, tentative=True)):
                return False
            yield from scanner.space()
            if not is_list:
                break
            separator = yield from scanner.accept(",", "]")
            if separator != ",":
                break
        if is_list and separator != "]":
            return False
        yield from scanner.space()
        if (yield from scanner.peek()) and not (close and (yield from scanner.accept(close))):
            return False
        if not all(_has_required(context.tools[name], text) for name, text in out.calls()):
            return False
        out.commit()
        return True

    return read


def fences(context: Context) -> dict[str, Reader]:
    """Readers of calls that a model puts in a fence where the form of its template was expected, by their marks."""
    return {"```json": whole_call(context, "```")}


def _has_required(schema: Schema, text: str) -> bool:
    try:
        values = json_reading.parsed(text)
    except ValueError:
        return False
    required = schema.get("required")
    return isinstance(values, dict) and all(key in values for key in (required if isinstance(required, list) else ()))


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
        if not (yield from _tagged_value(scanner, out, _types(schema, key), tags)):
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
        kind = _type_of(json_reading.parsed(candidate))
    except ValueError:
        kind = "string"
    fits = not types or kind in types or (kind == "integer" and "number" in types)
    if kind != "string" and (fits or "string" not in types):
        return candidate
    return f'"{json_reading.quoted(text)}"'


def _type_of(value: object) -> str:
    if value is None:
        return "null"
    kinds = {bool: "boolean", int: "integer", float: "number", dict: "object", list: "array"}
    return kinds.get(type(value), "string")


def _types(schema: Schema, key: str) -> frozenset[str]:
    """The types that a parameter may have; empty where the schema does not say."""
    properties = schema.get("properties")
    parameter = properties.get(key) if isinstance(properties, Mapping) else None
    return frozenset(_declared(parameter, schema, 8))


def _declared(part: object, root: Schema, depth: int) -> set[str]:
    if not isinstance(part, Mapping) or not depth:
        return set()
    kind = part.get("type")
    if isinstance(kind, str):
        return {kind}
    if isinstance(kind, list):
        return {one for one in kind if isinstance(one, str)}
    if isinstance(part.get("enum"), list):
        return {_type_of(one) for one in part["enum"]}
    if "const" in part:
        return {_type_of(part["const"])}
    for several in ("anyOf", "oneOf", "allOf"):
        if isinstance(part.get(several), list):
            each = [_declared(one, root, depth - 1) for one in part[several]]
            return set().union(*each) if all(each) or several == "allOf" else set()
    reference = part.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        target: object = root
        for step in reference[2:].split("/"):
            target = target.get(step) if isinstance(target, Mapping) else None
        return _declared(target, root, depth - 1)
    return set()
