# SPDX-License-Identifier: Apache-2.0
"""A block of <|DSML|invoke name="NAME"> and <|DSML|parameter name="KEY" string="true|false">: DeepSeek V3.2, whose
block is function_calls, and V4, whose block is tool_calls. The bars are full-width.

The attribute says whether a value is text or JSON.
"""

from __future__ import annotations

from tokenspeed.chat.parsers import CallFormat, Context, Parser, TaggedParameters
from tokenspeed.chat.parsers._frame import Dialect, conversation
from tokenspeed.chat.parsers._tagged import BY_SCHEMA, JSON, TEXT, TaggedCall, Tags, tagged_calls

TOKEN = "\uff5cDSML\uff5c"
BLOCKS = ("function_calls", "tool_calls")
INVOKE, INVOKE_CLOSE = f'<{TOKEN}invoke name="', f"</{TOKEN}invoke>"
PARAMETER = f'<{TOKEN}parameter name="'
_KINDS = {'" string="true">': TEXT, '" string="false">': JSON, '">': BY_SCHEMA}
TAGS = Tags(PARAMETER, _KINDS, f"</{TOKEN}parameter>", (PARAMETER, INVOKE_CLOSE))
CALL = TaggedCall(INVOKE, '">', INVOKE_CLOSE, TAGS)
SIGNS = ((TOKEN,),)
FORMATS: tuple[CallFormat, ...] = ()
TAGGED = CallFormat(
    *(INVOKE, INVOKE, '">\n', ""),
    opening=f"<{TOKEN}{BLOCKS[0]}>\n",
    parting="\n",
    closing=f"\n</{TOKEN}{BLOCKS[0]}>",
    tagged=TaggedParameters(PARAMETER, '" string="true">', '" string="false">', f"</{TOKEN}parameter>\n", INVOKE_CLOSE),
)


def build(context: Context) -> Parser:
    """The parser for a request."""
    starts = {f"<{TOKEN}{block}>": tagged_calls(CALL, *(f"</{TOKEN}{close}>" for close in BLOCKS)) for block in BLOCKS}
    return conversation(context, Dialect(starts, ends_reasoning=tuple(starts)))
