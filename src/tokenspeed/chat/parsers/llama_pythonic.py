# SPDX-License-Identifier: Apache-2.0
"""[f(a=1), g(b="x")] as the answer, or between <|python_start|> and <|python_end|>: Llama 3.2 and 4.

Without the mark only the name of a given tool tells a call from a list. Values are Python literals.
"""

from __future__ import annotations

import re

from tokenspeed.chat.parsers import CallFormat, Context, Parser
from tokenspeed.chat.parsers import _json as json_reading
from tokenspeed.chat.parsers import _python as python_reading
from tokenspeed.chat.parsers._calls import whole_calls
from tokenspeed.chat.parsers._frame import Dialect, conversation
from tokenspeed.chat.parsers._machine import Output
from tokenspeed.chat.parsers._scanner import Reading, Scanner

OPEN, CLOSE = "<|python_start|>", "<|python_end|>"
SIGNS = ((OPEN,), ("[func_name1(",))
_NAME = re.compile(r"[\w.\-]+")
FORMATS: tuple[CallFormat, ...] = ()


def build(context: Context) -> Parser:
    """The parser for a request."""

    def bare(scanner: Scanner, out: Output) -> Reading[bool]:
        return _calls(scanner, out, known_only=True)

    return conversation(context, Dialect({OPEN: _calls}, first={"[": bare}))


def _calls(scanner: Scanner, out: Output, known_only: bool = False) -> Reading[bool]:
    yield from scanner.space()
    separator = yield from scanner.accept("[")
    if not separator:
        return False
    yield from scanner.space()
    if known_only and (yield from scanner.peek()) == "{":
        return (yield from whole_calls(scanner, out, in_list=True))
    while separator in ("[", ","):
        yield from scanner.space()
        if not (yield from _call(scanner, out, known_only)):
            return False
        yield from scanner.space()
        separator = yield from scanner.accept(",", "]")
    yield from scanner.space()
    yield from scanner.accept(CLOSE)
    return True


def _call(scanner: Scanner, out: Output, known_only: bool) -> Reading[bool]:
    name = yield from scanner.word(_NAME)
    if not name or (known_only and name not in out.context.tools) or not (yield from scanner.accept("(")):
        return False
    out.start(name)
    keys: set[str] = set()
    yield from scanner.space()
    while not (yield from scanner.accept(")")):
        key = yield from scanner.word(_NAME)
        yield from scanner.space()
        if not key or key in keys or not (yield from scanner.accept("=")):
            return False
        out.arguments(f'{", " if keys else "{"}"{json_reading.quoted(key)}": ')
        keys.add(key)
        if not (yield from python_reading.value(scanner, out.arguments)):
            return False
        yield from scanner.space()
        if (yield from scanner.accept(",")):
            yield from scanner.space()
        elif (yield from scanner.peek()) != ")":
            return False
    out.arguments("}" if keys else "{}")
    out.end()
    return True
