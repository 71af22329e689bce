# SPDX-License-Identifier: Apache-2.0
"""Action: and a ```json fence with a list of {"tool_name": …, "parameters": {…}}: Command R and R+.

The word stands in answers too, so all of the fence must be calls of given tools.
"""

from __future__ import annotations

from tokenspeed.chat.parsers import CallFormat, Context, Parser
from tokenspeed.chat.parsers._calls import FENCE, whole_calls
from tokenspeed.chat.parsers._frame import Dialect, conversation
from tokenspeed.chat.parsers._machine import Output
from tokenspeed.chat.parsers._scanner import Reading, Scanner

OPEN = "Action:"
SIGNS = (("Action:", '"tool_name": '),)
FORMATS = (
    CallFormat(
        OPEN,
        f'{OPEN}\n{FENCE}json\n[\n    {{\n        "tool_name": "',
        '",\n        "parameters": ',
        f"\n    }}\n]{FENCE}",
        parting="\n",
        ambiguous=True,
    ),
)


def build(context: Context) -> Parser:
    """The parser for a request."""
    return conversation(context, Dialect({OPEN: _calls}))


def _calls(scanner: Scanner, out: Output) -> Reading[bool]:
    yield from scanner.space()
    if not (yield from scanner.accept(f"{FENCE}json", FENCE)):
        return False
    yield from scanner.space()
    return (yield from whole_calls(scanner, out, (FENCE,), name_key="tool_name"))
