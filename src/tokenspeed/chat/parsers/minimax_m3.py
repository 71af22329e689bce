# SPDX-License-Identifier: Apache-2.0
"""Nested elements, as in <invoke name="NAME"><KEY>VALUE</KEY></invoke>, each tag after a mark of its own: MiniMax M3.

Objects are elements by key and lists are elements called item. Text is written as it is, so types come from the schema.
"""

from __future__ import annotations

import re

from tokenspeed.chat.parsers import CallFormat, Context, Parser, ReasoningMarks, Schema
from tokenspeed.chat.parsers import _json as json_reading
from tokenspeed.chat.parsers._calls import NAME
from tokenspeed.chat.parsers._frame import Dialect, conversation
from tokenspeed.chat.parsers._machine import Output
from tokenspeed.chat.parsers._scanner import Marks, Reading, Scanner, Sink
from tokenspeed.chat.parsers._schema import items_of, property_of, types_in
from tokenspeed.chat.parsers._tagged import typed

MARK = "]<]minimax[>["
OPEN, CLOSE = f"{MARK}<tool_call>", f"{MARK}</tool_call>"
INVOKE, INVOKE_CLOSE = f'{MARK}<invoke name="', f"{MARK}</invoke>"
ITEM, ITEM_CLOSE = f"{MARK}<item>", f"{MARK}</item>"
REASONING = ReasoningMarks("<mm:think>", "</mm:think>")
SIGNS = ((MARK, "<tool_call>", "</tool_call>", REASONING.open, "<invoke name="),)
FORMATS: tuple[CallFormat, ...] = ()
DEPTH_MAX = 64
_KEY = re.compile(r"[^<>/\r\n][^<>\r\n]*")
_KEY_CHARS = re.compile(r"[^<>\r\n]+")
_EMPTY = {"object": "{}", "array": "[]", "null": "null"}


def build(context: Context) -> Parser:
    """The parser for a request."""
    think = (REASONING.open, REASONING.close)
    return conversation(context, Dialect({OPEN: _calls}, think=think, ends_reasoning=(OPEN,)))


def _calls(scanner: Scanner, out: Output) -> Reading[bool]:
    yield from scanner.space()
    mark = yield from scanner.accept(INVOKE)
    if not mark:
        return False
    while mark == INVOKE:
        name = yield from scanner.word(NAME)
        if not name or not (yield from scanner.accept('">')):
            return False
        out.start(name)
        schema = out.context.tools.get(name, {})
        if not (yield from _object(scanner, out.arguments, _Part(schema, schema), INVOKE_CLOSE)):
            return False
        out.end()
        yield from scanner.space()
        mark = yield from scanner.accept(CLOSE, INVOKE)
    return True


class _Part:
    """A part of the schema of a tool, and how deep it lies."""

    def __init__(self, part: object, root: Schema, depth: int = 0) -> None:
        self._part = part
        self._root = root
        self.depth = depth
        self.types = types_in(part, root)

    def key(self, key: str) -> _Part:
        return _Part(property_of(self._part, key, self._root), self._root, self.depth + 1)

    def item(self) -> _Part:
        return _Part(items_of(self._part, self._root), self._root, self.depth + 1)


def _object(scanner: Scanner, sink: Sink, part: _Part, close: str) -> Reading[bool]:
    """Read elements up to and with `close`, as an object."""
    keys: set[str] = set()
    while True:
        yield from scanner.space()
        mark = yield from scanner.accept(close, f"{MARK}<")
        if mark == close:
            sink("}" if keys else "{}")
            return True
        key = yield from scanner.word(_KEY_CHARS)
        if not mark or not _KEY.fullmatch(key) or key in keys or not (yield from scanner.accept(">")):
            return False
        sink(f'{", " if keys else "{"}"{json_reading.quoted(key)}": ')
        keys.add(key)
        if not (yield from _value(scanner, sink, part.key(key), f"{MARK}</{key}>")):
            return False


def _list(scanner: Scanner, sink: Sink, part: _Part, close: str) -> Reading[bool]:
    """Read items up to and with `close`, as a list."""
    sink("[")
    parting = ""
    while True:
        yield from scanner.space()
        mark = yield from scanner.accept(close, ITEM)
        if mark != ITEM:
            sink("]")
            return bool(mark)
        sink(parting)
        parting = ", "
        if not (yield from _value(scanner, sink, part.item(), ITEM_CLOSE)):
            return False


def _value(scanner: Scanner, sink: Sink, part: _Part, close: str) -> Reading[bool]:
    """Read a value up to and with `close`."""
    if part.depth > DEPTH_MAX:
        return False
    end = Marks((close,))
    if part.types == {"string"}:
        sink('"')
        mark = yield from scanner.until(end, lambda text: sink(json_reading.quoted(text)))
        sink('"')
        return bool(mark)
    pieces: list[str] = []
    yield from scanner.space(pieces.append)
    if (yield from scanner.accept(close)):
        sink(next((_EMPTY[kind] for kind in _EMPTY if kind in part.types), '""'))
        return True
    if (yield from scanner.peek(len(MARK) + 1)) == f"{MARK}<":
        is_list = part.types == {"array"} or (
            "object" not in part.types and (yield from scanner.peek(len(ITEM))) == ITEM
        )
        read = _list if is_list else _object
        return (yield from read(scanner, sink, part, close))
    if not (yield from scanner.until(end, pieces.append)):
        return False
    sink(typed("".join(pieces), part.types))
    return True
