# SPDX-License-Identifier: Apache-2.0
"""<|tool_call_start|>[f(a=1), g(b="x")]<|tool_call_end|>: LFM 2 and 2.5. Values are Python literals.

Asked for JSON, the models write a list of objects with names in them between the same marks.
"""

from __future__ import annotations

from tokenspeed.chat.parsers import CallFormat, Context, Parser
from tokenspeed.chat.parsers._calls import objects
from tokenspeed.chat.parsers._frame import Dialect, conversation
from tokenspeed.chat.parsers._machine import Output
from tokenspeed.chat.parsers._pythonic import python_calls
from tokenspeed.chat.parsers._scanner import Reading, Scanner

OPEN, CLOSE = "<|tool_call_start|>", "<|tool_call_end|>"
SIGNS = ((OPEN,), ("<|tool_list_start|>",), ("List of tools: [", "keep_past_thinking"))
FORMATS: tuple[CallFormat, ...] = ()


def build(context: Context) -> Parser:
    """The parser for a request."""
    return conversation(context, Dialect({OPEN: _calls}))


def _calls(scanner: Scanner, out: Output) -> Reading[bool]:
    yield from scanner.space()
    if (yield from scanner.peek()) == "{":
        return (yield from objects(CLOSE)(scanner, out))
    if not (yield from python_calls(scanner, out)):
        return False
    yield from scanner.space()
    yield from scanner.accept(CLOSE)
    return True
