# SPDX-License-Identifier: Apache-2.0
"""The OpenAI completions dialect: text or token-id prompts, one or many, echo and parallel logprobs lists.

Knows no other dialect.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated

import msgspec

from tokenspeed.core.errors import InvalidRequestError
from tokenspeed.core.request import SamplingParams
from tokenspeed.llm.input_processor import Prompt, TextPrompt, TokensPrompt
from tokenspeed.llm.outputs import CompletionOutput, LogprobEntry, RequestOutput, TokenText
from tokenspeed.llm.sampling import LOGPROBS_MAX
from tokenspeed.server.fields import at_least_one, one_of, within
from tokenspeed.server.formats import form_of
from tokenspeed.server.generation import Choice, Job, Piece, Tally, Usage, finish_text, pieces, whole
from tokenspeed.server.openai_logprobs import (
    CompletionLogprobs,
    CompletionLogprobsWriter,
    PromptLogprob,
    prompt_logprobs,
)
from tokenspeed.server.sampling import SamplingFields, sampling_params
from tokenspeed.server.served import Served, ServedLLM
from tokenspeed.server.sse import DONE, data_frame

PROMPTS_MAX = 1024
_DEFAULT_MAX_TOKENS = 16
PromptEntries = tuple[list[LogprobEntry | None], TokenText | None]


class CompletionBody(SamplingFields, kw_only=True):
    """The body of /v1/completions."""

    prompt: Annotated[str | list[str | int | list[int]], at_least_one()]
    echo: bool | None = None
    logprobs: Annotated[int | None, within(0, LOGPROBS_MAX)] = None
    suffix: Annotated[str | None, one_of(None, "")] = None
    add_special_tokens: bool | None = None


class AnswerChoice(msgspec.Struct, frozen=True):
    """A choice of a whole answer or of a chunk."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | msgspec.UnsetType = msgspec.UNSET


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """A whole answer, or a chunk of a streamed one."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[AnswerChoice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET


def read_prompts(body: CompletionBody) -> list[Prompt]:
    """The prompts. Raises InvalidRequestError."""
    prompt = body.prompt
    entries: list[str | list[int]] = []
    if isinstance(prompt, str):
        entries = [prompt]
    elif prompt and all(isinstance(entry, int) for entry in prompt):
        entries = [[entry for entry in prompt if isinstance(entry, int)]]
    else:
        entries = [entry for entry in prompt if not isinstance(entry, int)]
        if len(entries) != len(prompt) or len({type(entry) for entry in entries}) > 1:
            raise InvalidRequestError("prompt mixes text, ids and lists of ids; send one kind", "prompt")
    if not entries or not all(entries):
        raise InvalidRequestError("prompt is empty; it must hold at least one token", "prompt")
    if len(entries) > PROMPTS_MAX:
        raise InvalidRequestError(f"prompt holds {len(entries)} prompts; at most {PROMPTS_MAX} are allowed", "prompt")
    special = body.add_special_tokens is not False
    return [TextPrompt(entry, special) if isinstance(entry, str) else TokensPrompt(entry) for entry in entries]


def read_params(body: CompletionBody, llm: ServedLLM) -> SamplingParams:
    """The sampling parameters. Raises InvalidRequestError that names the field."""
    if body.suffix:
        raise InvalidRequestError("suffix is not supported; put the text around the gap into prompt", "suffix")
    asked = body.prompt_logprobs
    if asked is not None and body.stream:
        raise InvalidRequestError("prompt_logprobs is not available with stream: true", "prompt_logprobs")
    if body.echo and body.logprobs is not None:
        asked = max(body.logprobs, asked or 0)
    max_tokens = _DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    if _only_echoes(body):
        max_tokens = 1
    params = sampling_params(body, llm, max_tokens=max_tokens, logprobs=body.logprobs, prompt_logprobs=asked)
    form = form_of(body)
    if form is None or llm.source.script is not None:
        return params
    return msgspec.structs.replace(params, grammar=form.grammar)


async def whole_answer(served: Served, job: Job, body: CompletionBody) -> Answer:
    """Runs `job` to its end."""
    tally = Tally()
    choices, firsts = await whole(served, job, tally)
    writer = _Writer(served, job, body)
    made = [writer.choice(index, choice, firsts[index // job.params.n]) for index, choice in enumerate(choices)]
    return writer.answer(made, writer.usage(tally))


async def chunk_frames(served: Served, job: Job, body: CompletionBody) -> AsyncGenerator[bytes, None]:
    """The frames of a streamed answer: deltas, finishes, usage when asked for, [DONE]."""
    options = body.stream_options
    wants_usage = options is not None and bool(options.include_usage)
    in_each = options is not None and bool(options.continuous_usage_stats)
    writer, tally = _Writer(served, job, body), Tally()
    async with aclosing(pieces(served, job, tally)) as news:
        async for piece in news:
            for choice in writer.chunk_choices(piece):
                usage = writer.usage(tally) if in_each else None if wants_usage else msgspec.UNSET
                yield data_frame(writer.answer([choice], usage))
    if wants_usage:
        yield data_frame(writer.answer([], writer.usage(tally)))
    yield DONE


class _Writer:
    """Makes the choices of one answer, echoed prompts included."""

    def __init__(self, served: Served, job: Job, body: CompletionBody) -> None:
        self._served, self._job, self._body = served, job, body
        self._created = int(time.time())
        self._echoed: set[int] = set()
        self._logprobs = [CompletionLogprobsWriter(body.logprobs or 0) for _ in range(job.num_choices)]

    def answer(self, choices: list[AnswerChoice], usage: Usage | msgspec.UnsetType | None) -> Answer:
        """The envelope."""
        model = self._served.model_name
        return Answer(id=self._job.request_id, created=self._created, model=model, choices=choices, usage=usage)

    def usage(self, tally: Tally) -> Usage:
        """The counts, without the token that only served to read the prompt."""
        usage = tally.usage()
        if not _only_echoes(self._body):
            return usage
        return msgspec.structs.replace(usage, completion_tokens=0, total_tokens=usage.prompt_tokens)

    def choice(self, index: int, choice: Choice, first: RequestOutput | None) -> AnswerChoice:
        """A whole choice."""
        text, entries = ("", []) if _only_echoes(self._body) else (choice.text, choice.logprobs)
        echo, echoed = self._echo(index, first) if self._body.echo and first is not None else ("", ([], None))
        logprobs = None
        if self._body.logprobs is not None:
            logprobs = self._logprobs[index].piece([*echoed[0], *entries], echoed[1])
        made = AnswerChoice(index, echo + text, logprobs, choice.finish_reason, choice.stop_reason)
        if self._body.prompt_logprobs is None or first is None or first.prompt_logprobs is None:
            return made
        return msgspec.structs.replace(made, prompt_logprobs=prompt_logprobs(first.prompt_logprobs))

    def chunk_choices(self, piece: Piece) -> list[AnswerChoice]:
        """What an output adds: the echoed prompt before a choice's first text, deltas, ends."""
        made = []
        if self._body.echo and piece.prompt_index not in self._echoed:
            self._echoed.add(piece.prompt_index)
            base = piece.prompt_index * self._job.params.n
            for index in range(base, base + self._job.params.n):
                text, (entries, token) = self._echo(index, piece.output)
                made.append(AnswerChoice(index, text, self._chunk_logprobs(index, entries, token)))
        for index, completion in piece.choices:
            made += self._completion_choices(index, completion)
        return made

    def _completion_choices(self, index: int, completion: CompletionOutput) -> list[AnswerChoice]:
        made, hidden = [], _only_echoes(self._body)
        if (completion.text or completion.logprobs) and not hidden:
            logprobs = self._chunk_logprobs(index, list(completion.logprobs or ()), None)
            made.append(AnswerChoice(index, completion.text, logprobs))
        if completion.finish_reason is not None:
            finish = finish_text(completion.finish_reason)
            made.append(AnswerChoice(index, "", None, finish, completion.stop_reason))
        return made

    def _chunk_logprobs(
        self, index: int, entries: list[LogprobEntry | None] | list[LogprobEntry], first: TokenText | None
    ) -> CompletionLogprobs | None:
        return None if self._body.logprobs is None else self._logprobs[index].piece(entries, first)

    def _echo(
        self, index: int, output: RequestOutput
    ) -> tuple[str, tuple[list[LogprobEntry | None], TokenText | None]]:
        """The prompt's text, its log-probabilities and its first token."""
        tokenizer, ids = self._served.llm.tokenizer, output.prompt_token_ids
        prompt = self._job.prompts[index // self._job.params.n]
        given = prompt.text if isinstance(prompt, TextPrompt) else None
        text = tokenizer.decode(ids, skip_special_tokens=False) if given is None else given
        first = tokenizer.token_text(ids[0])
        return text, (list(output.prompt_logprobs or ()), TokenText(ids[0], first, tokenizer.token_bytes(ids[0]), 0.0))


def _only_echoes(body: CompletionBody) -> bool:
    """echo with max_tokens 0 asks for the prompt's log-probabilities alone."""
    return bool(body.echo) and body.max_tokens == 0
