# SPDX-License-Identifier: Apache-2.0
"""Messages to=RECIPIENT<|message|>…<|eom|>, where calls are <atem:invoke name="NAME"> with <atem:parameter name="KEY">:
Muse. What is sent to=self is reasoning, and to=user the answer. Types come from the schema.
"""

from __future__ import annotations

from tokenspeed.chat.parsers import CallFormat, Context, Parser, ReasoningMarks
from tokenspeed.chat.parsers._calls import NAME
from tokenspeed.chat.parsers._frame import Dialect, conversation
from tokenspeed.chat.parsers._machine import Output
from tokenspeed.chat.parsers._scanner import Marks, Reading, Scanner
from tokenspeed.chat.parsers._tagged import BY_SCHEMA, TaggedCall, Tags, tagged_calls

OPEN, CLOSE = "<atem:function_calls>", "</atem:function_calls>"
INVOKE, INVOKE_CLOSE = '<atem:invoke name="', "</atem:invoke>"
PARAMETER = '<atem:parameter name="'
START, MESSAGE, END = "<|start|>assistant", "<|message|>", "<|eom|>"
TAGS = Tags(PARAMETER, {'">': BY_SCHEMA}, "</atem:parameter>", (PARAMETER, INVOKE_CLOSE))
CALL = TaggedCall(INVOKE, '">', INVOKE_CLOSE, TAGS)
REASONING = ReasoningMarks(f" to=self{MESSAGE}", END + START, answer=f" to=user{MESSAGE}")
SIGNS = ((OPEN, INVOKE, "to=self"),)
FORMATS: tuple[CallFormat, ...] = ()
_END = Marks((END,))


def build(context: Context) -> Parser:
    """The parser for a request."""
    dialect = Dialect(
        {OPEN: tagged_calls(CALL, CLOSE)},
        think=(REASONING.open.lstrip(), END),
        silent=(END, "<|eot|>"),
        headers={"": _header, START: _header},
    )
    return conversation(context, dialect)


def _header(scanner: Scanner, out: Output) -> Reading[bool]:
    """Read the recipient of a message, and the message if it is reasoning."""
    yield from scanner.space()
    if not (yield from scanner.accept("to=")):
        return bool((yield from scanner.accept(MESSAGE)))
    recipient = yield from scanner.word(NAME)
    if not recipient or not (yield from scanner.accept(MESSAGE)):
        return False
    if recipient == "self":
        scanner.forget()
        yield from scanner.until(_END, out.reasoning)
        out.end_reasoning()
    return True
