# SPDX-License-Identifier: Apache-2.0
"""JSON read as it arrives: what has left is a beginning of one valid value, or the reading says that it is none.

Text goes on as it was written, except for control characters in strings, which models write and JSON forbids: they are
escaped. Iterative, so depth is a limit and not a crash. Knows no dialect.
"""

from __future__ import annotations

import json
import re
from json.encoder import encode_basestring

from tokenspeed.chat.parsers._scanner import Reading, Scanner, Sink, drop

DEPTH_MAX = 256
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_NUMBER_RUN = re.compile(r"[-+.0-9eE]+")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")


def quoted(text: str) -> str:
    """Text as the inside of a JSON string."""
    return encode_basestring(text)[1:-1]


def parsed(text: str) -> object:
    """The value of JSON text. ValueError if it is none, or too deep."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except RecursionError as error:
        raise ValueError("too deep") from error


def value(scanner: Scanner, sink: Sink = drop) -> Reading[bool]:
    """Read one value; False where the text cannot be one any more."""
    closers: list[str] = []
    while True:
        yield from scanner.space(sink)
        char = yield from scanner.peek()
        if char in ("{", "["):
            if len(closers) == DEPTH_MAX:
                return False
            sink(scanner.take(1))
            closers.append("}" if char == "{" else "]")
            yield from scanner.space(sink)
            if (yield from scanner.peek()) != closers[-1]:
                if char == "{" and not (yield from _key(scanner, sink)):
                    return False
                continue
        elif not (yield from _scalar(scanner, char, sink)):
            return False
        more = yield from _close(scanner, closers, sink)
        if not more:
            return not closers


def text_string(scanner: Scanner) -> Reading[str | None]:
    """Read a string; its value, or None if what comes is no string."""
    yield from scanner.space()
    if (yield from scanner.peek()) != '"':
        return None
    pieces: list[str] = []
    if not (yield from _string(scanner, pieces.append)):
        return None
    return str(json.loads("".join(pieces)))


def _close(scanner: Scanner, closers: list[str], sink: Sink) -> Reading[bool]:
    """After a value: read what closes, and the comma and key before a further value. True if a value is due."""
    while closers:
        yield from scanner.space(sink)
        char = yield from scanner.peek()
        if char == closers[-1]:
            sink(scanner.take(1))
            closers.pop()
            continue
        if char != ",":
            return False
        sink(scanner.take(1))
        yield from scanner.space(sink)
        return closers[-1] == "]" or (yield from _key(scanner, sink))
    return False


def _key(scanner: Scanner, sink: Sink) -> Reading[bool]:
    if (yield from scanner.peek()) != '"' or not (yield from _string(scanner, sink)):
        return False
    yield from scanner.space(sink)
    if (yield from scanner.peek()) != ":":
        return False
    sink(scanner.take(1))
    return True


def _scalar(scanner: Scanner, char: str, sink: Sink) -> Reading[bool]:
    if char == '"':
        return (yield from _string(scanner, sink))
    literal = yield from scanner.accept("true", "false", "null")
    if literal:
        sink(literal)
        return True
    number = yield from scanner.word(_NUMBER_RUN)
    if not _NUMBER.fullmatch(number):
        return False
    sink(number)
    return True


def _string(scanner: Scanner, sink: Sink) -> Reading[bool]:
    """Read a string whose opening quote comes next."""
    sink(scanner.take(1))
    while True:
        yield from scanner.run(_PLAIN, sink)
        char = yield from scanner.peek()
        if char == '"':
            sink(scanner.take(1))
            return True
        if char == "\\":
            escape = yield from scanner.peek(2)
            if escape[1:] == "u":
                escape = yield from scanner.peek(6)
            if not _ESCAPE.fullmatch(escape):
                return False
            sink(scanner.take(len(escape)))
        elif char:
            sink(quoted(scanner.take(1)))
        else:
            return False


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
