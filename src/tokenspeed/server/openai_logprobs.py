# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities in the shapes of the OpenAI dialects. Knows no endpoint."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

import msgspec

from tokenspeed.llm.outputs import LogprobEntry, TokenText


class TopLogprob(msgspec.Struct, frozen=True):
    """One likely token."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct, frozen=True):
    """The sampled token and the likely ones."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """logprobs of a chat choice."""

    content: list[TokenLogprob]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """logprobs of a completions choice: parallel lists. The first prompt token has no probability."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(msgspec.Struct, frozen=True):
    """One token at a place of the prompt."""

    logprob: float
    decoded_token: str


def chat_logprobs(entries: Sequence[LogprobEntry], num_top: int) -> ChatLogprobs:
    """The chat shape with num_top alternatives a token."""
    return ChatLogprobs([_token_logprob(entry, num_top) for entry in entries])


def prompt_logprobs(entries: Sequence[LogprobEntry | None]) -> list[dict[str, PromptLogprob] | None]:
    """For each place of the prompt the token there and the likely ones, by token id."""
    return [None if entry is None else _by_id(entry) for entry in entries]


class CompletionLogprobsWriter:
    """Makes completions logprobs piece by piece; remembers how far into the text the pieces got."""

    def __init__(self, num_top: int, offset: int = 0) -> None:
        self._num_top = num_top
        self._offset = offset
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def piece(self, entries: Sequence[LogprobEntry | None], first: TokenText | None = None) -> CompletionLogprobs:
        """The entries as parallel lists. `first` is the token that a leading None stands for."""
        written = CompletionLogprobs([], [], [], [])
        for entry in entries:
            token = entry.token if entry is not None else first
            if token is None:
                continue
            written.tokens.append(token_name(token))
            written.token_logprobs.append(None if entry is None else entry.token.logprob)
            written.top_logprobs.append(None if entry is None else self._top(entry))
            written.text_offset.append(self._offset)
            self._offset += len(self._decoder.decode(token.bytes))
        return written

    def _top(self, entry: LogprobEntry) -> dict[str, float]:
        top = {token_name(token): token.logprob for token in entry.top[: self._num_top]}
        top.setdefault(token_name(entry.token), entry.token.logprob)
        return top


def token_name(token: TokenText) -> str:
    """The token's text; for a part of a character its bytes, as `bytes:\\xf0\\x9f`."""
    if "\ufffd" in token.text and token.text.encode() != token.bytes:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.bytes)
    return token.text


def _token_logprob(entry: LogprobEntry, num_top: int) -> TokenLogprob:
    token = entry.token
    top = [TopLogprob(token_name(likely), likely.logprob, list(likely.bytes)) for likely in entry.top[:num_top]]
    return TokenLogprob(token_name(token), token.logprob, list(token.bytes), top)


def _by_id(entry: LogprobEntry) -> dict[str, PromptLogprob]:
    return {str(token.token_id): PromptLogprob(token.logprob, token_name(token)) for token in (entry.token, *entry.top)}
