# SPDX-License-Identifier: Apache-2.0
""">>>NAME and a line of {…}, where the recipient "all" means an answer: Functionary 3.2. The prompt ends in >>>."""

from __future__ import annotations

from tokenspeed.chat.parsers import CallFormat, Context, Parser
from tokenspeed.chat.parsers._calls import NAME, arguments
from tokenspeed.chat.parsers._frame import Dialect, conversation
from tokenspeed.chat.parsers._machine import Output
from tokenspeed.chat.parsers._scanner import Reading, Scanner

OPEN, ALL = ">>>", "all"
SIGNS = ((">>>all", "recipient"),)
FORMATS = (CallFormat(OPEN, OPEN, "\n", "", ambiguous=True),)


def build(context: Context) -> Parser:
    """The parser for a request."""
    return conversation(context, Dialect(headers={"": _message, OPEN: _message}))


def _message(scanner: Scanner, out: Output) -> Reading[bool]:
    """Read a recipient, and the call if it is a given tool; other text after >>> is content."""
    name = yield from scanner.word(NAME)
    if not (name == ALL or name in out.context.tools) or not (yield from scanner.accept("\n")):
        return False
    if name == ALL:
        return True
    out.start(name)
    if not (yield from arguments(scanner, out.arguments)):
        return False
    out.end()
    return True
