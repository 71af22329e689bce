# SPDX-License-Identifier: Apache-2.0
"""What a parser runs on: a program over a scanner and an output.

A program lets readers read calls; when a reader says no, all that it read is content. Knows no form of a call and no
mark.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from tokenspeed.chat.parsers import (
    ContentDelta,
    Context,
    Delta,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)
from tokenspeed.chat.parsers._scanner import Reading, Scanner

_SPACES = " \t\r\n"
_LINE = re.compile(r"[\r\n]")


class Output:
    """What a reader has to say. Joins text, and withholds what may yet be taken back.

    White space at the edges of reasoning, and line breaks beside calls, are layout and are not sent.
    """

    def __init__(self, context: Context, scanner: Scanner) -> None:
        self.context = context
        self.done = False
        self._scanner = scanner
        self._sent = _Deltas()
        self._call: _Deltas | None = None  # what a withheld call has said
        self._open = False  # a call has left and has not ended
        self._num_calls = 0
        self._num_kept_calls = 0
        self._space: list[str] = []  # withheld: it is layout if a call follows
        self._bare = True  # no content since the beginning or the last call
        self._layout = False  # white space at the beginning is layout

    def take(self) -> list[Delta]:
        """What may be sent now."""
        return self._sent.take()

    def at_once(self, sink: Callable[[str], object], text: str) -> ContentDelta | ReasoningDelta | None:
        """What the sink would send of this text, if it would send just that and remember nothing: most text of most
        replies. `_space` and `_bare` stay as they are."""
        if self._space or self._bare or not text or text[-1] in _SPACES:
            return None
        if sink == self.content:
            return ContentDelta(text)
        return ReasoningDelta(text) if sink == self.reasoning else None

    @property
    def withholds(self) -> bool:
        return self._call is not None or bool(self._space)

    def reasoning(self, text: str) -> None:
        """More reasoning."""
        if self.done:
            return
        if self._bare:
            text = text.lstrip(_SPACES)
        end = len(text.rstrip(_SPACES))
        if end:
            self._bare = False
            self._sent.text(ReasoningDelta, 0, "".join([*self._space, text[:end]]))
            self._space.clear()
        if end < len(text):
            self._space.append(text[end:])

    def end_reasoning(self) -> None:
        """Content follows."""
        self._space.clear()
        self._bare = self._layout = True

    def content(self, text: str) -> None:
        """More content."""
        if self._bare and self._layout:
            text = text.lstrip(_SPACES)
        if not text:
            return
        end = len(text.rstrip(_SPACES)) if self.context.tools else len(text)
        if end:
            self._bare = self._layout = False
            self._say("".join([*self._space, text[:end]]))
            self._space.clear()
        if end < len(text) and not self._space and not self._bare:
            line = _LINE.search(text, end)
            keep = line.start() if line else len(text)
            self._say(text[end:keep])
            end = keep
        if end < len(text):
            self._space.append(text[end:])

    def start(self, name: str, call_id: str | None = None, *, tentative: bool = False) -> None:
        """A call begins. It leaves at once if calls are sound and it is not tentative, else when it is committed."""
        if self._call is None:
            self._call = _Deltas()
        self._call.add(ToolCallStart(self._num_calls, call_id or self.context.make_id(), name))
        self._num_calls += 1
        if self.context.sound_calls and not tentative:
            self._flush()
            self._open = True
            self._scanner.forget()

    def arguments(self, text: str) -> None:
        """More of the arguments of the call that began last."""
        target = self._sent if self._open else self._call
        assert target is not None
        if not self.done:
            target.text(ToolCallArguments, self._num_calls - 1, text)

    def end(self, *, complete: bool = True, tentative: bool = False) -> None:
        """The call that began last is over, and committed if it is not tentative."""
        end = ToolCallEnd(self._num_calls - 1, complete)
        if self._open:
            self._open = False
            self._kept_call(end)
            self._scanner.record("")
            return
        assert self._call is not None
        self._call.add(end)
        if not tentative:
            self.commit()

    def calls(self) -> list[tuple[str, str]]:
        """Name and arguments of the calls that are not committed."""
        deltas = self._call.deltas() if self._call else []
        texts = {delta.index: delta.text for delta in deltas if isinstance(delta, ToolCallArguments)}
        return [(delta.name, texts.get(delta.index, "")) for delta in deltas if isinstance(delta, ToolCallStart)]

    def commit(self) -> None:
        """Withheld calls are calls."""
        self._flush()
        self._scanner.record("")

    def reject(self, raw: str) -> None:
        """What was read since the last commit, `raw`, is no call."""
        if self._open:
            self._open = False
            self._kept_call(ToolCallEnd(self._num_calls - 1, False))
        self._call = None
        self._num_calls = self._num_kept_calls
        if raw:
            self.content(raw)

    def finish(self) -> None:
        """The text has ended."""
        space = "".join(self._space)
        self._space.clear()
        if not (self._bare and (self._layout or self._num_kept_calls)):
            self._say(space)

    def _flush(self) -> None:
        call, self._call = self._call, None
        self._space.clear()
        self._bare = True
        for delta in call.deltas() if call else ():
            if isinstance(delta, ToolCallEnd):
                self._kept_call(delta)
            elif not self.done:
                self._sent.add(delta)

    def _kept_call(self, end: ToolCallEnd) -> None:
        if not self.done:
            self._sent.add(end)
        self._num_kept_calls = end.index + 1
        self.done = self.done or (end.complete and not self.context.parallel_tool_calls)

    def _say(self, text: str) -> None:
        if text and not self.done:
            self._sent.text(ContentDelta, 0, text)


Program = Callable[[Scanner, Output], Reading[None]]
Reader = Callable[[Scanner, Output], Reading[bool]]


class Machine:
    """A parser that runs a program."""

    def __init__(self, context: Context, program: Program) -> None:
        self._scanner = Scanner()
        self._out = Output(context, self._scanner)
        self._run = program(self._scanner, self._out)
        self._finished = False

    @property
    def done(self) -> bool:
        return self._out.done

    @property
    def withholds(self) -> bool:
        return not self.done and (self._out.withholds or self._scanner.num_waiting > 0)

    def at_once(self, text: str) -> Delta | None:
        if self._out.done:
            return None
        sink = self._scanner.sink_of(text)
        return None if sink is None else self._out.at_once(sink, text)

    def feed(self, text: str) -> list[Delta]:
        assert not self._finished, "fed after its finish"
        if not text or self._out.done:
            return []
        delta = self.at_once(text)
        if delta is not None:
            return [delta]
        self._scanner.push(text)
        next(self._run, None)
        return self._out.take()

    def finish(self) -> list[Delta]:
        assert not self._finished, "finished twice"
        self._finished = True
        if self._out.done:
            return []
        self._scanner.end()
        next(self._run, None)
        self._out.finish()
        return self._out.take()


def attempt(scanner: Scanner, out: Output, mark: str, reader: Reader) -> Reading[None]:
    """Let a reader try to read calls after their mark; what it has read and could not use is content."""
    scanner.record(mark)
    if (yield from reader(scanner, out)):
        scanner.forget()
    else:
        out.reject(scanner.recorded())


class _Deltas:
    """Deltas, with neighbours of one kind joined."""

    def __init__(self) -> None:
        self._deltas: list[Delta] = []
        self._kind: type[Delta] | None = None
        self._index = 0
        self._texts: list[str] = []

    def add(self, delta: Delta) -> None:
        self._join()
        self._deltas.append(delta)

    def text(self, kind: type[Delta], index: int, text: str) -> None:
        if kind is not self._kind:
            self._join()
            self._kind, self._index = kind, index
        self._texts.append(text)

    def deltas(self) -> list[Delta]:
        self._join()
        return self._deltas

    def take(self) -> list[Delta]:
        deltas = self.deltas()
        self._deltas = []
        return deltas

    def _join(self) -> None:
        kind, self._kind = self._kind, None
        text = "".join(self._texts)
        self._texts.clear()
        if not text:
            return
        if kind is ContentDelta:
            self._deltas.append(ContentDelta(text))
        elif kind is ReasoningDelta:
            self._deltas.append(ReasoningDelta(text))
        else:
            self._deltas.append(ToolCallArguments(self._index, text))
