# SPDX-License-Identifier: Apache-2.0
"""<TOOLCALL>[{"name": …, "arguments": {…}}]</TOOLCALL>: Nemotron Nano 2."""

from __future__ import annotations

from tokenspeed.chat.parsers import CallFormat, Context, Parser
from tokenspeed.chat.parsers._calls import objects
from tokenspeed.chat.parsers._frame import Dialect, conversation

OPEN, CLOSE = "<TOOLCALL>", "</TOOLCALL>"
SIGNS = ((OPEN, CLOSE),)
FORMATS = (CallFormat(OPEN, f'{OPEN}[{{"name": "', '", "arguments": ', f"}}]{CLOSE}"),)


def build(context: Context) -> Parser:
    """The parser for a request."""
    return conversation(context, Dialect({OPEN: objects(CLOSE)}))
