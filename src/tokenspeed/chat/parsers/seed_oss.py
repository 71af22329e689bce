# SPDX-License-Identifier: Apache-2.0
"""<seed:tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></seed:tool_call>: Seed-OSS.

Values are written without quotes and as they are, line breaks at their ends too; their types come from the schema.
"""

from __future__ import annotations

from tokenspeed.chat.parsers import CallFormat, Context, Parser, ReasoningMarks, TaggedParameters
from tokenspeed.chat.parsers._frame import Dialect, conversation
from tokenspeed.chat.parsers._tagged import BY_SCHEMA, TaggedCall, Tags, tagged_calls

OPEN, CLOSE = "<seed:tool_call>", "</seed:tool_call>"
FUNCTION, FUNCTION_CLOSE = "<function=", "</function>"
TAGS = Tags("<parameter=", {">": BY_SCHEMA}, "</parameter>", ("<parameter=", FUNCTION_CLOSE))
CALL = TaggedCall(FUNCTION, ">", FUNCTION_CLOSE, TAGS)
REASONING = ReasoningMarks("<seed:think>", "</seed:think>")
SIGNS = ((OPEN, FUNCTION, "<parameter=", REASONING.open),)
FORMATS: tuple[CallFormat, ...] = ()
TAGGED = CallFormat(
    *(OPEN, f"{OPEN}\n{FUNCTION}", ">\n", f"\n{CLOSE}"),
    parting="\n",
    tagged=TaggedParameters("<parameter=", ">", ">", "</parameter>\n", FUNCTION_CLOSE),
)


def build(context: Context) -> Parser:
    """The parser for a request."""
    think = (REASONING.open, REASONING.close)
    return conversation(context, Dialect({OPEN: tagged_calls(CALL, CLOSE)}, think=think))
