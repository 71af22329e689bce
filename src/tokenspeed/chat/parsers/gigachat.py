# SPDX-License-Identifier: Apache-2.0
"""<|function_call|>{"name": …, "arguments": {…}}: GigaChat 3.1; before it, a message of the role "function call"."""

from __future__ import annotations

from tokenspeed.chat.parsers import CallFormat, Context, Parser
from tokenspeed.chat.parsers._calls import objects
from tokenspeed.chat.parsers._frame import Dialect, conversation

OPEN, ROLE = "<|function_call|>", "function call<|role_sep|>"
SEPARATOR = "<|message_sep|>"
SIGNS = (("<|role_sep|>", SEPARATOR),)
FORMATS = (
    CallFormat(OPEN, f'{OPEN}{{"name": "', '", "arguments": ', "}"),
    CallFormat(ROLE, f'{ROLE}\n{{"name": "', '", "arguments": ', "}"),
)


def build(context: Context) -> Parser:
    """The parser for a request."""
    read = objects(SEPARATOR)
    return conversation(context, Dialect({OPEN: read, ROLE: read}, silent=(SEPARATOR,)))
