# SPDX-License-Identifier: Apache-2.0
"""<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>, with or without line breaks: GLM 4.5
and later. Strings are written without quotes, so types come from the schema.
"""

from __future__ import annotations

from tokenspeed.chat.parsers import CallFormat, Context, Parser, TaggedParameters
from tokenspeed.chat.parsers._calls import NAME
from tokenspeed.chat.parsers._frame import Dialect, conversation
from tokenspeed.chat.parsers._machine import Output
from tokenspeed.chat.parsers._scanner import Reading, Scanner
from tokenspeed.chat.parsers._tagged import BY_SCHEMA, Tags, tagged_parameters

OPEN, CLOSE = "<tool_call>", "</tool_call>"
TAGS = Tags("<arg_key>", {"</arg_key>": BY_SCHEMA}, "</arg_value>", ("<arg_key>", CLOSE), value_open="<arg_value>")
SIGNS = ((OPEN, "<arg_key>", "<arg_value>"),)
FORMATS: tuple[CallFormat, ...] = ()
TAGGED = CallFormat(
    *(OPEN, OPEN, "\n", ""),
    parting="\n",
    tagged=TaggedParameters("<arg_key>", "</arg_key>\n<arg_value>", "</arg_key>\n<arg_value>", "</arg_value>\n", CLOSE),
)


def build(context: Context) -> Parser:
    """The parser for a request."""
    return conversation(context, Dialect({OPEN: _call}))


def _call(scanner: Scanner, out: Output) -> Reading[bool]:
    yield from scanner.space()
    name = yield from scanner.word(NAME)
    if not name or not (yield from scanner.follows(("<arg_key>", CLOSE))):
        return False
    out.start(name)
    if not (yield from tagged_parameters(scanner, out, out.context.tools.get(name, {}), TAGS)):
        return False
    if not (yield from scanner.accept(CLOSE)):
        return False
    out.end()
    return True
