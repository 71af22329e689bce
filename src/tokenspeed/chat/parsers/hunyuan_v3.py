# SPDX-License-Identifier: Apache-2.0
"""A section of <tool_call>NAME<tool_sep><arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>, where each name
of a tag ends in :opensource: Hunyuan 3. Strings are written without quotes, so types come from the schema.
"""

from __future__ import annotations

from tokenspeed.chat.parsers import CallFormat, Context, Parser, ReasoningMarks
from tokenspeed.chat.parsers._frame import Dialect, conversation
from tokenspeed.chat.parsers._tagged import BY_SCHEMA, TaggedCall, Tags, tagged_calls

SUFFIX = ":opensource"
OPEN, CLOSE = f"<tool_calls{SUFFIX}>", f"</tool_calls{SUFFIX}>"
CALL_OPEN, CALL_CLOSE = f"<tool_call{SUFFIX}>", f"</tool_call{SUFFIX}>"
KEY, KEY_CLOSE = f"<arg_key{SUFFIX}>", f"</arg_key{SUFFIX}>"
VALUE, VALUE_CLOSE = f"<arg_value{SUFFIX}>", f"</arg_value{SUFFIX}>"
TAGS = Tags(KEY, {KEY_CLOSE: BY_SCHEMA}, VALUE_CLOSE, (KEY, CALL_CLOSE), value_open=VALUE)
CALL = TaggedCall(CALL_OPEN, f"<tool_sep{SUFFIX}>", CALL_CLOSE, TAGS)
REASONING = ReasoningMarks(f"<think{SUFFIX}>", f"</think{SUFFIX}>")
SIGNS = (("<tool_calls{}>", "<tool_sep{}>", SUFFIX), (OPEN,))
FORMATS: tuple[CallFormat, ...] = ()


def build(context: Context) -> Parser:
    """The parser for a request."""
    think = (REASONING.open, REASONING.close)
    return conversation(context, Dialect({OPEN: tagged_calls(CALL, CLOSE)}, think=think))
