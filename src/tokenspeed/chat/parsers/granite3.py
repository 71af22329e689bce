# SPDX-License-Identifier: Apache-2.0
"""<|tool_call|>[{"name": …, "arguments": {…}}]: Granite 3. When it thinks, it puts its answer in <response>."""

from __future__ import annotations

from tokenspeed.chat.parsers import CallFormat, Context, Parser
from tokenspeed.chat.parsers._calls import objects
from tokenspeed.chat.parsers._frame import Dialect, conversation

OPEN = "<|tool_call|>"
SIGNS = ((OPEN, "<|start_of_role|>"),)
FORMATS = (CallFormat(OPEN, f'{OPEN}[{{"name": "', '", "arguments": ', "}]"),)


def build(context: Context) -> Parser:
    """The parser for a request."""
    return conversation(context, Dialect({OPEN: objects()}, silent=("<response>", "</response>")))
