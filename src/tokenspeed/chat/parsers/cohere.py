# SPDX-License-Identifier: Apache-2.0
"""<|START_ACTION|>[{"tool_name": …, "parameters": {…}}]<|END_ACTION|>: Command R7B, Command A and what follows them.

The answer stands between marks of its own. Ids that the model writes count from 0 in each conversation and are not
kept, since the template counts again.
"""

from __future__ import annotations

from tokenspeed.chat.parsers import CallFormat, Context, Parser, ReasoningMarks
from tokenspeed.chat.parsers._calls import objects
from tokenspeed.chat.parsers._frame import Dialect, conversation

OPEN, CLOSE = "<|START_ACTION|>", "<|END_ACTION|>"
REASONING = ReasoningMarks("<|START_THINKING|>", "<|END_THINKING|>")
SIGNS = ((OPEN, CLOSE),)
FORMATS = (
    CallFormat(
        OPEN,
        f'{OPEN}[\n    {{"tool_call_id": "0", "tool_name": "',
        '", "parameters": ',
        f"}}\n]{CLOSE}",
    ),
)


def build(context: Context) -> Parser:
    """The parser for a request."""
    return conversation(
        context,
        Dialect(
            {OPEN: objects(CLOSE, name_key="tool_name")},
            think=(REASONING.open, REASONING.close),
            ends_reasoning=(OPEN,),
            silent=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
        ),
    )
