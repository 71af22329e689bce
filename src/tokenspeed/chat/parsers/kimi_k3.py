# SPDX-License-Identifier: Apache-2.0
"""Elements <|open|>TAG KEY="VALUE"<|sep|>…<|close|>TAG<|sep|>: Kimi K3. Reasoning is think, the answer is response, and
tools holds calls whose arguments are elements with a key and a type, or one element of JSON.
"""

from __future__ import annotations

import re

from tokenspeed.chat.parsers import CallFormat, Context, Parser, ReasoningMarks
from tokenspeed.chat.parsers._calls import arguments
from tokenspeed.chat.parsers._frame import Dialect, conversation
from tokenspeed.chat.parsers._machine import Output
from tokenspeed.chat.parsers._scanner import Marks, Reading, Scanner
from tokenspeed.chat.parsers._tagged import BY_SCHEMA, JSON, TEXT, Tags, tagged_parameters

OPEN, SEPARATOR, CLOSE = "<|open|>", "<|sep|>", "<|close|>"
TOOLS, TOOLS_CLOSE = f"{OPEN}tools{SEPARATOR}", f"{CLOSE}tools{SEPARATOR}"
CALL, CALL_CLOSE = f"{OPEN}call ", f"{CLOSE}call{SEPARATOR}"
OBJECT, OBJECT_CLOSE = f'{OPEN}json type="object"{SEPARATOR}', f"{CLOSE}json{SEPARATOR}"
ARGUMENT = f'{OPEN}argument key="'
_KINDS = {f'" type="{kind}"{SEPARATOR}': JSON for kind in ("number", "boolean", "null", "object", "array")}
TAGS = Tags(
    ARGUMENT,
    {f'" type="string"{SEPARATOR}': TEXT, **_KINDS, f'"{SEPARATOR}': BY_SCHEMA},
    f"{CLOSE}argument{SEPARATOR}",
    (ARGUMENT, CALL_CLOSE),
    key_escapes=(("&quot;", '"'), ("&amp;", "&")),
)
RESPONSE, RESPONSE_CLOSE = f"{OPEN}response{SEPARATOR}", f"{CLOSE}response{SEPARATOR}"
REASONING = ReasoningMarks(f"{OPEN}think{SEPARATOR}", f"{CLOSE}think{SEPARATOR}", answer=RESPONSE)
SIGNS = ((OPEN, SEPARATOR, CLOSE, "xtml"),)
FORMATS: tuple[CallFormat, ...] = ()
_HEADER_END = Marks((SEPARATOR,))
_TOOL = re.compile(r'\btool="([^"]+)"')


def build(context: Context) -> Parser:
    """The parser for a request."""
    think = (REASONING.open, REASONING.close)
    silent = (RESPONSE, RESPONSE_CLOSE, f"{CLOSE}message{SEPARATOR}")
    return conversation(context, Dialect({TOOLS: _calls}, think=think, ends_reasoning=(TOOLS,), silent=silent))


def _calls(scanner: Scanner, out: Output) -> Reading[bool]:
    yield from scanner.space()
    mark = yield from scanner.accept(CALL)
    if not mark:
        return False
    while mark == CALL:
        if not (yield from _call(scanner, out)):
            return False
        yield from scanner.space()
        mark = yield from scanner.accept(CALL, TOOLS_CLOSE)
    return True


def _call(scanner: Scanner, out: Output) -> Reading[bool]:
    pieces: list[str] = []
    yield from scanner.until(_HEADER_END, pieces.append)
    tool = _TOOL.search("".join(pieces))
    if tool is None:
        return False
    name = tool[1].replace("&quot;", '"').replace("&amp;", "&")
    out.start(name)
    yield from scanner.space()
    if (yield from scanner.accept(OBJECT)):
        if not (yield from arguments(scanner, out.arguments, (OBJECT_CLOSE,))):
            return False
        yield from scanner.space()
        if not (yield from scanner.accept(OBJECT_CLOSE)):
            return False
        yield from scanner.space()
    elif not (yield from tagged_parameters(scanner, out, out.context.tools.get(name, {}), TAGS)):
        return False
    if not (yield from scanner.accept(CALL_CLOSE)):
        return False
    out.end()
    return True
