# SPDX-License-Identifier: Apache-2.0
"""<|tools_prefix|>[{"NAME": {…}}, …]<|tools_suffix|>: Apertus. Reasoning stands between <|inner_prefix|> and
<|inner_suffix|>.
"""

from __future__ import annotations

from tokenspeed.chat.parsers import CallFormat, Context, Parser, ReasoningMarks
from tokenspeed.chat.parsers import _json as json_reading
from tokenspeed.chat.parsers._calls import arguments
from tokenspeed.chat.parsers._frame import Dialect, conversation
from tokenspeed.chat.parsers._machine import Output
from tokenspeed.chat.parsers._scanner import Reading, Scanner

OPEN, CLOSE = "<|tools_prefix|>", "<|tools_suffix|>"
REASONING = ReasoningMarks("<|inner_prefix|>", "<|inner_suffix|>")
SIGNS = ((OPEN, CLOSE),)
FORMATS = (CallFormat(OPEN, f'{OPEN}[{{"', '": ', f"}}]{CLOSE}"),)


def build(context: Context) -> Parser:
    """The parser for a request."""
    think = (REASONING.open, REASONING.close)
    return conversation(context, Dialect({OPEN: _calls}, think=think, ends_reasoning=(OPEN,), silent=think[1:]))


def _calls(scanner: Scanner, out: Output) -> Reading[bool]:
    yield from scanner.space()
    separator = yield from scanner.accept("[")
    if not separator:
        return False
    while separator in ("[", ","):
        yield from scanner.space()
        if not (yield from scanner.accept("{")) or not (yield from _call(scanner, out)):
            return False
        yield from scanner.space()
        separator = yield from scanner.accept(",", "]")
    yield from scanner.space()
    yield from scanner.accept(CLOSE)
    return True


def _call(scanner: Scanner, out: Output) -> Reading[bool]:
    name = yield from json_reading.text_string(scanner)
    yield from scanner.space()
    if not name or not (yield from scanner.accept(":")):
        return False
    out.start(name)
    if not (yield from arguments(scanner, out.arguments)):
        return False
    yield from scanner.space()
    if not (yield from scanner.accept("}")):
        return False
    out.end()
    return True
