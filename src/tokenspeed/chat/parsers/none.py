# SPDX-License-Identifier: Apache-2.0
"""Templates without a known form of a call: reasoning in <think>, and calls only where the frame reads them."""

from __future__ import annotations

from tokenspeed.chat.parsers import CallFormat, Context, Parser
from tokenspeed.chat.parsers._frame import Dialect, conversation

SIGNS: tuple[tuple[str, ...], ...] = ()
FORMATS = (CallFormat("```json", '```json\n{"name": "', '", "arguments": ', "}\n```", parting="\n", ambiguous=True),)


def build(context: Context) -> Parser:
    """The parser for a request."""
    return conversation(context, Dialect())
