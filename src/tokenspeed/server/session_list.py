# SPDX-License-Identifier: Apache-2.0
"""The answer of GET /sessions, for who gives it and for who reads it. Knows nothing else."""

from __future__ import annotations

import msgspec


class SessionCard(msgspec.Struct, frozen=True, kw_only=True):
    """A session as GET /sessions lists it. Times are Unix seconds. turns: requests that ended with a reply. Tokens are
    sums over its requests, but for context_tokens: prompt and reply of the last. held_until: its pages wait until then
    at the latest, and less long when memory runs short. output_tokens_per_s: of the last reply. prefix: how its prompt
    last departed from an earlier one."""

    session: str
    requests: int
    turns: int
    running: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    context_tokens: int
    first_seen: float
    last_seen: float
    held_until: float | None
    output_tokens_per_s: float | None
    finish_reason: str | None
    prefix: str | None


class SessionList(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of GET /sessions, the session seen last first."""

    object: str = "list"
    now: float
    data: list[SessionCard]
