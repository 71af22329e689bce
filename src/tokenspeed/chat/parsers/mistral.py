# SPDX-License-Identifier: Apache-2.0
"""[TOOL_CALLS] and then a list of {"name": …, "arguments": {…}}, or NAME[ARGS]{…}: Mistral, Devstral, Magistral.

Ids have nine characters, since the templates take no others.
"""

from __future__ import annotations

from dataclasses import replace

from tokenspeed.chat.parsers import CallFormat, Context, Parser, ReasoningMarks
from tokenspeed.chat.parsers._calls import NAME, arguments, named_object
from tokenspeed.chat.parsers._frame import Dialect, conversation
from tokenspeed.chat.parsers._machine import Output
from tokenspeed.chat.parsers._scanner import Reading, Scanner

OPEN, CALL_ID, ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
SIGNS = ((OPEN,),)
REASONING = ReasoningMarks("[THINK]", "[/THINK]")
_ID_LEN = 9
FORMATS = (
    CallFormat(OPEN, OPEN, ARGUMENTS, ""),
    CallFormat(OPEN, f'{OPEN}[{{"name": "', '", "arguments": ', "}]"),
)


def build(context: Context) -> Parser:
    """The parser for a request."""
    make_id = context.make_id
    short = replace(context, make_id=lambda: make_id()[-_ID_LEN:])
    return conversation(short, Dialect({OPEN: _calls}, think=(REASONING.open, REASONING.close)))


def _calls(scanner: Scanner, out: Output) -> Reading[bool]:
    yield from scanner.space()
    char = yield from scanner.peek()
    if char == "[":
        return (yield from _list(scanner, out))
    if char == "{":
        return (yield from named_object(scanner, out))
    name = yield from scanner.word(NAME)
    call_id = ""
    if name and (yield from scanner.accept(CALL_ID)):
        call_id = yield from scanner.word(NAME)
    given = yield from scanner.accept(ARGUMENTS)
    yield from scanner.space()
    if not name or (not given and (yield from scanner.peek()) != "{"):
        return False
    out.start(name, call_id or None)
    if not (yield from arguments(scanner, out.arguments)):
        return False
    out.end()
    return True


def _list(scanner: Scanner, out: Output) -> Reading[bool]:
    separator = yield from scanner.accept("[")
    while separator in ("[", ","):
        yield from scanner.space()
        if not (yield from named_object(scanner, out)):
            return False
        yield from scanner.space()
        separator = yield from scanner.accept(",", "]")
    return True
