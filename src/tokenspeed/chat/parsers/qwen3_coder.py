# SPDX-License-Identifier: Apache-2.0
"""<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>: Qwen3-Coder and Qwen 3.5.

Values are written without quotes, so their types come from the schema.
"""

from __future__ import annotations

from tokenspeed.chat.parsers import CallFormat, Context, Parser, TaggedParameters
from tokenspeed.chat.parsers._frame import Dialect, conversation
from tokenspeed.chat.parsers._machine import Output
from tokenspeed.chat.parsers._scanner import Reading, Scanner
from tokenspeed.chat.parsers._tagged import BY_SCHEMA, TaggedCall, Tags, tagged_call, tagged_calls

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_CLOSE = "<function=", "</function>"
TAGS = Tags("<parameter=", {">": BY_SCHEMA}, "</parameter>", ("<parameter=", FUNCTION_CLOSE), lines=True)
CALL = TaggedCall(FUNCTION, ">", FUNCTION_CLOSE, TAGS)
SIGNS = ((OPEN, FUNCTION, "<parameter="),)
FORMATS: tuple[CallFormat, ...] = ()
TAGGED = CallFormat(
    *(OPEN, f"{OPEN}\n{FUNCTION}", ">\n", f"\n{CLOSE}"),
    parting="\n",
    tagged=TaggedParameters("<parameter=", ">\n", ">\n", "\n</parameter>\n", FUNCTION_CLOSE),
)


def build(context: Context) -> Parser:
    """The parser for a request."""
    return conversation(context, Dialect({OPEN: tagged_calls(CALL, CLOSE), FUNCTION: _bare}))


def _bare(scanner: Scanner, out: Output) -> Reading[bool]:
    """A call whose opening mark was forgotten; the name tells it from text."""
    if not (yield from tagged_call(scanner, out, CALL, known_only=True)):
        return False
    yield from scanner.space()
    yield from scanner.accept(CLOSE)
    return True
