# SPDX-License-Identifier: Apache-2.0
"""Whether a conversation goes on from an earlier one, and if not, where the two part and why.

Knows conversations as the chat template gets them, and keeps hashes only: no text, no tokens, no pages.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from tokenspeed.llm.input_processor import ChatPrompt

HEADER = "x-tokenspeed-prefix"
NUM_MESSAGES_MAX = 4096
"""So many messages of a conversation are compared; what comes after them is taken as the same."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Hashes of what a prompt is rendered from. messages: one each, 64 bits, odd for those of the system."""

    messages: array[int]
    tools: tuple[int, ...]
    kwargs: int

    @classmethod
    def of(cls, prompt: ChatPrompt) -> Fingerprint:
        """Equal parts get equal hashes in this process, and in no other."""
        messages = array("q", (_message_hash(message) for message in prompt.messages[:NUM_MESSAGES_MAX]))
        kwargs = hash(msgspec.json.encode(dict(prompt.template_kwargs), order="deterministic"))
        return cls(messages, tuple(_hash(tool) for tool in prompt.tools or ()), kwargs)

    def continues(self, earlier: Fingerprint) -> bool:
        """Whether all that this prompt shares with the earlier one in length is the same: it goes on from there, or
        from a point of it."""
        return self._has_head_of(earlier) and self.num_common(earlier) == min(len(self.messages), len(earlier.messages))

    def is_related(self, earlier: Fingerprint) -> bool:
        """Whether this looks like the earlier conversation, changed, and not like another one of the same client."""
        same_place = any(new == old for new, old in zip(self.messages, earlier.messages, strict=False))
        return same_place or (bool(self.tools) and self.tools == earlier.tools)

    def num_common(self, earlier: Fingerprint) -> int:
        """Messages at the beginning that are the same."""
        pairs = zip(self.messages, earlier.messages, strict=False)
        return next((index for index, (new, old) in enumerate(pairs) if new != old), _shorter(self, earlier))

    def _has_head_of(self, earlier: Fingerprint) -> bool:
        return self.tools == earlier.tools and self.kwargs == earlier.kwargs


def divergence(new: Fingerprint, earlier: Fingerprint) -> str | None:
    """How `new` departs from `earlier`, as `prefix-diverged: message 3, tool list changed`; None where it goes on from
    it. Messages are counted from 0, the system's included; where only the head of the prompt changed, the message is
    the first of those that the earlier prompt did not have."""
    if new.continues(earlier):
        return None
    place = new.num_common(earlier)
    reasons = []
    if new.tools != earlier.tools:
        reasons.append(f"tool list changed ({_tools_changed(new.tools, earlier.tools)})")
    if new.kwargs != earlier.kwargs:
        reasons.append("template kwargs changed")
    if place < _shorter(new, earlier):
        reasons.append(_message_changed(new.messages, earlier.messages, place))
    return f"prefix-diverged: message {place}, {', '.join(reasons)}"


def _shorter(new: Fingerprint, earlier: Fingerprint) -> int:
    return min(len(new.messages), len(earlier.messages))


def _message_changed(new: Sequence[int], earlier: Sequence[int], place: int) -> str:
    """What became of the message at `place`, where the two differ."""
    was_before, is_later = new[place] in earlier[place + 1 :], earlier[place] in new[place + 1 :]
    if (new[place] | earlier[place]) & 1 and not (was_before or is_later):
        return "system message changed"
    if was_before and not is_later:
        return "removed (compaction)"
    if is_later and not was_before:
        return "inserted"
    num_dropped = len(earlier) - len(new)
    return f"edited, {num_dropped} dropped after it" if num_dropped > 0 else "edited"


def _tools_changed(new: Iterable[int], earlier: Iterable[int]) -> str:
    now, before = Counter(new), Counter(earlier)
    counts = ((now - before).total(), "added"), ((before - now).total(), "removed")
    return ", ".join(f"{count} {word}" for count, word in counts if count) or "reordered"


def _message_hash(message: Mapping[str, object]) -> int:
    """A changed message is also a new one, so only the system's are told apart."""
    return (_hash(message) & ~1) | (message.get("role") == "system")


def _hash(value: object) -> int:
    return hash(msgspec.json.encode(value))
