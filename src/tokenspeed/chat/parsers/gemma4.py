# SPDX-License-Identifier: Apache-2.0
"""<|tool_call>call:NAME{KEY:VALUE}<tool_call|>, where text stands between <|"|>: Gemma 4.

Reasoning is the channel "thought". Keys are written without quotes.
"""

from __future__ import annotations

import re

from tokenspeed.chat.parsers import CallFormat, Context, Parser, ReasoningMarks
from tokenspeed.chat.parsers import _json as json_reading
from tokenspeed.chat.parsers._calls import NAME
from tokenspeed.chat.parsers._frame import Dialect, conversation
from tokenspeed.chat.parsers._machine import Output
from tokenspeed.chat.parsers._scanner import Marks, Reading, Scanner, Sink

OPEN, CLOSE = "<|tool_call>", "<tool_call|>"
QUOTE = '<|"|>'
REASONING = ReasoningMarks("<|channel>thought", "<channel|>")
SIGNS = ((OPEN, CLOSE, QUOTE),)
FORMATS: tuple[CallFormat, ...] = ()
_QUOTE_END = Marks((QUOTE,))
_KEY = re.compile(r"[^:{}\[\],<>\r\n]+")
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}


def build(context: Context) -> Parser:
    """The parser for a request."""
    think = (REASONING.open, REASONING.close)
    silent = ("<|tool_response>",)  # what the model writes after its calls, to wait for the results
    return conversation(context, Dialect({OPEN: _call}, think=think, ends_reasoning=(OPEN,), silent=silent))


def _call(scanner: Scanner, out: Output) -> Reading[bool]:
    yield from scanner.space()
    if not (yield from scanner.accept("call:")):
        return False
    name = yield from scanner.word(NAME)
    if not name or (yield from scanner.peek()) != "{":
        return False
    out.start(name)
    if not (yield from _value(scanner, out.arguments)):
        return False
    out.end()
    yield from scanner.space()
    yield from scanner.accept(CLOSE)
    return True


def _value(scanner: Scanner, sink: Sink) -> Reading[bool]:
    """Read a value and send it as JSON; iterative, as the JSON reading is."""
    closers: list[str] = []
    while True:
        yield from scanner.space()
        char = yield from scanner.peek()
        if char in ("{", "["):
            if len(closers) == json_reading.DEPTH_MAX:
                return False
            sink(scanner.take(1))
            closers.append("}" if char == "{" else "]")
            yield from scanner.space()
            if (yield from scanner.peek()) != closers[-1]:
                if char == "{" and not (yield from _key(scanner, sink)):
                    return False
                continue
        elif not (yield from _scalar(scanner, char, sink)):
            return False
        if not (yield from _close(scanner, closers, sink)):
            return not closers


def _close(scanner: Scanner, closers: list[str], sink: Sink) -> Reading[bool]:
    """After a value: read what closes, and the comma and key before a further value. True if a value is due."""
    while closers:
        yield from scanner.space()
        if (yield from scanner.accept(closers[-1])):
            sink(closers.pop())
            continue
        if not (yield from scanner.accept(",")):
            return False
        sink(", ")
        return closers[-1] == "]" or (yield from _key(scanner, sink))
    return False


def _key(scanner: Scanner, sink: Sink) -> Reading[bool]:
    yield from scanner.space()
    if (yield from scanner.peek()) == '"':
        key = (yield from json_reading.text_string(scanner)) or ""
    elif (yield from scanner.accept(QUOTE)):
        pieces: list[str] = []
        yield from scanner.until(_QUOTE_END, pieces.append)
        key = "".join(pieces)
    else:
        key = (yield from scanner.word(_KEY)).strip()
        if not key:
            return False
    yield from scanner.space()
    sink(f'"{json_reading.quoted(key)}": ')
    return bool((yield from scanner.accept(":")))


def _scalar(scanner: Scanner, char: str, sink: Sink) -> Reading[bool]:
    if (yield from scanner.accept(QUOTE)):
        sink('"')
        if not (yield from scanner.until(_QUOTE_END, lambda text: sink(json_reading.quoted(text)))):
            return False
        sink('"')
        return True
    word = yield from scanner.accept(*_WORDS)
    if word:
        sink(_WORDS[word])
        return True
    return char != "" and (yield from json_reading.value(scanner, sink))
