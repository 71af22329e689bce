# SPDX-License-Identifier: Apache-2.0
"""Forms of a call that several dialects share and whose arguments are JSON. Knows no mark that begins a call."""

from __future__ import annotations

import re
from collections.abc import Container

from tokenspeed.chat.parsers import _json as json_reading
from tokenspeed.chat.parsers._machine import Output, Reader
from tokenspeed.chat.parsers._scanner import Reading, Scanner, Sink
from tokenspeed.chat.parsers._schema import fits

NAME = re.compile(r"[^\s<>\"'{}()\[\]=|]+")
FENCE = "```"
_ARGUMENT_KEYS = ("arguments", "parameters")
_CALL_KEYS = ("type", "id", "tool_call_id", *_ARGUMENT_KEYS)


def named_object(
    scanner: Scanner,
    out: Output,
    *,
    name_key: str = "name",
    known: Container[str] | None = None,
    tentative: bool = False,
    opened: bool = False,
) -> Reading[bool]:
    """Read {"name": …, "arguments": {…}}, keys in any order; "parameters" means the same as "arguments".

    name_key: what stands for "name". known: where answers stand too, the names that are calls; other names and keys
    refuse it. tentative: the caller commits. opened: the brace has been read.
    """
    name = ""
    early: list[str] | None = None  # arguments that came before the name
    seen = False
    separator = "{" if opened else (yield from scanner.accept("{"))
    while separator in ("{", ","):
        key = yield from json_reading.text_string(scanner)
        if key is None or (known is not None and key not in (name_key, *_CALL_KEYS)):
            return False
        yield from scanner.space()
        if not (yield from scanner.accept(":")):
            return False
        if key == name_key:
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


def objects(*closes: str, name_key: str = "name", in_list: bool = False) -> Reader:
    """A reader of a list of objects with names in them, or of such objects one after the other, up to one of `closes`,
    which a model may forget. in_list: the bracket of a list has been read."""

    def read(scanner: Scanner, out: Output) -> Reading[bool]:
        yield from scanner.space()
        is_list = in_list or bool((yield from scanner.accept("[")))
        more = True
        while more:
            yield from scanner.space()
            if not (yield from named_object(scanner, out, name_key=name_key)):
                return False
            yield from scanner.space()
            separator = yield from scanner.accept(",", "]") if is_list else scanner.accept(",", ";")
            if is_list:
                more = separator == ","
            else:
                yield from scanner.space()
                more = (yield from scanner.peek()) == "{"
        yield from scanner.space()
        if closes:
            yield from scanner.accept(*closes)
        return True

    return read


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


def whole_call(scanner: Scanner, out: Output) -> Reading[bool]:
    """Read calls that are the rest of the text, see `whole_call_until`."""
    return (yield from whole_calls(scanner, out))


def whole_call_until(*closes: str) -> Reader:
    """A reader of one object or a list of them in a place where answers stand too: all of it must be calls of given
    tools with arguments that fit their schemas, up to one of `closes` or the end of the text."""

    def read(scanner: Scanner, out: Output) -> Reading[bool]:
        yield from scanner.space()
        return (yield from whole_calls(scanner, out, closes))

    return read


def fence(close: str) -> Reader:
    """A reader of calls that a model puts in a fence where the form of its template was expected."""
    read = whole_call_until(close)

    def read_after_language(scanner: Scanner, out: Output) -> Reading[bool]:
        yield from scanner.accept(*_FENCE_LANGUAGES)
        return (yield from read(scanner, out))

    return read_after_language


_FENCE_LANGUAGES = ("json", "tool_calls", "tool_call")


def whole_calls(
    scanner: Scanner, out: Output, closes: tuple[str, ...] = (), *, in_list: bool = False, name_key: str = "name"
) -> Reading[bool]:
    """Read what `whole_call_until` says; a list may also be the only value of an object, "tool_calls". in_list: the
    bracket of a list has been read."""
    is_list = in_list or bool((yield from scanner.accept("[")))
    opened = not is_list and bool((yield from scanner.accept("{")))
    is_wrapped = False
    if opened:
        yield from scanner.space()
        is_wrapped = bool((yield from scanner.accept('"tool_calls"')))
        if is_wrapped and not (yield from _opens_list(scanner)):
            return False
    is_first = opened and not is_wrapped
    separator = ","
    while separator == ",":
        yield from scanner.space()
        known = out.context.tools
        read = named_object(scanner, out, name_key=name_key, known=known, tentative=True, opened=is_first)
        if not (yield from read):
            return False
        yield from scanner.space()
        separator = (yield from scanner.accept(",", "]")) if is_list or is_wrapped else ""
    if (is_list or is_wrapped) and separator != "]":
        return False
    yield from scanner.space()
    if is_wrapped and not (yield from scanner.accept("}")):
        return False
    yield from scanner.space()
    if (yield from scanner.peek()) and not (closes and (yield from scanner.accept(*closes))):
        return False
    if not all(fits(out.context.tools[name], text) for name, text in out.calls()):
        return False
    out.commit()
    return True


def _opens_list(scanner: Scanner) -> Reading[bool]:
    """Read the colon and the bracket before the list that is the value of a key."""
    yield from scanner.space()
    if not (yield from scanner.accept(":")):
        return False
    yield from scanner.space()
    return bool((yield from scanner.accept("[")))
