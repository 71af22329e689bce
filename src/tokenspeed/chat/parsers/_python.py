# SPDX-License-Identifier: Apache-2.0
"""Python literals read as they arrive, and sent on as JSON: strings, numbers, True, False, None, lists, dictionaries.

Iterative, as the JSON reading is. Knows no dialect.
"""

from __future__ import annotations

import re

from tokenspeed.chat.parsers._json import DEPTH_MAX, quoted
from tokenspeed.chat.parsers._scanner import Reading, Scanner, Sink, whole

_PLAIN = re.compile(r"[^\\'\"]+")
_NUMBER_RUN = re.compile(r"[-+.0-9eE]+")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_QUOTES = ('"""', "'''", '"', "'")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0", "\n": ""}
_ESCAPES |= {char: char for char in "\\'\""}
_HEX_LEN = {"x": 2, "u": 4, "U": 8}


def value(scanner: Scanner, sink: Sink) -> Reading[bool]:
    """Read one literal and send it as JSON; False where the text cannot be one any more."""
    closers: list[str] = []
    while True:
        yield from scanner.space()
        char = yield from scanner.peek()
        if char in ("{", "["):
            if len(closers) == DEPTH_MAX:
                return False
            sink(scanner.take(1))
            closers.append("}" if char == "{" else "]")
            yield from scanner.space()
            if (yield from scanner.peek()) != closers[-1]:
                if char == "{" and not (yield from _key(scanner, sink)):
                    return False
                continue
        elif not (yield from _scalar(scanner, sink)):
            return False
        if not (yield from _close(scanner, closers, sink)):
            return not closers


def from_python(text: str) -> str:
    """The JSON text of a text that is one literal; empty if it is none."""
    scanner = Scanner()
    scanner.push(text)
    scanner.end()
    pieces: list[str] = []
    is_whole = whole(value(scanner, pieces.append)) and not scanner.num_waiting
    return "".join(pieces) if is_whole else ""


def _close(scanner: Scanner, closers: list[str], sink: Sink) -> Reading[bool]:
    """After a value: read what closes, and the comma and key before a further value. True if a value is due."""
    while closers:
        yield from scanner.space()
        comma = yield from scanner.accept(",")
        yield from scanner.space()
        if (yield from scanner.peek()) == closers[-1]:
            sink(scanner.take(1))
            closers.pop()
            continue
        if not comma:
            return False
        sink(", ")
        return closers[-1] == "]" or (yield from _key(scanner, sink))
    return False


def _key(scanner: Scanner, sink: Sink) -> Reading[bool]:
    if not (yield from _string(scanner, sink)):
        return False
    yield from scanner.space()
    if not (yield from scanner.accept(":")):
        return False
    sink(": ")
    return True


def _scalar(scanner: Scanner, sink: Sink) -> Reading[bool]:
    if (yield from scanner.peek()) in ("'", '"'):
        return (yield from _string(scanner, sink))
    word = yield from scanner.accept(*_WORDS)
    text = _WORDS[word] if word else (yield from scanner.word(_NUMBER_RUN))
    if not word and not _NUMBER.fullmatch(text):
        return False
    sink(text)
    return True


def _string(scanner: Scanner, sink: Sink) -> Reading[bool]:
    quote = yield from scanner.accept(*_QUOTES)
    if not quote:
        return False
    sink('"')
    while True:
        yield from scanner.run(_PLAIN, lambda text: sink(quoted(text)))
        char = yield from scanner.peek()
        if not char:
            return False
        if char == "\\":
            if not (yield from _escape(scanner, sink)):
                return False
        elif (yield from scanner.accept(quote)):
            sink('"')
            return True
        else:
            sink(quoted(scanner.take(1)))


def _escape(scanner: Scanner, sink: Sink) -> Reading[bool]:
    text = yield from scanner.peek(2)
    kind = text[1:]
    if kind not in _HEX_LEN:
        sink(quoted(_ESCAPES.get(kind, text)))
        scanner.take(len(text))
        return bool(kind)
    num_chars = 2 + _HEX_LEN[kind]
    digits = (yield from scanner.peek(num_chars))[2:]
    if not re.fullmatch(r"[0-9a-fA-F]+", digits) or len(digits) != num_chars - 2 or int(digits, 16) > 0x10FFFF:
        return False
    scanner.take(num_chars)
    code = int(digits, 16)
    is_half = 0xD800 <= code < 0xE000  # of a pair, which JSON joins
    sink(f"\\u{code:04x}" if is_half else quoted(chr(code)))
    return True
