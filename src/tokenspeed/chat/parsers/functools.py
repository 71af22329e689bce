# SPDX-License-Identifier: Apache-2.0
"""functools[{"name": …, "arguments": {…}}] after the answer, if there is one: Firefunction 2, and Phi-4-mini, which
writes <|tool_call|>[…]<|/tool_call|> as well.
"""

from __future__ import annotations

from tokenspeed.chat.parsers import CallFormat, Context, Parser
from tokenspeed.chat.parsers._calls import objects
from tokenspeed.chat.parsers._frame import Dialect, conversation

WORD = "functools["
OPEN, CLOSE = "<|tool_call|>", "<|/tool_call|>"
SIGNS = ((WORD,), ("<|tool|>", "<|/tool|>"))
FORMATS = (
    CallFormat(WORD, f'{WORD}{{"name": "', '", "arguments": ', "}]"),
    CallFormat(OPEN, f'{OPEN}[{{"name": "', '", "arguments": ', f"}}]{CLOSE}"),
)


def build(context: Context) -> Parser:
    """The parser for a request."""
    return conversation(context, Dialect({WORD: objects(in_list=True), OPEN: objects(CLOSE)}))
