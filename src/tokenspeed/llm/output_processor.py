# SPDX-License-Identifier: Apache-2.0
"""Engine updates become text: detokenizing, stop strings, log-probability entries, counts.

A stream merges the n sequences of one request; what a slow consumer has not taken yet is merged into one output. Knows
no socket and no wire dialect.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from tokenspeed.core.errors import TokenSpeedError
from tokenspeed.core.request import FinishReason, SamplingParams, SequenceUpdate, TokenLogprobs
from tokenspeed.llm.detokenizer import IncrementalDetokenizer
from tokenspeed.llm.input_processor import ProcessedRequest
from tokenspeed.llm.logprobs import LogprobLedger, logprob_entry
from tokenspeed.llm.outputs import CompletionOutput, LogprobEntry, RequestOutput, RequestTimes
from tokenspeed.llm.stop import StopScanner
from tokenspeed.llm.tokenizer import Tokenizer


class SequenceText:
    """One sequence on its way from token ids to text. `take` hands out what is new since it was last called."""

    def __init__(self, index: int, tokenizer: Tokenizer, params: SamplingParams, eos_ids: frozenset[int]) -> None:
        self.finish_reason: FinishReason | None = None
        self._index = index
        self._params = params
        self._eos_ids = eos_ids
        self._detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=params.skip_special_tokens)
        self._scanner = StopScanner(params.stop, params.include_stop_str_in_output) if params.stop else None
        self._ledger: LogprobLedger | None = None
        if params.logprobs is not None:
            self._ledger = LogprobLedger(tokenizer, skip_special_tokens=params.skip_special_tokens)
        self._stop_reason: str | int | None = None
        self._error: str | None = None
        self._num_tokens = 0
        self._num_chars = 0
        self._new_text: list[str] = []
        self._new_ids: list[int] = []
        self._new_logprobs: list[LogprobEntry] = []
        self._changed = False

    @property
    def num_tokens(self) -> int:
        """Generated tokens that count, an end token included."""
        return self._num_tokens

    @property
    def has_news(self) -> bool:
        """Whether `take` has something to hand out."""
        return self._changed

    def push(self, update: SequenceUpdate) -> bool:
        """Take one update. True when a stop string ended the sequence here, before the engine knows of it."""
        assert self.finish_reason is None, f"an update after the end: {update.request_id}"
        token_ids: Sequence[int] = update.token_ids
        if self._is_silent_end(update.end_token_id):
            token_ids = token_ids[:-1]  # counted, not rendered
        if self.push_tokens(token_ids, update.logprobs):
            return True
        if len(token_ids) < len(update.token_ids):
            self._num_tokens += 1
            self._new_ids.append(update.token_ids[-1])
        if update.finish_reason is not None:
            self._finish(update)
        return False

    def push_tokens(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs] | None = None) -> bool:
        """As `push`, of tokens that are no end."""
        self._changed = True
        if self._scanner is not None or self._ledger is not None:
            return self._push_one_by_one(token_ids, logprobs)
        self._num_tokens += len(token_ids)
        self._new_ids.extend(token_ids)
        text = self._detokenizer.push(token_ids)
        if text:
            self._new_text.append(text)
        return False

    def take(self) -> CompletionOutput | None:
        """What is new, merged; None when nothing is."""
        if not self._changed:
            return None
        output = CompletionOutput(
            self._index,
            "".join(self._new_text),
            tuple(self._new_ids),
            self._num_tokens,
            None if self._ledger is None else tuple(self._new_logprobs),
            self.finish_reason,
            self._stop_reason,
            self._error,
        )
        self._new_text, self._new_ids, self._new_logprobs = [], [], []
        self._changed = False
        return output

    def plain_text(self) -> str | None:
        """The text that is new, where nothing else is; it stays new."""
        if not self._changed or self._ledger is not None or self.finish_reason is not None:
            return None
        return self._new_text[0] if len(self._new_text) == 1 else "".join(self._new_text)

    def drop(self) -> None:
        """Nothing is new any more."""
        self._new_text, self._new_ids = [], []
        self._changed = False

    def _is_silent_end(self, end_token_id: int | None) -> bool:
        """End tokens are not rendered, except a stop token that the caller wants to see."""
        if end_token_id is None:
            return False
        return end_token_id in self._eos_ids or not self._params.include_stop_str_in_output

    def _push_one_by_one(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs] | None) -> bool:
        for position, token_id in enumerate(token_ids):
            self._num_tokens += 1
            self._new_ids.append(token_id)
            text = self._detokenizer.push((token_id,))
            if self._ledger is not None:
                assert logprobs is not None, "log-probs were asked for and did not come"
                self._ledger.add(logprobs[position], text)
            if self._scan(text):
                return True
        return False

    def _scan(self, text: str) -> bool:
        """Hand out the text that can be no part of a stop string. True when one is complete. Text of the first
        min_tokens tokens is not searched."""
        matched = None
        if self._scanner is not None and self._num_tokens > self._params.min_tokens:
            text, matched = self._scanner.feed(text)
        if matched is None:
            self._emit(text)
            return False
        self.finish_reason = FinishReason.STOP
        self._stop_reason = matched
        self._emit(text, ended=True)
        return True

    def _finish(self, update: SequenceUpdate) -> None:
        rest = self._detokenizer.finish()
        if self._ledger is not None:
            self._ledger.finish(rest)
        if self._scan(rest):
            return
        if self._scanner is not None:
            self._emit(self._scanner.flush())
        self._emit("", ended=True)
        self.finish_reason = update.finish_reason
        self._error = update.error
        end = update.end_token_id
        self._stop_reason = None if end is None or end in self._eos_ids else end

    def _emit(self, text: str, *, ended: bool = False) -> None:
        if text:
            self._new_text.append(text)
        if self._ledger is not None:
            self._num_chars += len(text)
            entries = self._ledger.cut(self._num_chars) if ended else self._ledger.take(self._num_chars)
            self._new_logprobs.extend(entries)


class RequestStream:
    """The outputs of one request, as an asynchronous iterator; the engine client pushes into it.

    finish(sequence id, keep_tokens) is called when a stop string was found; cancel(sequence id) for each sequence that
    still runs when the stream is closed. Closing is idempotent and never waits.
    """

    def __init__(
        self,
        request_id: str,
        request: ProcessedRequest,
        tokenizer: Tokenizer,
        *,
        finish: Callable[[str, int], None],
        cancel: Callable[[str], None],
        arrived: float | None = None,
    ) -> None:
        self.request_id = request_id
        self._request = request
        self._tokenizer = tokenizer
        self._finish = finish
        self._cancel = cancel
        self._sequences = {
            sequence.request_id: SequenceText(index, tokenizer, request.params, request.eos_ids)
            for index, sequence in enumerate(request.sequences)
        }
        self._first_id = request.sequences[0].request_id
        self._only = self._sequences[self._first_id] if len(self._sequences) == 1 else None
        self._cached_len = 0
        self._prompt_logprobs: tuple[LogprobEntry | None, ...] | None = None
        self._arrived = time.monotonic() if arrived is None else arrived
        self._first_token: float | None = None
        self._finished: float | None = None
        self._started: float | None = None
        self._error: TokenSpeedError | None = None
        self._times: RequestTimes | None = None
        self._waiting: asyncio.Future[None] | None = None
        self._wakes_at_end = False
        self._ended = False

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self._request.prompt_token_ids)

    @property
    def times(self) -> RequestTimes:
        """What has happened so far."""
        if self._times is None:
            self._times = RequestTimes(self._arrived, self._first_token, self._finished, self._started)
        return self._times

    def push(self, update: SequenceUpdate) -> None:
        """Take one update of one of the sequences."""
        if update.queue_s is not None:  # no news to the consumer
            if self._started is None:
                self._started, self._times = self._arrived + update.queue_s, None
            return
        if update.request_id == self._first_id:
            self._cached_len = max(self._cached_len, update.cached_len)
            if update.prompt_logprobs is not None:
                self._prompt_logprobs = tuple(
                    None if entry is None else logprob_entry(self._tokenizer, entry) for entry in update.prompt_logprobs
                )
        sequence = self._sequences[update.request_id]
        self._take_in(update.request_id, sequence, sequence.push(update), bool(update.token_ids))

    def push_tokens(self, sequence_id: str, token_ids: Sequence[int]) -> None:
        """Take an update of one of the sequences that holds some tokens and nothing else."""
        sequence = self._only or self._sequences[sequence_id]
        if sequence.push_tokens(token_ids) or self._first_token is None:
            self._take_in(sequence_id, sequence, sequence.finish_reason is not None, True)
            return
        waiting = self._waiting
        if waiting is not None and not self._wakes_at_end and not waiting.done():
            waiting.set_result(None)

    def _take_in(self, sequence_id: str, sequence: SequenceText, was_stopped: bool, has_tokens: bool) -> None:
        if has_tokens and self._first_token is None:
            self._first_token, self._times = time.monotonic(), None
        if was_stopped:
            self._finish(sequence_id, sequence.num_tokens)
        if sequence.finish_reason is not None and all(each.finish_reason for each in self._sequences.values()):
            self._finished, self._times = time.monotonic(), None
        if self._finished is not None or not self._wakes_at_end:
            self._wake()

    def fail(self, error: TokenSpeedError) -> None:
        """No more will come: the consumer gets the error after what has come already."""
        self._error = error
        self._wake()

    def close(self) -> None:
        """Cancel whatever still runs. Nothing more comes out of the stream."""
        self._ended = True
        for sequence_id, sequence in self._sequences.items():
            if sequence.finish_reason is None:
                self._cancel(sequence_id)
        self._wake()

    async def aclose(self) -> None:
        """As close; for contextlib.aclosing."""
        self.close()

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> RequestOutput:
        """The next output, merged with all that came since the last. Raises what `fail` was given."""
        while not self._ended:
            output = self._take()
            if output is not None:
                self._ended = output.finished
                return output
            if self._error is not None:
                self._ended = True
                raise self._error
            await self._wait()
        raise StopAsyncIteration

    async def whole(self) -> RequestOutput:
        """All that was not taken yet as one output, once the last has come. Raises what `fail` was given."""
        self._wakes_at_end = True
        while self._finished is None and self._error is None and not self._ended:
            await self._wait()
        self._ended = True
        if self._finished is None:
            assert self._error is not None, f"{self.request_id}: closed before its end"
            raise self._error
        output = self._take()
        assert output is not None, f"{self.request_id}: taken by another consumer"
        return output

    async def wait_for_text(self) -> str | None:
        """The text that is new of the only sequence, after waiting for news where there is none; it stays new. None
        where there is more news than text, or there are several sequences: iterate then."""
        only = self._only
        if only is None or self._prompt_logprobs is not None or self._error is not None or self._ended:
            return None
        text = only.plain_text()
        if text is None and not only.has_news:
            await self._wait()
            text = None if self._ended else only.plain_text()
        return text

    def take_text(self) -> int:
        """What wait_for_text returned is taken. Returns the number of tokens so far."""
        assert self._only is not None, "several sequences"
        self._only.drop()
        return self._only.num_tokens

    async def _wait(self) -> None:
        assert self._waiting is None, "two consumers of one stream"
        self._waiting = asyncio.get_running_loop().create_future()
        try:
            await self._waiting
        finally:
            self._waiting = None

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def _take(self) -> RequestOutput | None:
        outputs = tuple([output for each in self._sequences.values() if (output := each.take()) is not None])
        if not outputs:
            return None
        prompt_logprobs, self._prompt_logprobs = self._prompt_logprobs, None
        return RequestOutput(
            self.request_id,
            self._request.prompt_token_ids,
            outputs,
            self._cached_len,
            self._finished is not None,
            self.times,
            prompt_logprobs,
        )
