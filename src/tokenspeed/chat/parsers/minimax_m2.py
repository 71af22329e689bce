# SPDX-License-Identifier: Apache-2.0
"""<minimax:tool_call><invoke name="NAME"><parameter name="KEY">VALUE</parameter></invoke></minimax:tool_call>: MiniMax
M2. Strings are written without quotes, so types come from the schema.
"""

from __future__ import annotations

from tokenspeed.chat.parsers import CallFormat, Context, Parser, TaggedParameters
from tokenspeed.chat.parsers._frame import Dialect, conversation
from tokenspeed.chat.parsers._tagged import BY_SCHEMA, TaggedCall, Tags, tagged_calls

OPEN, CLOSE = "<minimax:tool_call>", "</minimax:tool_call>"
INVOKE, INVOKE_CLOSE = '<invoke name="', "</invoke>"
PARAMETER = '<parameter name="'
TAGS = Tags(PARAMETER, {'">': BY_SCHEMA}, "</parameter>", (PARAMETER, INVOKE_CLOSE))
CALL = TaggedCall(INVOKE, '">', INVOKE_CLOSE, TAGS)
SIGNS = ((OPEN, "<invoke name="),)
FORMATS: tuple[CallFormat, ...] = ()
TAGGED = CallFormat(
    *(INVOKE, INVOKE, '">\n', ""),
    opening=f"{OPEN}\n",
    parting="\n",
    closing=f"\n{CLOSE}",
    tagged=TaggedParameters(PARAMETER, '">', '">', "</parameter>\n", INVOKE_CLOSE),
)


def build(context: Context) -> Parser:
    """The parser for a request."""
    return conversation(context, Dialect({OPEN: tagged_calls(CALL, CLOSE)}))
