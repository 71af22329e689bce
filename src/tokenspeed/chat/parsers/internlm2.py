# SPDX-License-Identifier: Apache-2.0
"""<|action_start|><|plugin|>{"name": …, "parameters": {…}}<|action_end|>: InternLM 2, 2.5 and 3."""

from __future__ import annotations

from tokenspeed.chat.parsers import CallFormat, Context, Parser
from tokenspeed.chat.parsers._calls import objects
from tokenspeed.chat.parsers._frame import Dialect, conversation

OPEN, CLOSE = "<|action_start|><|plugin|>", "<|action_end|>"
SIGNS = (("<|plugin|>",), ("<|action_start|>",))
FORMATS = (CallFormat(OPEN, f'{OPEN}\n{{"name": "', '", "parameters": ', f"}}{CLOSE}", parting="\n"),)


def build(context: Context) -> Parser:
    """The parser for a request."""
    return conversation(context, Dialect({OPEN: objects(CLOSE)}))
