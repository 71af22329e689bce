# SPDX-License-Identifier: Apache-2.0
"""What the prefix index gains and loses, cut down to what a router needs, for as long as somebody wants to know.

A block stands for all tokens up to its end, so one cache group is enough: the first that keeps every token. Knows the
control plane's events and their numbering; keeps no copy of the index.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tokenspeed.core.ipc import CacheChanges
from tokenspeed.core.plan import CacheGroup, GroupKind, KvEventKind, KvEvents, KvTier

_KIND, _TIER, _GROUP, _HASH_LOW, _PARENT_LOW, _NUM_TOKENS = 0, 1, 2, 4, 6, 7
_NUM_TIERS = len(KvTier)


class CacheWatch:
    """Turns events into messages while switched on. groups: the cache groups of one partition, in their order."""

    def __init__(self, groups: Sequence[CacheGroup]) -> None:
        kinds = [group.kind for group in groups]
        self._num_groups = len(kinds)
        self._group = kinds.index(GroupKind.FULL) if GroupKind.FULL in kinds else 0
        self._is_on = False
        self._root: int | None = None
        self._has_missed = False

    def switch(self, on: bool) -> CacheChanges | None:
        """Begin or end to tell. The first message is empty and says whether anything was stored before it."""
        self._is_on = on
        return CacheChanges(root=self._root or 0, has_missed=self._has_missed) if on else None

    def changes(self, events: KvEvents) -> CacheChanges | None:
        """The message about these events, which must be all since the last call. None when there is none to send."""
        if len(events.rows) == 0:
            return None
        if self._root is None:
            self._root = _root_of(events)
        if not self._is_on:
            self._has_missed = True
            return None
        rows, token_ids = self._own(events)
        if len(rows) == 0:
            return None
        place = rows[:, _GROUP] // self._num_groups * _NUM_TIERS + rows[:, _TIER]
        stored = rows[:, _KIND] == KvEventKind.STORED
        columns = (stored, place, rows[:, _HASH_LOW], rows[:, _PARENT_LOW], rows[:, _NUM_TOKENS])
        packed = np.ascontiguousarray(np.stack(columns, axis=1), np.int64)
        return CacheChanges(
            root=self._root, has_missed=self._has_missed, rows=packed.tobytes(), token_ids=token_ids.tobytes()
        )

    def _own(self, events: KvEvents) -> tuple[np.ndarray, np.ndarray]:
        """The rows of our group, and their tokens."""
        is_own = events.rows[:, _GROUP] % self._num_groups == self._group
        if is_own.all():
            return events.rows, events.token_ids
        return events.rows[is_own], events.token_ids[np.repeat(is_own, events.rows[:, _NUM_TOKENS])]


def _root_of(events: KvEvents) -> int:
    """What the first blocks of all prompts call their parent: the first block that is ever stored is one of them."""
    return int(events.rows[0, _PARENT_LOW])
