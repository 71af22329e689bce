# SPDX-License-Identifier: Apache-2.0
"""One reply as every dialect of the wire says it: content, reasoning, calls and an end, read by the parser of the
model's own dialect while it is written. Knows no wire dialect.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

import msgspec

from tokenspeed.chat.parsers import Context, Delta, Parser, ToolCallEnd, opens_reasoning, resolve, tool_schemas
from tokenspeed.llm.outputs import LogprobEntry, RequestOutput
from tokenspeed.server.chat import Conversation
from tokenspeed.server.generation import Job, Tally, TextLane, finish_text, pieces
from tokenspeed.server.served import Served

Reply = Callable[[], Parser]
"""Makes what reads one choice."""


@dataclass(frozen=True, slots=True)
class End:
    """A choice is over. reason: in the words of the OpenAI API; "tool_calls" where it carries complete calls.
    stopped_by: the stop string or token that ended it."""

    reason: str
    stopped_by: str | int | None = None


class News(msgspec.Struct, frozen=True):
    """What is new of one choice. logprobs: of the tokens that came, whose text may still be withheld. output: of the
    engine, as it came."""

    choice: int
    deltas: Sequence[Delta]
    logprobs: Sequence[LogprobEntry]
    end: End | None
    output: RequestOutput


def reply_to(served: Served, conversation: Conversation) -> Reply:
    """How the reply to a conversation is read. Without tools, what looks like a call is content."""
    opening = ""
    if conversation.add_generation_prompt:
        opening = served.llm.input_processor.reply_opening(conversation.template_kwargs)
    context = Context(
        tools=tool_schemas(conversation.callable_tools),
        starts_in_reasoning=opens_reasoning(opening),
        parallel_tool_calls=conversation.parallel_tool_calls,
        sound_calls=conversation.sound_calls,
    )
    build = resolve(served.dialect)
    return lambda: build(context)


class TextNews:
    """A way past `news_of` for what most news is; see TextLane."""

    def __init__(self) -> None:
        self.lane = TextLane()
        self._parser: Parser | None = None

    def open(self, parser: Parser) -> None:
        """The only choice is read by this parser."""
        self._parser = parser

    async def next(self) -> Delta | None:
        """What the reply goes on with, once it does. None where `news_of` has to be asked."""
        text = await self.lane.wait()
        if text is None or self._parser is None:
            return None
        delta = self._parser.at_once(text)
        if delta is not None:
            self.lane.take()
        return delta


async def news_of(
    served: Served, job: Job, reply: Reply, tally: Tally, text_news: TextNews | None = None
) -> AsyncGenerator[News, None]:
    """What each choice says, as it comes. A choice whose parser needs no more text ends there; when all have, what
    still runs is cancelled. Pages are kept only for a reply whose calls have results to come."""
    make = reply if served.tracer is None else lambda: _TimedParser(reply(), tally)
    readers = [_Reader(make()) for _ in range(job.num_choices)]
    waits_for_results, num_open = False, len(readers)
    if text_news is not None and job.num_choices == 1:
        text_news.open(readers[0].parser)
    async with aclosing(pieces(served, job, tally, None if text_news is None else text_news.lane)) as found:
        async for piece in found:
            for choice, completion in piece.choices:
                reader = readers[choice]
                if reader.has_ended:
                    continue
                deltas = reader.read(completion.text, is_last=completion.finish_reason is not None)
                end = None
                if completion.finish_reason is not None:
                    end = reader.end(finish_text(completion.finish_reason), completion.stop_reason)
                elif reader.is_done:
                    tally.finished[choice] = "stop"
                    end = reader.end("stop", None)
                if end is not None and end.reason == "tool_calls":
                    waits_for_results, tally.said[choice] = True, end.reason
                yield News(choice, deltas, completion.logprobs or (), end, piece.output)
                num_open -= end is not None
            if not num_open:
                break
    if job.retain is not None and not waits_for_results:
        served.llm.release(job.request_id)
        served.sessions.released(job.retain.session)


class _TimedParser:
    """A parser whose work is timed."""

    def __init__(self, parser: Parser, tally: Tally) -> None:
        self._parser, self._tally = parser, tally

    @property
    def done(self) -> bool:
        return self._parser.done

    @property
    def withholds(self) -> bool:
        return self._parser.withholds

    def at_once(self, text: str) -> Delta | None:
        return None

    def feed(self, text: str) -> list[Delta]:
        return self._timed(lambda: self._parser.feed(text))

    def finish(self) -> list[Delta]:
        return self._timed(self._parser.finish)

    def _timed(self, work: Callable[[], list[Delta]]) -> list[Delta]:
        began_s = time.perf_counter()
        try:
            return work()
        finally:
            self._tally.parse_s = (self._tally.parse_s or 0.0) + time.perf_counter() - began_s


class _Reader:
    """The parser of one choice, and what it has found."""

    def __init__(self, parser: Parser) -> None:
        self.parser = parser
        self._has_calls = False
        self.has_ended = False

    @property
    def is_done(self) -> bool:
        return self.parser.done

    def read(self, text: str, *, is_last: bool) -> list[Delta]:
        deltas = self.parser.feed(text) if text else []
        if is_last:
            deltas = [*deltas, *self.parser.finish()]
        for delta in deltas:
            if isinstance(delta, ToolCallEnd):
                self._has_calls |= delta.complete
        return deltas

    def end(self, reason: str, stopped_by: str | int | None) -> End:
        self.has_ended = True
        is_call = self._has_calls and reason in ("stop", "length")
        return End("tool_calls" if is_call else reason, stopped_by)
