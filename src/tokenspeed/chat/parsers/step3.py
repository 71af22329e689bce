# SPDX-License-Identifier: Apache-2.0
"""A section of <|tool_call_begin|>function<|tool_sep|> and <steptml:invoke name="NAME"> with <steptml:parameter
name="KEY">: Step 3. The bars are full-width. Strings are written without quotes, so types come from the schema.
"""

from __future__ import annotations

from tokenspeed.chat.parsers import CallFormat, Context, Parser
from tokenspeed.chat.parsers._calls import NAME, section
from tokenspeed.chat.parsers._frame import Dialect, conversation
from tokenspeed.chat.parsers._machine import Output
from tokenspeed.chat.parsers._scanner import Reading, Scanner
from tokenspeed.chat.parsers._tagged import BY_SCHEMA, TaggedCall, Tags, tagged_call

OPEN, CLOSE = "<\uff5ctool_calls_begin\uff5c>", "<\uff5ctool_calls_end\uff5c>"
CALL, CALL_CLOSE = "<\uff5ctool_call_begin\uff5c>", "<\uff5ctool_call_end\uff5c>"
SEPARATOR = "<\uff5ctool_sep\uff5c>"
INVOKE, INVOKE_CLOSE = '<steptml:invoke name="', "</steptml:invoke>"
PARAMETER = '<steptml:parameter name="'
TAGS = Tags(PARAMETER, {'">': BY_SCHEMA}, "</steptml:parameter>", (PARAMETER, INVOKE_CLOSE))
FORM = TaggedCall(INVOKE, '">', INVOKE_CLOSE, TAGS)
SIGNS = (("steptml:invoke",),)
FORMATS: tuple[CallFormat, ...] = ()


def build(context: Context) -> Parser:
    """The parser for a request."""
    return conversation(context, Dialect(section(OPEN, CALL, CLOSE, _call), ends_reasoning=(OPEN,)))


def _call(scanner: Scanner, out: Output) -> Reading[bool]:
    kind = yield from scanner.word(NAME)
    if not kind or not (yield from scanner.accept(SEPARATOR)):
        return False
    yield from scanner.space()
    if not (yield from scanner.accept(INVOKE)) or not (yield from tagged_call(scanner, out, FORM)):
        return False
    yield from scanner.space()
    yield from scanner.accept(CALL_CLOSE)
    return True
