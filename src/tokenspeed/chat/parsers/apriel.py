# SPDX-License-Identifier: Apache-2.0
"""<tool_calls>[{"name": …, "arguments": {…}}]</tool_calls>, after reasoning in words: Apriel 1.5 and 1.6.

The prompt opens the reasoning with a sentence, and a mark in brackets ends it.
"""

from __future__ import annotations

from tokenspeed.chat.parsers import CallFormat, Context, Parser, ReasoningMarks
from tokenspeed.chat.parsers._calls import objects
from tokenspeed.chat.parsers._frame import Dialect, conversation

OPEN, CLOSE = "<tool_calls>", "</tool_calls>"
REASONING = ReasoningMarks("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]")
SIGNS = ((OPEN, CLOSE, "[BEGIN FINAL RESPONSE]"),)
FORMATS = (CallFormat(OPEN, f'{OPEN}[{{"name": "', '", "arguments": ', f"}}]{CLOSE}"),)


def build(context: Context) -> Parser:
    """The parser for a request."""
    return conversation(
        context,
        Dialect(
            {OPEN: objects(CLOSE)},
            think=(REASONING.open, REASONING.close),
            silent=(REASONING.close, "[END FINAL RESPONSE]"),
        ),
    )
