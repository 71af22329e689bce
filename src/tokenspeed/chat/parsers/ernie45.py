# SPDX-License-Identifier: Apache-2.0
"""<tool_call>{"name": …, "arguments": {…}}</tool_call>, with the answer in <response>: Ernie 4.5 Thinking."""

from __future__ import annotations

from tokenspeed.chat.parsers import CallFormat, Context, Parser
from tokenspeed.chat.parsers._calls import objects
from tokenspeed.chat.parsers._frame import Dialect, conversation

OPEN, CLOSE = "<tool_call>", "</tool_call>"
SIGNS = ((OPEN, "<response>", "</response>"),)
FORMATS = (CallFormat(OPEN, f'{OPEN}\n{{"name": "', '", "arguments": ', f"}}\n{CLOSE}", parting="\n"),)


def build(context: Context) -> Parser:
    """The parser for a request."""
    return conversation(context, Dialect({OPEN: objects(CLOSE)}, silent=("<response>", "</response>")))
