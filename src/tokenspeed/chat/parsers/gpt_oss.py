# SPDX-License-Identifier: Apache-2.0
"""Harmony: messages of <|channel|>CHANNEL<|message|>…<|end|>, where a call is sent to=functions.NAME: gpt-oss.

analysis is reasoning; final is content, and so is commentary that is sent to nobody.
"""

from __future__ import annotations

import re

from tokenspeed.chat.parsers import CallFormat, Context, Parser, ReasoningMarks
from tokenspeed.chat.parsers._calls import FENCE, arguments, fence, whole_call_until
from tokenspeed.chat.parsers._machine import Machine, Output, Reader, attempt
from tokenspeed.chat.parsers._scanner import Marks, Reading, Scanner

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
TO = "to="
ENDS = ("<|end|>", "<|return|>", "<|call|>")
REASONING = ReasoningMarks(f"{CHANNEL}analysis{MESSAGE}", f"<|end|>{START}assistant", answer=f"{CHANNEL}final{MESSAGE}")
SIGNS = ((CHANNEL, MESSAGE),)
_BEGINS = Marks((START, CHANNEL, *ENDS))
_HEADER_ENDS = Marks((MESSAGE, START, *ENDS))
_BODY_ENDS = Marks((START, *ENDS))
_ANSWER_MARKS = Marks((FENCE, START, *ENDS))
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")
_JSON = f" <|constrain|>json{MESSAGE}"
FORMATS = (
    *(
        CallFormat(to, to, _JSON, "<|call|>", parting=f"{START}assistant")
        for to in (f"{CHANNEL}commentary to=functions.", f"{CHANNEL}analysis to=functions.")
    ),
    CallFormat(f"{START}assistant to=", f"{START}assistant to=functions.", f"{CHANNEL}commentary{_JSON}", "<|call|>"),
    CallFormat(
        *(" to=functions.", " to=functions.", f"{CHANNEL}commentary{_JSON}", "<|call|>"),
        parting=f"{START}assistant",
        ambiguous=True,
    ),
)


def build(context: Context) -> Parser:
    """The parser for a request."""
    return Machine(context, _program)


def _program(scanner: Scanner, out: Output) -> Reading[None]:
    mark = ""
    if out.context.starts_in_reasoning:
        mark = yield from scanner.until(_BODY_ENDS, out.reasoning)
        out.end_reasoning()
    else:
        spaces: list[str] = []
        yield from scanner.space(spaces.append)
        recipient = yield from scanner.accept(TO)
        if recipient:
            yield from attempt(scanner, out, "".join(spaces) + recipient, _reader(recipient))
        else:
            out.content("".join(spaces))
    while True:
        mark = mark or (yield from scanner.until(_BEGINS, out.content))
        if not mark:
            return
        if mark not in ENDS:
            yield from attempt(scanner, out, mark, _reader(mark))
        mark = ""


def _reader(begin: str) -> Reader:
    def read(scanner: Scanner, out: Output) -> Reading[bool]:
        return _messages(scanner, out, begin)

    return read


def _messages(scanner: Scanner, out: Output, begin: str) -> Reading[bool]:
    """Read a message after the beginning of its header, and further ones where no end stands between."""
    while begin:
        pieces = [begin]
        if (yield from scanner.until(_HEADER_ENDS, pieces.append)) != MESSAGE:
            return False
        header = "".join(pieces)
        channel = _CHANNEL.search(header)
        recipient = _RECIPIENT.search(header)
        is_reasoning = channel is not None and channel[1] == "analysis"
        if recipient and (not is_reasoning or recipient[1] in out.context.tools):
            return bool(out.context.tools) and (yield from _call(scanner, out, recipient[1], begin == TO))
        scanner.forget()
        if is_reasoning:
            end = yield from scanner.until(_BODY_ENDS, out.reasoning)
            out.end_reasoning()
        else:
            end = yield from _content(scanner, out)
        begin = end if end == START else ""
        if begin:
            scanner.record(begin)
    return True


def _content(scanner: Scanner, out: Output) -> Reading[str]:
    """Read the body of an answer up to and with its end, which is returned; calls may stand in it as the frame of
    other dialects reads them."""
    if not out.context.tools:
        return (yield from scanner.until(_BODY_ENDS, out.content))
    yield from scanner.space(out.content)
    if (yield from scanner.peek()) in ("{", "["):
        yield from attempt(scanner, out, "", whole_call_until(*ENDS))
    while True:
        mark = yield from scanner.until(_ANSWER_MARKS, out.content)
        if mark != FENCE:
            return mark
        yield from attempt(scanner, out, mark, fence(FENCE))


def _call(scanner: Scanner, out: Output, name: str, tentative: bool) -> Reading[bool]:
    """tentative: no grammar waits for a call that begins so, and it is withheld until it is complete."""
    out.start(name, tentative=tentative)
    if not (yield from arguments(scanner, out.arguments, ENDS)):
        return False
    out.end(tentative=tentative)
    out.commit()
    yield from scanner.space()
    yield from scanner.accept(*ENDS)
    return True
