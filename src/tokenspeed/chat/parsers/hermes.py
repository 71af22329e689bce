# SPDX-License-Identifier: Apache-2.0
"""<tool_call>{"name": …, "arguments": {…}}</tool_call>: Hermes, Qwen 2.5 and 3, SmolLM3 and many more.

Small models of this dialect also put the object in <tools>; some others put a list of all calls in <tool_calls>.
"""

from __future__ import annotations

from tokenspeed.chat.parsers import CallFormat, Context, Parser
from tokenspeed.chat.parsers._calls import named_object, whole_call_until
from tokenspeed.chat.parsers._frame import Dialect, conversation
from tokenspeed.chat.parsers._machine import Output
from tokenspeed.chat.parsers._scanner import Reading, Scanner

OPEN, CLOSE = "<tool_call>", "</tool_call>"
SIGNS = ((OPEN,),)
FORMATS = (CallFormat(OPEN, f'{OPEN}\n{{"name": "', '", "arguments": ', f"}}\n{CLOSE}", parting="\n"),)


def build(context: Context) -> Parser:
    """The parser for a request."""
    also = {f"<{tag}>": whole_call_until(f"</{tag}>") for tag in ("tools", "tool_calls")}
    return conversation(context, Dialect({OPEN: _calls, **also}))


def _calls(scanner: Scanner, out: Output) -> Reading[bool]:
    """Calls up to the closing mark; a model that forgets it, or writes a mark twice, is understood."""
    again = OPEN
    while again:
        yield from scanner.space()
        again = yield from scanner.accept(OPEN)
    while (yield from named_object(scanner, out)):
        yield from scanner.space()
        if (yield from scanner.accept(CLOSE)) or (yield from scanner.peek()) != "{":
            return True
    return False
