# SPDX-License-Identifier: Apache-2.0
"""A section of <|tool_call_begin|>functions.NAME:INDEX<|tool_call_argument_begin|>{…}<|tool_call_end|>: Kimi K2.

The id is the model's own, since its template shows it again.
"""

from __future__ import annotations

import re

from tokenspeed.chat.parsers import CallFormat, Context, Parser
from tokenspeed.chat.parsers._calls import NAME, arguments, section
from tokenspeed.chat.parsers._frame import Dialect, conversation
from tokenspeed.chat.parsers._machine import Output
from tokenspeed.chat.parsers._scanner import Reading, Scanner

OPEN, CLOSE = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, ARGUMENTS, CALL_CLOSE = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
SIGNS = ((OPEN,),)
_ID = re.compile(r"(?:functions\.)?(.+?)(:\d+)?")
FORMATS = (CallFormat(CALL, f"{CALL}functions.", ":", CALL_CLOSE, number_end=ARGUMENTS, opening=OPEN, closing=CLOSE),)


def build(context: Context) -> Parser:
    """The parser for a request."""
    return conversation(context, Dialect(section(OPEN, CALL, CLOSE, _call), ends_reasoning=(OPEN,)))


def _call(scanner: Scanner, out: Output) -> Reading[bool]:
    yield from scanner.space()
    call_id = yield from scanner.word(NAME)
    parts = _ID.fullmatch(call_id)
    yield from scanner.space()
    if not parts or not (yield from scanner.accept(ARGUMENTS)):
        return False
    out.start(parts[1], call_id if parts[2] else None)
    if not (yield from arguments(scanner, out.arguments, (CALL_CLOSE,))):
        return False
    out.end()
    yield from scanner.space()
    yield from scanner.accept(CALL_CLOSE)
    return True
