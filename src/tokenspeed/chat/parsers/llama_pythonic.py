# SPDX-License-Identifier: Apache-2.0
"""[f(a=1), g(b="x")] as the answer, or between <|python_start|> and <|python_end|>: Llama 3.2 and 4.

Without the mark only the name of a given tool tells a call from a list. Values are Python literals.
"""

from __future__ import annotations

from tokenspeed.chat.parsers import CallFormat, Context, Parser
from tokenspeed.chat.parsers._frame import Dialect, conversation
from tokenspeed.chat.parsers._machine import Output
from tokenspeed.chat.parsers._pythonic import python_calls
from tokenspeed.chat.parsers._scanner import Reading, Scanner

OPEN, CLOSE = "<|python_start|>", "<|python_end|>"
SIGNS = ((OPEN,), ("[func_name1(",))
FORMATS: tuple[CallFormat, ...] = ()


def build(context: Context) -> Parser:
    """The parser for a request."""
    return conversation(context, Dialect({OPEN: _calls}, first={"[": _bare}))


def _calls(scanner: Scanner, out: Output, known_only: bool = False) -> Reading[bool]:
    if not (yield from python_calls(scanner, out, known_only=known_only)):
        return False
    yield from scanner.space()
    yield from scanner.accept(CLOSE)
    return True


def _bare(scanner: Scanner, out: Output) -> Reading[bool]:
    return (yield from _calls(scanner, out, known_only=True))
