# SPDX-License-Identifier: Apache-2.0
"""Runs one HTTP request's prompts through the engine, with its times, metrics and log line. Knows no dialect."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

import msgspec

from tokenspeed.core.errors import InvalidRequestError, OverloadedError, RequestError
from tokenspeed.core.request import FinishReason, Retention, SamplingParams
from tokenspeed.llm.input_processor import Prompt
from tokenspeed.llm.outputs import CompletionOutput, LogprobEntry, RequestOutput, RequestTimes
from tokenspeed.observability.logging import RequestSummary
from tokenspeed.server.connection import merged
from tokenspeed.server.errors import GenerationError
from tokenspeed.server.prefix_watch import HEADER
from tokenspeed.server.served import OutputStream, Served

_log = logging.getLogger(__name__)


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """Part of Usage."""

    cached_tokens: int


class Usage(msgspec.Struct, frozen=True):
    """Token counts as the OpenAI dialects report them."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a request comes from. session: the key of its session. prefix: how its prompt departs from those before it
    in the session. trace: the headers of the trace that it is part of."""

    session: str | None = None
    prefix: str | None = None
    trace: Mapping[str, str] = field(default_factory=dict)

    def headers(self) -> dict[str, str]:
        """What the client is told."""
        return {} if self.prefix is None else {HEADER: self.prefix}


@dataclass(frozen=True, slots=True)
class Job:
    """What one HTTP request asks of the engine. retain: of its pages, should it end well."""

    request_id: str
    prompts: Sequence[Prompt]
    params: SamplingParams
    priority: int = 0
    retain: Retention | None = None
    origin: Origin = Origin()

    @property
    def num_prompts(self) -> int:
        """Each is a request of its own to the engine."""
        return len(self.prompts)

    @property
    def num_choices(self) -> int:
        """n completions of each prompt."""
        return len(self.prompts) * self.params.n


@dataclass(slots=True)
class Tally:
    """Counts of one HTTP request as they grow. finished: how the engine ended each choice, as the wire says it; said:
    how the reply says that it ended, where that is another thing. parse_s: seconds spent on reading it,
    where that is measured."""

    num_prompt: dict[int, int] = field(default_factory=dict)
    num_cached: dict[int, int] = field(default_factory=dict)
    num_generated: dict[int, int] = field(default_factory=dict)
    finished: dict[int, str] = field(default_factory=dict)
    said: dict[int, str] = field(default_factory=dict)
    parse_s: float | None = None

    def usage(self) -> Usage:
        """The sums."""
        num_prompt, num_generated = sum(self.num_prompt.values()), sum(self.num_generated.values())
        cached = PromptTokensDetails(sum(self.num_cached.values()))
        return Usage(num_prompt, num_generated, num_prompt + num_generated, cached)


class Piece(msgspec.Struct, frozen=True):
    """News of one prompt: its output, and the place of each completion among all choices of the HTTP request."""

    prompt_index: int
    output: RequestOutput
    choices: tuple[tuple[int, CompletionOutput], ...]


@dataclass(slots=True)
class Choice:
    """A completion put together from its pieces."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[LogprobEntry] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None


def new_id(prefix: str) -> str:
    """A fresh id of the kind that the OpenAI API gives."""
    return f"{prefix}-{uuid.uuid4().hex}"


class TextLane:
    """A way past `pieces` for what most news is: more text of the only choice, and nothing else. Each token costs less
    there. Only whoever iterates `pieces` may use it, between two pieces. Closed until `pieces` opens it."""

    def __init__(self) -> None:
        self._stream: OutputStream | None = None
        self._watch: _Watch | None = None

    def open(self, stream: OutputStream, watch: _Watch) -> None:
        """The only prompt is running."""
        self._stream, self._watch = stream, watch

    async def wait(self) -> str | None:
        """The next text, once there is one. It stays until it is taken. None where `pieces` has to be asked."""
        return None if self._stream is None else await self._stream.wait_for_text()

    def take(self) -> None:
        """The text that `wait` returned is taken."""
        assert self._stream is not None, "the lane is closed"
        assert self._watch is not None, "the lane is closed"
        self._watch.saw_tokens(0, self._stream.take_text())


async def pieces(served: Served, job: Job, tally: Tally, lane: TextLane | None = None) -> AsyncGenerator[Piece, None]:
    """News of all prompts as it comes; `tally` is kept up to date. Closing it cancels what still runs.

    Raises RequestError, OverloadedError, EngineDeadError, and GenerationError for a completion that broke off.
    """
    limits = served.llm.config.scheduler
    most = limits.max_num_waiting + limits.max_num_seqs
    if job.num_choices > most:
        raise InvalidRequestError(f"{job.num_choices} completions are asked for; this server queues {most}", "n")
    watch = _Watch(served, job, tally)
    try:
        if job.num_prompts == 1:
            stream = await _submitted(served, job, 0, job.request_id)
            watch.queued(0, stream)
            async with aclosing(stream):
                async for output in stream:
                    watch.saw(0, output)
                    if lane is not None:
                        lane.open(stream, watch)
                    yield _piece(job, 0, output)
        else:
            each = [_outputs(served, job, index, watch) for index in range(job.num_prompts)]
            async with aclosing(merged(each)) as outputs:
                async for prompt_index, output in outputs:
                    watch.saw(prompt_index, output)
                    yield _piece(job, prompt_index, output)
        if len(tally.finished) < job.num_choices:
            raise GenerationError("the engine ended the request before it was finished")
    except (RequestError, OverloadedError) as error:
        watch.refused(error)
        raise
    finally:
        watch.end()


async def whole(served: Served, job: Job, tally: Tally) -> tuple[list[Choice], list[RequestOutput | None]]:
    """All choices in order, and the first output of each prompt (which holds prompt ids and log-probabilities)."""
    choices = [Choice() for _ in range(job.num_choices)]
    firsts: list[RequestOutput | None] = [None] * len(job.prompts)
    async with aclosing(pieces(served, job, tally)) as news:
        async for piece in news:
            firsts[piece.prompt_index] = firsts[piece.prompt_index] or piece.output
            for index, completion in piece.choices:
                choice = choices[index]
                choice.text += completion.text
                choice.token_ids += completion.token_ids
                choice.logprobs += completion.logprobs or ()
                if completion.finish_reason is not None:
                    choice.finish_reason = finish_text(completion.finish_reason)
                    choice.stop_reason = completion.stop_reason
    return choices, firsts


def finish_text(reason: FinishReason) -> str:
    """As the wire says it."""
    return "abort" if reason is FinishReason.CANCELLED else reason.value


async def _submitted(served: Served, job: Job, index: int, request_id: str) -> OutputStream:
    """The outputs of one of the prompts, queued under that id."""
    return await served.llm.submit(
        job.prompts[index], job.params, request_id=request_id, priority=job.priority, retain=job.retain
    )


async def _outputs(served: Served, job: Job, index: int, watch: _Watch) -> AsyncGenerator[RequestOutput, None]:
    """The same of one of several prompts, which is queued when it is first asked for."""
    stream = await _submitted(served, job, index, f"{job.request_id}-{index}")
    watch.queued(index, stream)
    async with aclosing(stream):
        async for output in stream:
            yield output


def _piece(job: Job, prompt_index: int, output: RequestOutput) -> Piece:
    for completion in output.outputs:
        if completion.finish_reason is FinishReason.ERROR:
            raise GenerationError(completion.error or "the model computed no valid next token; this request ends here")
    base = prompt_index * job.params.n
    return Piece(prompt_index, output, tuple([(base + each.index, each) for each in output.outputs]))


class _Watch:
    """Times of one HTTP request: into the metrics as they happen, into its session and one log line at the end."""

    def __init__(self, served: Served, job: Job, tally: Tally) -> None:
        self._metrics, self._job, self._tally = served.metrics, job, tally
        self._sessions, self._session = served.sessions, job.origin.session
        self._tracer = served.tracer
        self._arrived_s = time.monotonic()
        self._first_token_s: float | None = None
        self._last_token_s: dict[int, float] = {}
        self._was_refused = False
        self._streams: dict[int, OutputStream] = {}
        self._first = 0
        served.metrics.observe_start(job.params.n, job.params.max_tokens)
        if self._session is not None:
            self._sessions.began(self._session)

    def queued(self, prompt_index: int, stream: OutputStream) -> None:
        """A prompt is encoded and waits for the engine."""
        self._streams[prompt_index] = stream

    def saw(self, prompt_index: int, output: RequestOutput) -> None:
        """New tokens of a prompt."""
        tally = self._tally
        tally.num_prompt[prompt_index] = len(output.prompt_token_ids)
        tally.num_cached[prompt_index] = output.cached_len
        for completion in output.outputs:
            choice = prompt_index * self._job.params.n + completion.index
            if completion.finish_reason is not None:
                tally.finished[choice] = finish_text(completion.finish_reason)
            now = self.saw_tokens(choice, completion.num_tokens)
            if now is not None and self._first_token_s is None:
                self._first_token_s, self._first = now, prompt_index
                self._metrics.observe_first_token(now - self._arrived_s)
                if self._session is not None:
                    self._sessions.answering(self._session, len(output.prompt_token_ids))

    def saw_tokens(self, choice: int, num_tokens: int) -> float | None:
        """A choice has so many tokens. Returns the time if that is news."""
        num_new = num_tokens - self._tally.num_generated.get(choice, 0)
        if num_new <= 0:
            return None
        now, last = time.monotonic(), self._last_token_s.get(choice)
        self._tally.num_generated[choice] = num_tokens
        self._last_token_s[choice] = now
        if last is not None:
            self._metrics.observe_tokens(num_new, now - last)
        return now

    def refused(self, error: Exception) -> None:
        """The request was turned away before it ran."""
        self._was_refused = True
        if self._session is not None:
            self._sessions.refused(self._session)
        if self._tracer is not None:
            self._tracer.record(self._summary(), self._job.origin.trace, str(error))
        _log.info("%s refused: %s", self._job.request_id, error)

    def end(self) -> None:
        """Nothing more will come."""
        if self._was_refused:
            return
        job, summary = self._job, self._summary()
        self._metrics.observe_end(summary)
        if self._session is not None:
            self._sessions.ended(self._session, summary, None if job.retain is None else job.retain.ttl_s)
        _log.info("%s", summary.line())
        if self._tracer is not None:
            self._tracer.record(summary, job.origin.trace)

    def _summary(self) -> RequestSummary:
        now, job, tally = time.monotonic(), self._job, self._tally
        first, last, times = self._first_token_s, max(self._last_token_s.values(), default=None), self._times()
        started = None if times is None else times.started
        num_prompt = {index: stream.num_prompt_tokens for index, stream in self._streams.items()}
        ends = {**tally.finished, **tally.said}
        return RequestSummary(
            request_id=job.request_id,
            num_prompt=sum(num_prompt.values()),
            num_cached=sum(tally.num_cached.values()),
            num_generated=sum(tally.num_generated.values()),
            ttft_s=None if first is None else first - self._arrived_s,
            decode_s=None if first is None or last is None else last - first,
            total_s=now - self._arrived_s,
            finish_reasons=tuple(ends.get(choice, "abort") for choice in range(job.num_choices)),
            tokenise_s=None if times is None else times.arrived - self._arrived_s,
            queue_s=None if times is None else (now if started is None else started) - times.arrived,
            prefill_s=None if first is None or started is None else first - started,
            session=job.origin.session,
            prefix=job.origin.prefix,
            parse_s=tally.parse_s,
        )

    def _times(self) -> RequestTimes | None:
        """Those of the prompt that spoke first; while none has, of the one that was queued first."""
        known = self._streams.get(self._first) or next(iter(self._streams.values()), None)
        return None if known is None else known.times
