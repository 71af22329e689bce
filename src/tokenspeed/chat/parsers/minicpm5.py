# SPDX-License-Identifier: Apache-2.0
"""<function name="NAME"><param name="KEY">VALUE</param></function>: MiniCPM 5.

Text may be quoted as <![CDATA[VALUE]]>; otherwise types come from the schema.
"""

from __future__ import annotations

from tokenspeed.chat.parsers import CallFormat, Context, Parser
from tokenspeed.chat.parsers._frame import Dialect, conversation
from tokenspeed.chat.parsers._machine import Output
from tokenspeed.chat.parsers._scanner import Reading, Scanner
from tokenspeed.chat.parsers._tagged import BY_SCHEMA, TaggedCall, Tags, tagged_call

OPEN, CLOSE = '<function name="', "</function>"
PARAMETER = '<param name="'
TAGS = Tags(PARAMETER, {'">': BY_SCHEMA}, "</param>", (PARAMETER, CLOSE), quotes=("<![CDATA[", "]]>"))
CALL = TaggedCall(OPEN, '">', CLOSE, TAGS)
SIGNS = ((OPEN, PARAMETER),)
FORMATS: tuple[CallFormat, ...] = ()


def build(context: Context) -> Parser:
    """The parser for a request."""
    return conversation(context, Dialect({OPEN: _call}))


def _call(scanner: Scanner, out: Output) -> Reading[bool]:
    return (yield from tagged_call(scanner, out, CALL))
