# SPDX-License-Identifier: Apache-2.0
"""What this server remembers of each session: counts, times and the shape of its prompts, for people to look at.

Bounded: the session that was silent for longest is forgotten first. Knows keys and hashes; keeps no text.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from tokenspeed.llm.input_processor import ChatPrompt
from tokenspeed.observability.logging import RequestSummary
from tokenspeed.server.prefix_watch import Fingerprint, divergence
from tokenspeed.server.session_list import SessionCard, SessionList

NUM_SESSIONS_MAX = 1024
NUM_HASHES_MAX = 1 << 20
_NUM_BRANCHES_MAX = 4
_WELL = frozenset({"stop", "length", "tool_calls"})


@dataclass(slots=True)
class _Session:
    """branches: the conversations under one key, the one used last at the end."""

    first_seen: float
    last_seen: float
    branches: list[Fingerprint] = field(default_factory=list)
    num_requests: int = 0
    num_turns: int = 0
    num_running: int = 0
    num_prompt: int = 0
    num_cached: int = 0
    num_generated: int = 0
    context_len: int = 0
    held_until: float | None = None
    tokens_per_s: float | None = None
    finish_reason: str | None = None
    prefix: str | None = None

    @property
    def num_hashes(self) -> int:
        return sum(len(branch.messages) + len(branch.tools) + 1 for branch in self.branches)


class SessionBook:
    """The sessions of one server. now: Unix time. Belongs to one event loop; nothing here waits."""

    def __init__(
        self,
        now: Callable[[], float] = time.time,
        num_sessions_max: int = NUM_SESSIONS_MAX,
        num_hashes_max: int = NUM_HASHES_MAX,
    ) -> None:
        self._now = now
        self._num_sessions_max, self._num_hashes_max = num_sessions_max, num_hashes_max
        self._sessions: dict[str, _Session] = {}
        self._num_hashes = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def compare(self, key: str, prompt: ChatPrompt) -> str | None:
        """Note the prompt of a session's next request; how it departs from those before, None where it goes on from
        one of them or is the first of its kind."""
        session = self._seen(key)
        self._num_hashes -= session.num_hashes
        told = _compare(session.branches, Fingerprint.of(prompt))
        self._num_hashes += session.num_hashes
        session.prefix = told or session.prefix
        self._forget_beyond_limits()
        return told

    def began(self, key: str) -> None:
        """A request of the session is being worked on."""
        session = self._seen(key)
        session.num_requests += 1
        session.num_running += 1
        session.held_until = None
        self._forget_beyond_limits()

    def answering(self, key: str, num_prompt: int) -> None:
        """The first token of a reply to a prompt of this length has come."""
        self._seen(key).context_len = num_prompt

    def refused(self, key: str) -> None:
        """The request was turned away."""
        session = self._seen(key)
        session.num_running = max(session.num_running - 1, 0)
        session.finish_reason = "refused"

    def ended(self, key: str, summary: RequestSummary, hold_s: float | None) -> None:
        """The request ended, in whatever way; hold_s: so long its pages are kept if it ended well."""
        session = self._seen(key)
        session.num_running = max(session.num_running - 1, 0)
        session.num_prompt += summary.num_prompt
        session.num_cached += summary.num_cached
        session.num_generated += summary.num_generated
        session.context_len = summary.num_prompt + summary.num_generated
        session.tokens_per_s = summary.tokens_per_s or session.tokens_per_s
        session.finish_reason = ",".join(summary.finish_reasons) or None
        if _WELL.issuperset(summary.finish_reasons):
            session.num_turns += 1
            session.held_until = None if hold_s is None else self._now() + hold_s

    def released(self, key: str) -> None:
        """The pages of the session's last request are not kept after all."""
        if key in self._sessions:
            self._sessions[key].held_until = None

    def listing(self, *, any_held: bool) -> SessionList:
        """All sessions. any_held: whether the engine holds pages of any session at all."""
        now = self._now()
        cards = [_card(key, session, now, any_held=any_held) for key, session in reversed(self._sessions.items())]
        return SessionList(now=now, data=cards)

    def _seen(self, key: str) -> _Session:
        now = self._now()
        session = self._sessions.pop(key, None) or _Session(now, now)
        session.last_seen = now
        self._sessions[key] = session  # the last seen is at the end
        return session

    def _forget_beyond_limits(self) -> None:
        while len(self._sessions) > self._num_sessions_max or (
            self._num_hashes > self._num_hashes_max and len(self._sessions) > 1
        ):
            forgotten = self._sessions.pop(next(iter(self._sessions)))
            self._num_hashes -= forgotten.num_hashes


def _compare(branches: list[Fingerprint], new: Fingerprint) -> str | None:
    """Puts `new` among the branches. One that it continues is replaced; others stay, since a client may go on with
    several conversations by turns."""
    for index, branch in reversed(list(enumerate(branches))):
        if new.continues(branch):
            branches[index:] = [*branches[index + 1 :], new]
            return None
    related = [branch for branch in branches if new.is_related(branch)]
    told = None
    if related:
        told = divergence(new, max(reversed(related), key=new.num_common))
    branches.append(new)
    del branches[:-_NUM_BRANCHES_MAX]
    return told


def _card(key: str, session: _Session, now: float, *, any_held: bool) -> SessionCard:
    is_held = any_held and session.held_until is not None and session.held_until > now
    return SessionCard(
        session=key,
        requests=session.num_requests,
        turns=session.num_turns,
        running=session.num_running,
        prompt_tokens=session.num_prompt,
        cached_tokens=session.num_cached,
        generated_tokens=session.num_generated,
        context_tokens=session.context_len,
        first_seen=session.first_seen,
        last_seen=session.last_seen,
        held_until=session.held_until if is_held else None,
        output_tokens_per_s=session.tokens_per_s,
        finish_reason=session.finish_reason,
        prefix=session.prefix,
    )
