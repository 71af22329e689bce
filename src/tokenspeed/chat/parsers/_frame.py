# SPDX-License-Identifier: Apache-2.0
"""The frame of most dialects: reasoning, then content with calls in it.

A dialect says which marks begin a call and reads one. Beside its own form, the frame understands calls that a model
puts in a fence, or writes as its whole answer. Knows no mark of a dialect.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tokenspeed.chat.parsers import Context
from tokenspeed.chat.parsers._calls import FENCE, fence, whole_call
from tokenspeed.chat.parsers._machine import Machine, Output, Reader, attempt
from tokenspeed.chat.parsers._scanner import Marks, Reading, Scanner


@dataclass(frozen=True, slots=True)
class Dialect:
    """starts: what reads a call, by the mark that begins it. first: what reads a call that may begin the answer without
    a mark, by the character that it begins with. think: what opens and closes reasoning. ends_reasoning: marks of
    `starts` that no reasoning contains. silent: marks that say nothing, such as those around the answer. headers: what
    reads the rest of what stands before content, by the mark that begins it; "" is the beginning of the message."""

    starts: Mapping[str, Reader] = field(default_factory=dict)
    first: Mapping[str, Reader] = field(default_factory=dict)
    think: tuple[str, str] = ("<think>", "</think>")
    ends_reasoning: tuple[str, ...] = ()
    silent: tuple[str, ...] = ()
    headers: Mapping[str, Reader] = field(default_factory=dict)


def conversation(context: Context, dialect: Dialect) -> Machine:
    """The parser of a dialect whose messages are reasoning, then content with calls in it."""
    starts = {mark: reader for mark, reader in dialect.headers.items() if mark}
    first: dict[str, Reader] = {}
    if context.tools:
        starts.update({FENCE: fence(FENCE), **dialect.starts})
        first = {"{": whole_call, "[": whole_call, **dialect.first}
    marks = Marks([*starts, *dialect.silent])
    header = dialect.headers.get("")

    def program(scanner: Scanner, out: Output) -> Reading[None]:
        mark, spaces = yield from _reasoning(scanner, out, dialect)
        if header is not None and not mark:
            yield from attempt(scanner, out, spaces, header)
        else:
            out.content(spaces)
        if not mark:
            mark = yield from _begin(scanner, out, marks, dialect.silent)
        if not mark:
            reader = first.get((yield from scanner.peek()) if first else "")
            if reader is not None:
                yield from attempt(scanner, out, "", reader)
        while True:
            mark = mark or (yield from scanner.until(marks, out.content))
            if not mark:
                return
            if mark in starts:
                yield from attempt(scanner, out, mark, starts[mark])
            mark = ""

    return Machine(context, program)


def _begin(scanner: Scanner, out: Output, marks: Marks, silent: tuple[str, ...]) -> Reading[str]:
    """Read what stands before the first character of the answer. Returns the mark that it begins with, or ""."""
    while True:
        yield from scanner.space(out.content)
        mark = (yield from scanner.accept(*marks.literals)) if marks.literals else ""
        if mark not in silent:
            return mark


def _reasoning(scanner: Scanner, out: Output, dialect: Dialect) -> Reading[tuple[str, str]]:
    """Read reasoning if the message begins with it. Returns the mark of a call that ended it, or "", and the white
    space that was read and is no reasoning.

    Marks written twice count once, and so does a block that is closed and was never opened.
    """
    opener, closer = dialect.think
    ends = Marks((closer, *(dialect.ends_reasoning if out.context.tools else ())))
    spaces: list[str] = []
    yield from scanner.space(spaces.append)
    mark = yield from scanner.accept(opener, closer)
    if not mark and not out.context.starts_in_reasoning:
        return "", "".join(spaces)
    mark = mark or opener
    while mark in (opener, closer):
        if mark == opener:
            mark = yield from scanner.until(ends, out.reasoning)
        if mark == closer:
            yield from scanner.space()
            mark = yield from scanner.accept(opener, closer)
    out.end_reasoning()
    return mark, ""
