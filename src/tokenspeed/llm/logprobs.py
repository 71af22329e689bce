# SPDX-License-Identifier: Apache-2.0
"""Log-probability entries that add up to the text: an entry is handed out only when its text is, with the same bytes.

Knows tokens' texts and bytes; knows no stop string, only how many characters have been handed out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from msgspec.structs import replace

from tokenspeed.core.request import TokenLogprobs
from tokenspeed.llm.outputs import LogprobEntry, TokenText

LOGPROB_MIN = -9999.0  # stands for minus infinity, which JSON cannot say


class TokenTexts(Protocol):
    """The part of a tokenizer that log-probabilities need."""

    def token_bytes(self, token_id: int) -> bytes: ...
    def token_text(self, token_id: int) -> str: ...
    def is_special(self, token_id: int) -> bool: ...


def logprob_entry(tokenizer: TokenTexts, logprobs: TokenLogprobs) -> LogprobEntry:
    """One position in words."""
    return LogprobEntry(
        token=_token_text(tokenizer, logprobs.token_id, logprobs.logprob),
        top=tuple(_token_text(tokenizer, token_id, logprob) for token_id, logprob in logprobs.top),
    )


def _token_text(tokenizer: TokenTexts, token_id: int, logprob: float) -> TokenText:
    raw = tokenizer.token_bytes(token_id)
    text = tokenizer.token_text(token_id) if tokenizer.is_special(token_id) else raw.decode("utf-8", "replace")
    return TokenText(token_id, text, raw, min(max(logprob, LOGPROB_MIN), 0.0))


@dataclass(frozen=True, slots=True)
class _Group:
    """Entries whose tokens became text together (one, unless a character spans several tokens)."""

    entries: tuple[LogprobEntry, ...]
    text: str
    end: int


class LogprobLedger:
    """Entries of one sequence, held until the characters that they stand for are handed out.

    Law: the concatenated bytes of all entries handed out are the UTF-8 of all text handed out, except where the
    tokens' bytes are no valid UTF-8 (the text then has U+FFFD and the entries the exact bytes).
    """

    def __init__(self, tokenizer: TokenTexts, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._open: list[LogprobEntry] = []
        self._groups: deque[_Group] = deque()
        self._text_len = 0

    def add(self, logprobs: TokenLogprobs, text: str) -> None:
        """One token, and the text that its arrival completed (empty while a character is incomplete)."""
        entry = logprob_entry(self._tokenizer, logprobs)
        if self._skip_special_tokens and self._tokenizer.is_special(logprobs.token_id):
            entry = replace(entry, token=replace(entry.token, bytes=b""))
        self._open.append(entry)
        if text:
            self._close_group(text)

    def finish(self, text: str) -> None:
        """No token follows; `text` is what the incomplete ones became."""
        if self._open:
            self._close_group(text)

    def take(self, num_chars: int) -> tuple[LogprobEntry, ...]:
        """The entries that are due once num_chars characters have been handed out in all."""
        due: list[LogprobEntry] = []
        while self._groups and self._groups[0].end <= num_chars:
            due.extend(self._groups.popleft().entries)
        return tuple(due)

    def cut(self, num_chars: int) -> tuple[LogprobEntry, ...]:
        """The last entries: the text ends for good after num_chars characters, maybe inside a token."""
        due = list(self.take(num_chars))
        if self._groups:
            group = self._groups[0]
            kept = num_chars - (group.end - len(group.text))
            due.extend(_trimmed(group.entries, group.text[: max(kept, 0)].encode()))
        self._groups.clear()
        self._open.clear()
        return tuple(due)

    def _close_group(self, text: str) -> None:
        self._text_len += len(text)
        self._groups.append(_Group(tuple(self._open), text, self._text_len))
        self._open.clear()


def _trimmed(entries: Sequence[LogprobEntry], raw: bytes) -> list[LogprobEntry]:
    """The entries that `raw` covers, the last one shortened to it."""
    kept: list[LogprobEntry] = []
    for entry in entries:
        if not raw:
            break
        piece, raw = raw[: len(entry.token.bytes)], raw[len(entry.token.bytes) :]
        kept.append(entry if piece == entry.token.bytes else _with_bytes(entry, piece))
    return kept


def _with_bytes(entry: LogprobEntry, raw: bytes) -> LogprobEntry:
    return replace(entry, token=replace(entry.token, bytes=raw, text=raw.decode("utf-8", "replace")))
