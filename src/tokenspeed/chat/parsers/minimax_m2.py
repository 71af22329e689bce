# SPDX-License-Identifier: Apache-2.0
"""<minimax:tool_call><invoke name="NAME"><parameter name="KEY">VALUE</parameter></invoke></minimax:tool_call>: MiniMax
M2. Strings are written without quotes, so types come from the schema.
"""

from __future__ import annotations

from tokenspeed.chat.parsers import CallFormat, Context, Parser
from tokenspeed.chat.parsers._calls import NAME
from tokenspeed.chat.parsers._frame import Dialect, conversation
from tokenspeed.chat.parsers._machine import Output
from tokenspeed.chat.parsers._scanner import Reading, Scanner
from tokenspeed.chat.parsers._tagged import Tags, tagged_parameters

OPEN, CLOSE = "<minimax:tool_call>", "</minimax:tool_call>"
INVOKE, INVOKE_CLOSE = '<invoke name="', "</invoke>"
PARAMETER = '<parameter name="'
TAGS = Tags(PARAMETER, '">', "</parameter>", (PARAMETER, INVOKE_CLOSE))
SIGNS = ((OPEN, "<invoke name="),)
FORMATS: tuple[CallFormat, ...] = ()


def build(context: Context) -> Parser:
    """The parser for a request."""
    return conversation(context, Dialect({OPEN: _calls}))


def _calls(scanner: Scanner, out: Output) -> Reading[bool]:
    yield from scanner.space()
    if not (yield from scanner.accept(INVOKE)):
        return False
    while (yield from _invoke(scanner, out)):
        yield from scanner.space()
        if (yield from scanner.accept(CLOSE, INVOKE)) != INVOKE:
            return True
    return False


def _invoke(scanner: Scanner, out: Output) -> Reading[bool]:
    """A call after its <invoke name="."""
    name = yield from scanner.word(NAME)
    if not name or not (yield from scanner.accept('">')):
        return False
    out.start(name)
    if not (yield from tagged_parameters(scanner, out, out.context.tools.get(name, {}), TAGS)):
        return False
    if not (yield from scanner.accept(INVOKE_CLOSE)):
        return False
    out.end()
    return True
