# SPDX-License-Identifier: Apache-2.0
"""<tool_calls> with a list of {"name": …, "arguments": {…}}, or one in each line: MiniMax M1, Hunyuan A13B.

Hunyuan puts its answer in <answer>.
"""

from __future__ import annotations

from tokenspeed.chat.parsers import CallFormat, Context, Parser
from tokenspeed.chat.parsers._calls import objects
from tokenspeed.chat.parsers._frame import Dialect, conversation

OPEN, CLOSE = "<tool_calls>", "</tool_calls>"
SIGNS = ((OPEN, CLOSE, '"name": '),)
FORMATS = (CallFormat(OPEN, f'{OPEN}[{{"name": "', '", "arguments": ', f"}}]{CLOSE}"),)


def build(context: Context) -> Parser:
    """The parser for a request."""
    return conversation(context, Dialect({OPEN: objects(CLOSE)}, silent=("<answer>", "</answer>")))
