# SPDX-License-Identifier: Apache-2.0
"""What a caller of AsyncLLM or LLM gets: text deltas with their tokens, log-probabilities and counts.

Structs, since some are made for every token and a frozen dataclass takes several times as long to make.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tokenspeed.core.request import FinishReason


class TokenText(msgspec.Struct, frozen=True):
    """A token as text: `text` may hold U+FFFD where the token alone is not valid UTF-8; `bytes` are exact."""

    token_id: int
    text: str
    bytes: bytes
    logprob: float


class LogprobEntry(msgspec.Struct, frozen=True):
    """One position: the token that is there and the most likely ones, best first."""

    token: TokenText
    top: tuple[TokenText, ...] = ()


class CompletionOutput(msgspec.Struct, frozen=True):
    """One of n completions. While streaming, text, token_ids and logprobs are what is new since the last output;
    from LLM.generate they are whole. num_tokens counts all generated tokens so far, an end token included.
    stop_reason: the stop string or token id that ended it; None for an end-of-sequence token."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    num_tokens: int
    logprobs: tuple[LogprobEntry, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None


class RequestTimes(msgspec.Struct, frozen=True):
    """Seconds on the monotonic clock of the API process; None until it happened. arrived: its prompt was encoded and it
    went to the engine. started: the first step that it was part of began."""

    arrived: float
    first_token: float | None = None
    finished: float | None = None
    started: float | None = None


class RequestOutput(msgspec.Struct, frozen=True):
    """The state of a request after one or more steps. prompt_logprobs: on the first output, when asked for; its first
    entry is None. `finished` says that all completions have ended."""

    request_id: str
    prompt_token_ids: Sequence[int]
    outputs: tuple[CompletionOutput, ...]
    cached_len: int
    finished: bool
    times: RequestTimes
    prompt_logprobs: tuple[LogprobEntry | None, ...] | None = None
