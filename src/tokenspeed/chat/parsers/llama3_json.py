# SPDX-License-Identifier: Apache-2.0
"""{"name": …, "parameters": {…}} as the answer, or after <|python_tag|>; several are parted by a semicolon: Llama 3.

Without the mark only the name of a given tool tells a call from an answer in JSON; no grammar waits for such a call, so
it is withheld until it is complete.
"""

from __future__ import annotations

from tokenspeed.chat.parsers import CallFormat, Context, Parser
from tokenspeed.chat.parsers._calls import named_object
from tokenspeed.chat.parsers._frame import Dialect, conversation
from tokenspeed.chat.parsers._machine import Output
from tokenspeed.chat.parsers._scanner import Reading, Scanner

OPEN = "<|python_tag|>"
SIGNS = (('"parameters": dictionary of argument name',), (OPEN, '"parameters": '))
_KEY = '{"name": "'
FORMATS = (
    CallFormat(OPEN, OPEN + _KEY, '", "parameters": ', "}", parting="; "),
    CallFormat(_KEY, _KEY, '", "parameters": ', "}", parting="; ", ambiguous=True),
)


def build(context: Context) -> Parser:
    """The parser for a request."""

    def bare(scanner: Scanner, out: Output) -> Reading[bool]:
        return _calls(scanner, out, known_only=True)

    return conversation(context, Dialect({OPEN: _calls}, first={"{": bare}))


def _calls(scanner: Scanner, out: Output, known_only: bool = False) -> Reading[bool]:
    yield from scanner.space()
    known = out.context.tools if known_only else None
    while (yield from named_object(scanner, out, known=known, tentative=known_only)):
        out.commit()
        yield from scanner.space()
        if (yield from scanner.accept(";")):
            yield from scanner.space()
        yield from scanner.accept(OPEN)
        if (yield from scanner.peek()) != "{":
            return True
    return False
