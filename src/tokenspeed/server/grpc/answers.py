# SPDX-License-Identifier: Apache-2.0
"""What the engine says as GenerateResponse messages: chunks while streaming, one last message a completion.

Knows the messages of the service; sends nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from smg_grpc_proto import tokenspeed_scheduler_pb2 as scheduler_pb2

from tokenspeed.core.request import FinishReason
from tokenspeed.llm.outputs import CompletionOutput, LogprobEntry
from tokenspeed.server.generation import Piece


@dataclass(slots=True)
class _Choice:
    """A completion as far as it has come. has_begun: a chunk has gone out, which a gateway waits for."""

    token_ids: list[int] = field(default_factory=list)
    entries: list[LogprobEntry] = field(default_factory=list)
    num_tokens: int = 0
    has_begun: bool = False
    has_ended: bool = False


class Answer:
    """The answer to one request. keeps_end: an end token that was met is among the ids."""

    def __init__(self, request: Any, request_id: str, num_choices: int) -> None:
        self._request_id = request_id
        self._streams = request.stream
        self._keeps_end = request.sampling_params.no_stop_trim
        self._has_logprobs = request.return_logprob
        self._choices = [_Choice() for _ in range(num_choices)]
        self._counts: dict[str, int] = {}

    def messages(self, piece: Piece) -> Iterator[Any]:
        """What this news lets us say."""
        self._counts = {
            "prompt_tokens": len(piece.output.prompt_token_ids),
            "cached_tokens": piece.output.cached_len,
        }
        for index, completion in piece.choices:
            choice = self._choices[index]
            token_ids, entries = self._new_tokens(completion)
            choice.token_ids += token_ids
            choice.entries += entries
            choice.num_tokens = completion.num_tokens
            if self._streams and (token_ids or not choice.has_begun):
                choice.has_begun = True
                yield self._chunk(index, token_ids, entries)
            if completion.finish_reason is not None:
                choice.has_ended = True
                reason = "abort" if completion.finish_reason is FinishReason.CANCELLED else completion.finish_reason
                yield self._complete(index, str(reason), _matched(completion))

    def aborted(self) -> Iterator[Any]:
        """The last messages of the completions that had not ended when the request was aborted."""
        for index, choice in enumerate(self._choices):
            if not choice.has_ended:
                yield self._complete(index, "abort", {})

    def _new_tokens(self, completion: CompletionOutput) -> tuple[list[int], Sequence[LogprobEntry]]:
        """Ids, and their log-probabilities where they were asked for: these come a little later than their tokens, and
        the ids wait for them."""
        end = completion.token_ids[-1:] if _met_end_token(completion) else ()
        if self._has_logprobs:
            entries = completion.logprobs or ()
            return [entry.token.token_id for entry in entries] + (list(end) if self._keeps_end else []), entries
        trimmed = completion.token_ids if self._keeps_end or not end else completion.token_ids[:-1]
        return list(trimmed), ()

    def _chunk(self, index: int, token_ids: list[int], entries: Sequence[LogprobEntry]) -> Any:
        chunk = scheduler_pb2.GenerateStreamChunk(
            token_ids=token_ids,
            completion_tokens=self._choices[index].num_tokens,
            output_logprobs=_logprobs(entries),
            index=index,
            **self._counts,
        )
        return scheduler_pb2.GenerateResponse(request_id=self._request_id, chunk=chunk)

    def _complete(self, index: int, reason: str, matched: dict[str, int | str]) -> Any:
        choice = self._choices[index]
        complete = scheduler_pb2.GenerateComplete(
            output_ids=choice.token_ids,
            finish_reason=reason,
            completion_tokens=choice.num_tokens,
            output_logprobs=_logprobs(choice.entries),
            index=index,
            **self._counts,
            **matched,
        )
        return scheduler_pb2.GenerateResponse(request_id=self._request_id, complete=complete)


def _met_end_token(completion: CompletionOutput) -> bool:
    """Whether the last new token is the one that ended it: an end-of-sequence token or a stop token."""
    is_stop = completion.finish_reason is FinishReason.STOP and not isinstance(completion.stop_reason, str)
    return is_stop and bool(completion.token_ids)


def _matched(completion: CompletionOutput) -> dict[str, int | str]:
    """What ended it, as the message names it."""
    if isinstance(completion.stop_reason, str):
        return {"matched_stop_str": completion.stop_reason}
    return {"matched_token_id": completion.token_ids[-1]} if _met_end_token(completion) else {}


def _logprobs(entries: Sequence[LogprobEntry]) -> Any:
    if not entries:
        return None
    return scheduler_pb2.OutputLogProbs(
        token_logprobs=[entry.token.logprob for entry in entries],
        token_ids=[entry.token.token_id for entry in entries],
        top_logprobs=[
            scheduler_pb2.TopLogProbs(
                values=[token.logprob for token in entry.top], token_ids=[token.token_id for token in entry.top]
            )
            for entry in entries
        ],
    )
