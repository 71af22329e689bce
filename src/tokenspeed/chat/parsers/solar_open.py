# SPDX-License-Identifier: Apache-2.0
"""<|tool_call:begin|>ID<|tool_call:name|>NAME<|tool_call:args|>{…}<|tool_call:end|>: Solar Open.

Reasoning, content and calls are messages of their own. The id is the model's own, since its template shows it again;
it stands before the name, so no fixed text leads to the arguments.
"""

from __future__ import annotations

from tokenspeed.chat.parsers import CallFormat, Context, Parser, ReasoningMarks
from tokenspeed.chat.parsers._calls import NAME, arguments
from tokenspeed.chat.parsers._frame import Dialect, conversation
from tokenspeed.chat.parsers._machine import Output
from tokenspeed.chat.parsers._scanner import Reading, Scanner

OPEN, CLOSE = "<|tool_call:begin|>", "<|tool_call:end|>"
NAME_OPEN, ARGUMENTS = "<|tool_call:name|>", "<|tool_call:args|>"
BEGIN, CONTENT, END = "<|begin|>assistant", "<|content|>", "<|end|>"
REASONING = ReasoningMarks("<|think|>", END + BEGIN, answer=CONTENT)
SIGNS = ((OPEN, NAME_OPEN, ARGUMENTS),)
FORMATS: tuple[CallFormat, ...] = ()


def build(context: Context) -> Parser:
    """The parser for a request."""
    silent = (BEGIN, CONTENT, "<|tool_calls|>", "<|calls|>", END)
    return conversation(context, Dialect({OPEN: _call}, think=(REASONING.open, END), silent=silent))


def _call(scanner: Scanner, out: Output) -> Reading[bool]:
    call_id = yield from scanner.word(NAME)
    if not (yield from scanner.accept(NAME_OPEN)):
        return False
    name = yield from scanner.word(NAME)
    if not name or not (yield from scanner.accept(ARGUMENTS)):
        return False
    out.start(name, call_id or None)
    if not (yield from arguments(scanner, out.arguments, (CLOSE,))):
        return False
    out.end()
    yield from scanner.space()
    yield from scanner.accept(CLOSE)
    return True
