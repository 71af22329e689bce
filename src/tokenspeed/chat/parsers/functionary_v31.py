# SPDX-License-Identifier: Apache-2.0
"""<function=NAME>{…}</function>: Functionary 3.1 and Llama 3.1 with templates that ask for it.

Its Python tool is written as <|python_tag|> and code, which is given back as content.
"""

from __future__ import annotations

from tokenspeed.chat.parsers import CallFormat, Context, Parser
from tokenspeed.chat.parsers._calls import NAME, arguments
from tokenspeed.chat.parsers._frame import Dialect, conversation
from tokenspeed.chat.parsers._machine import Output
from tokenspeed.chat.parsers._scanner import Reading, Scanner

OPEN, CLOSE = "<function=", "</function>"
SIGNS = (("<function=example_function_name>{", CLOSE), ("'<function='", "tojson + '</function>'"))
FORMATS = (CallFormat(OPEN, OPEN, ">", CLOSE),)


def build(context: Context) -> Parser:
    """The parser for a request."""
    return conversation(context, Dialect({OPEN: _call}))


def _call(scanner: Scanner, out: Output) -> Reading[bool]:
    name = yield from scanner.word(NAME)
    if not name or not (yield from scanner.accept(">")):
        return False
    out.start(name)
    if not (yield from arguments(scanner, out.arguments, (CLOSE,))):
        return False
    out.end()
    yield from scanner.space()
    yield from scanner.accept(CLOSE)
    return True
