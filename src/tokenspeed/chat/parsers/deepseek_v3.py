# SPDX-License-Identifier: Apache-2.0
"""A section of <|tool▁call▁begin|>function<|tool▁sep|>NAME and a ```json fence: DeepSeek V3 and R1. The bars are
full-width and the gaps are U+2581.
"""

from __future__ import annotations

from tokenspeed.chat.parsers import CallFormat, Context, Parser
from tokenspeed.chat.parsers._calls import NAME, arguments, section
from tokenspeed.chat.parsers._frame import Dialect, conversation
from tokenspeed.chat.parsers._machine import Output
from tokenspeed.chat.parsers._scanner import Reading, Scanner

OPEN, CLOSE = "<\uff5ctool\u2581calls\u2581begin\uff5c>", "<\uff5ctool\u2581calls\u2581end\uff5c>"
CALL, CALL_CLOSE = "<\uff5ctool\u2581call\u2581begin\uff5c>", "<\uff5ctool\u2581call\u2581end\uff5c>"
SEPARATOR = "<\uff5ctool\u2581sep\uff5c>"
FENCE, FENCE_CLOSE = "```json", "```"
SIGNS = ((OPEN, FENCE),)
FORMATS = (
    CallFormat(
        CALL,
        f"{CALL}function{SEPARATOR}",
        f"\n{FENCE}\n",
        f"\n{FENCE_CLOSE}{CALL_CLOSE}",
        opening=OPEN,
        parting="\n",
        closing=CLOSE,
    ),
)


def build(context: Context) -> Parser:
    """The parser for a request."""
    return conversation(context, Dialect(section(OPEN, CALL, CLOSE, _call), ends_reasoning=(OPEN,)))


def _call(scanner: Scanner, out: Output) -> Reading[bool]:
    kind = yield from scanner.word(NAME)
    if not kind or not (yield from scanner.accept(SEPARATOR)):
        return False
    name = yield from scanner.word(NAME)
    yield from scanner.space()
    if not name or not (yield from scanner.accept(FENCE)):
        return False
    out.start(name)
    if not (yield from arguments(scanner, out.arguments, (FENCE_CLOSE,))):
        return False
    out.end()
    for close in (FENCE_CLOSE, CALL_CLOSE):
        yield from scanner.space()
        yield from scanner.accept(close)
    return True
