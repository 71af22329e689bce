# SPDX-License-Identifier: Apache-2.0
"""What is told of the prefix index: nothing until somebody asks, one group of it, and whether it is the whole."""

from __future__ import annotations

import numpy as np
import pytest

from fakes import FakeControl, FakeMessages, FakeRunner
from tokenspeed.core.ipc import CacheChanges, WatchCache, decode_from_engine, decode_to_engine, encode_frame
from tokenspeed.core.plan import CacheGroup, GroupKind, KvEventKind, KvEvents, KvTier
from tokenspeed.engine.cache_watch import CacheWatch
from tokenspeed.engine.step import EngineLoop

FULL = CacheGroup(GroupKind.FULL, 4, 64)
WINDOW = CacheGroup(GroupKind.WINDOW, 4, 64, window=8)
ROOT = -77


def stored(block: int, parent: int, *token_ids: int, group: int = 0, tier: KvTier = KvTier.DEVICE) -> list[int]:
    return [KvEventKind.STORED, tier, group, 1, block, 1, parent, len(token_ids), *token_ids]


def removed(block: int, *, group: int = 0, tier: KvTier = KvTier.DEVICE) -> list[int]:
    return [KvEventKind.REMOVED, tier, group, 1, block, 0, 0, 0]


def events(*rows: list[int]) -> KvEvents:
    token_ids = [token_id for row in rows for token_id in row[8:]]
    return KvEvents(np.array([row[:8] for row in rows], np.int64).reshape(-1, 8), np.array(token_ids, np.int32))


def told(changes: CacheChanges | None) -> tuple[list[list[int]], list[int]]:
    assert changes is not None
    rows = np.frombuffer(changes.rows, np.int64).reshape(-1, 5).tolist()
    return rows, np.frombuffer(changes.token_ids, np.int32).tolist()


def test_nothing_is_told_until_somebody_asks_and_then_that_something_was_missed() -> None:
    watch = CacheWatch([FULL])
    assert watch.changes(events(stored(1, ROOT, 10, 11))) is None
    assert watch.switch(True) == CacheChanges(root=ROOT, has_missed=True)
    assert told(watch.changes(events(stored(2, 1, 12, 13), removed(1)))) == (
        [[1, 0, 2, 1, 2], [0, 0, 1, 0, 0]],
        [12, 13],
    )
    assert watch.switch(False) is None
    assert watch.changes(events(removed(2))) is None


def test_asked_before_anything_was_stored_the_whole_is_told() -> None:
    watch = CacheWatch([FULL])
    assert watch.changes(events()) is None
    assert watch.switch(True) == CacheChanges(root=0)
    changes = watch.changes(events(stored(1, ROOT, 10, 11)))
    assert changes is not None
    assert changes.root == ROOT
    assert not changes.has_missed


@pytest.mark.parametrize(("groups", "own"), [((FULL, WINDOW), 0), ((WINDOW, FULL), 1), ((WINDOW, WINDOW), 0)])
def test_one_group_speaks_for_all_in_each_partition_and_tier(groups: tuple[CacheGroup, ...], own: int) -> None:
    watch = CacheWatch(groups)
    watch.switch(True)
    other = 1 - own
    changes = watch.changes(
        events(
            stored(1, ROOT, 10, 11, group=own),
            stored(1, ROOT, 20, 21, group=other),
            stored(2, ROOT, 30, 31, group=2 + own),
            stored(1, 0, group=own, tier=KvTier.HOST),
            removed(2, group=2 + other),
        )
    )
    assert told(changes) == ([[1, 0, 1, ROOT, 2], [1, 2, 2, ROOT, 2], [1, 1, 1, 0, 0]], [10, 11, 30, 31])
    assert watch.changes(events(removed(1, group=other))) is None


def test_the_loop_tells_what_its_control_plane_tells() -> None:
    control = FakeControl()
    messages = FakeMessages([[WatchCache(True)], [], [WatchCache(False)], []])
    loop = EngineLoop(control, FakeRunner(), messages, overlap_depth=1, cache_watch=CacheWatch([FULL]))
    control.kv_events = [events(), events(stored(1, ROOT, 10, 11)), events(), events(removed(1))]
    for _ in range(4):
        loop.turn(0.0)
    changes = [message for message in messages.sent if isinstance(message, CacheChanges)]
    assert [len(told(each)[0]) for each in changes] == [0, 1]


def test_a_loop_without_a_watch_never_asks_for_events() -> None:
    control = FakeControl()
    control.kv_events = [events(stored(1, ROOT, 10, 11))]
    messages = FakeMessages([[WatchCache(True)]])
    EngineLoop(control, FakeRunner(), messages, overlap_depth=1).turn(0.0)
    assert len(control.kv_events) == 1
    assert not [message for message in messages.sent if isinstance(message, CacheChanges)]


def test_the_messages_cross() -> None:
    changes = CacheChanges(root=ROOT, has_missed=True, rows=b"12", token_ids=b"34")
    assert decode_from_engine(encode_frame(changes)[4:]) == changes
    assert decode_to_engine(encode_frame(WatchCache(True))[4:]) == WatchCache(True)
