# SPDX-License-Identifier: Apache-2.0
"""One reply as every dialect of the wire says it: content, reasoning, calls and an end, read by the parser of the
model's own dialect while it is written. Knows no wire dialect.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from tokenspeed.chat.parsers import Context, Delta, Parser, ToolCallEnd, opens_reasoning, resolve, tool_schemas
from tokenspeed.llm.outputs import LogprobEntry, RequestOutput
from tokenspeed.server.chat import Conversation
from tokenspeed.server.generation import Job, Tally, finish_text, pieces
from tokenspeed.server.served import Served

Reply = Callable[[], Parser]
"""Makes what reads one choice."""


@dataclass(frozen=True, slots=True)
class End:
    """A choice is over. reason: in the words of the OpenAI API; "tool_calls" where it carries complete calls.
    stopped_by: the stop string or token that ended it."""

    reason: str
    stopped_by: str | int | None = None


@dataclass(frozen=True, slots=True)
class News:
    """What is new of one choice. logprobs: of the tokens that came, whose text may still be withheld. output: of the
    engine, as it came."""

    choice: int
    deltas: tuple[Delta, ...]
    logprobs: Sequence[LogprobEntry]
    end: End | None
    output: RequestOutput


def reply_to(served: Served, conversation: Conversation) -> Reply:
    """How the reply to a conversation is read. Without tools, what looks like a call is content."""
    opening = ""
    if conversation.add_generation_prompt:
        opening = served.llm.input_processor.reply_opening(conversation.template_kwargs)
    context = Context(
        tools=tool_schemas(conversation.tools) if conversation.may_call else {},
        starts_in_reasoning=opens_reasoning(opening),
        parallel_tool_calls=conversation.parallel_tool_calls,
    )
    build = resolve(served.dialect)
    return lambda: build(context)


async def news_of(served: Served, job: Job, reply: Reply, tally: Tally) -> AsyncGenerator[News, None]:
    """What each choice says, as it comes. A choice whose parser needs no more text ends there; when all have, what
    still runs is cancelled. Pages are kept only for a reply whose calls have results to come."""
    readers = [_Reader(reply()) for _ in range(job.num_choices)]
    waits_for_results = False
    async with aclosing(pieces(served, job, tally)) as found:
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
                waits_for_results |= end is not None and end.reason == "tool_calls"
                yield News(choice, tuple(deltas), completion.logprobs or (), end, piece.output)
            if all(reader.has_ended for reader in readers):
                break
    if job.retain is not None and not waits_for_results:
        served.llm.release(job.request_id)


class _Reader:
    """The parser of one choice, and what it has found."""

    def __init__(self, parser: Parser) -> None:
        self._parser = parser
        self._has_calls = False
        self.has_ended = False

    @property
    def is_done(self) -> bool:
        return self._parser.done

    def read(self, text: str, *, is_last: bool) -> list[Delta]:
        deltas = self._parser.feed(text) if text else []
        if is_last:
            deltas = [*deltas, *self._parser.finish()]
        self._has_calls |= any(isinstance(delta, ToolCallEnd) and delta.complete for delta in deltas)
        return deltas

    def end(self, reason: str, stopped_by: str | int | None) -> End:
        self.has_ended = True
        is_call = self._has_calls and reason in ("stop", "length")
        return End("tool_calls" if is_call else reason, stopped_by)
