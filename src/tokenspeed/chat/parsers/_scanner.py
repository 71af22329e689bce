# SPDX-License-Identifier: Apache-2.0
"""Text that arrives in pieces, read by generators that wait for what decides.

A reading (`yield from scanner.accept("x")`) yields while the text so far leaves its answer open, so the answer depends
on the text alone and not on where it was split. What is undecided is bounded by the literals asked for, so that a text
costs linear time in pieces of any size. Knows no dialect.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable
from typing import TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]
Sink = Callable[[str], object]

SPACE = re.compile(r"[ \t\r\n]+")
LOOKAHEAD_SPACE_MAX = 64


def drop(text: str) -> None:
    """A sink for what is not needed."""


def whole(reading: Reading[T]) -> T:
    """The result of a reading of a text that has ended."""
    try:
        next(reading)
    except StopIteration as stop:
        result: T = stop.value
        return result
    raise AssertionError("a reading waits for more of a text that has ended")


class Marks:
    """Literals to look for at once. None begins with another, so that the one that is found is decided."""

    def __init__(self, literals: Iterable[str]) -> None:
        self.literals = tuple(dict.fromkeys(literals))
        for literal in self.literals:
            assert literal, self.literals
            assert sum(other.startswith(literal) for other in self.literals) == 1, self.literals
        self._pattern = re.compile("|".join(map(re.escape, self.literals)) or r"(?!)")
        self._first = re.compile("|".join(sorted({re.escape(literal[0]) for literal in self.literals})) or r"(?!)")
        self._reach = max(map(len, self.literals), default=1) - 1

    def find(self, text: str, at: int) -> tuple[int, str]:
        """Where the first literal stands and which; (len(text), "") if there is none."""
        found = self._pattern.search(text, at)
        return (found.start(), found.group()) if found else (len(text), "")

    def may_begin_in(self, text: str) -> bool:
        """Whether a literal, or the beginning of one, may stand in the text."""
        return self._first.search(text) is not None

    def undecided(self, text: str, at: int) -> int:
        """Where the end of the text begins what may become a literal; len(text) if nowhere."""
        for first in self._first.finditer(text, max(at, len(text) - self._reach)):
            tail = text[first.start() :]
            if any(literal.startswith(tail) for literal in self.literals):
                return first.start()
        return len(text)


class Scanner:
    """The text that has come and is not yet read. Everything that is read while recording is kept for `recorded`."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._ended = False
        self._record: list[str] | None = None
        self._sought: tuple[Marks, Sink] | None = None

    def sink_of(self, text: str) -> Sink | None:
        """Where all of this text would go if it came now: nothing waits, and none of it can belong to a mark. None
        where that takes reading."""
        if self._sought is None or self._sought[0].may_begin_in(text):
            return None
        return self._sought[1]

    def push(self, text: str) -> None:
        """More text."""
        self._text = self._text[self._at :] + text
        self._at = 0

    def end(self) -> None:
        """There will be no more text."""
        self._ended = True

    @property
    def num_waiting(self) -> int:
        """Characters that have come and are not yet read."""
        return len(self._text) - self._at

    def record(self, text: str) -> None:
        """Keep what is read from here on, and `text` before it."""
        self._record = [text]

    def forget(self) -> None:
        """Stop recording, without what was recorded."""
        self._record = None

    def recorded(self) -> str:
        """What was recorded; stops recording."""
        record, self._record = self._record or [], None
        return "".join(record)

    def take(self, num_chars: int) -> str:
        """The next characters; they must have come."""
        piece = self._text[self._at : self._at + num_chars]
        self._at += num_chars
        if self._record is not None:
            self._record.append(piece)
        return piece

    def peek(self, num_chars: int = 1) -> Reading[str]:
        """The next characters without reading them; fewer where the text ends."""
        while len(self._text) - self._at < num_chars and not self._ended:
            yield
        return self._text[self._at : self._at + num_chars]

    def accept(self, *literals: str) -> Reading[str]:
        """Read the first of these literals that comes next. Returns it, or "" if none does."""
        while True:
            rest = self._text[self._at : self._at + max(map(len, literals))]
            undecided = False
            for literal in literals:
                if rest.startswith(literal) and not undecided:
                    return self.take(len(literal))
                undecided = undecided or (not self._ended and literal.startswith(rest))
            if not undecided:
                return ""
            yield

    def run(self, pattern: re.Pattern[str], sink: Sink = drop) -> Reading[None]:
        """Read all that the pattern, `[a class]+`, matches here."""
        while True:
            found = pattern.match(self._text, self._at)
            if found:
                sink(self.take(found.end() - self._at))
            if self._at < len(self._text) or self._ended:
                return
            yield

    def word(self, pattern: re.Pattern[str]) -> Reading[str]:
        """What `run` reads."""
        pieces: list[str] = []
        yield from self.run(pattern, pieces.append)
        return "".join(pieces)

    def space(self, sink: Sink = drop) -> Reading[None]:
        """Read white space."""
        yield from self.run(SPACE, sink)

    def until(self, marks: Marks, sink: Sink) -> Reading[str]:
        """Read up to and with the first mark. Returns it, or "" when the text ended without one."""
        while True:
            text = self._text
            start, mark = marks.find(text, self._at)
            safe = min(start, len(text) if self._ended else marks.undecided(text, self._at))
            if safe > self._at:
                sink(self.take(safe - self._at))
            if mark and safe == start:
                return self.take(len(mark))
            if self._ended:
                return ""
            if self._at == len(text) and self._record is None:
                self._sought = marks, sink
            yield
            self._sought = None

    def follows(self, literals: tuple[str, ...]) -> Reading[bool]:
        """Whether one of these literals, or the end of the text, comes next after a little white space."""
        while True:
            space = SPACE.match(self._text, self._at)
            start = space.end() if space else self._at
            if start - self._at > LOOKAHEAD_SPACE_MAX:
                return False
            rest = self._text[start : start + max(map(len, literals))]
            if rest.startswith(literals) or (self._ended and not rest):
                return True
            if self._ended or not any(literal.startswith(rest) for literal in literals):
                return False
            yield
