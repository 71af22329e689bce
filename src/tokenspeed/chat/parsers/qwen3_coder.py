# SPDX-License-Identifier: Apache-2.0
"""<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>: Qwen3-Coder and Qwen 3.5.

Values are written without quotes, so their types come from the schema.
"""

from __future__ import annotations

from tokenspeed.chat.parsers import CallFormat, Context, Parser
from tokenspeed.chat.parsers._calls import NAME
from tokenspeed.chat.parsers._frame import Dialect, conversation
from tokenspeed.chat.parsers._machine import Output
from tokenspeed.chat.parsers._scanner import Reading, Scanner
from tokenspeed.chat.parsers._tagged import Tags, tagged_parameters

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_CLOSE = "<function=", "</function>"
TAGS = Tags("<parameter=", ">", "</parameter>", ("<parameter=", FUNCTION_CLOSE), lines=True)
SIGNS = ((OPEN, FUNCTION, "<parameter="),)
FORMATS: tuple[CallFormat, ...] = ()


def build(context: Context) -> Parser:
    """The parser for a request."""

    def bare(scanner: Scanner, out: Output) -> Reading[bool]:
        """A call whose opening mark was forgotten; the name tells it from text."""
        if not (yield from _function(scanner, out, known_only=True)):
            return False
        yield from scanner.space()
        yield from scanner.accept(CLOSE)
        return True

    return conversation(context, Dialect({OPEN: _calls, FUNCTION: bare}))


def _calls(scanner: Scanner, out: Output) -> Reading[bool]:
    yield from scanner.space()
    if not (yield from scanner.accept(FUNCTION)):
        return False
    while (yield from _function(scanner, out)):
        yield from scanner.space()
        if (yield from scanner.accept(CLOSE, FUNCTION)) != FUNCTION:
            return True
    return False


def _function(scanner: Scanner, out: Output, known_only: bool = False) -> Reading[bool]:
    """A call after its <function=."""
    name = yield from scanner.word(NAME)
    if not name or (known_only and name not in out.context.tools) or not (yield from scanner.accept(">")):
        return False
    out.start(name)
    if not (yield from tagged_parameters(scanner, out, out.context.tools.get(name, {}), TAGS)):
        return False
    if not (yield from scanner.accept(FUNCTION_CLOSE)):
        return False
    out.end()
    return True
