# SPDX-License-Identifier: Apache-2.0
"""Subscriptions: the state first, then each change under the next number; when the engine is watched and when not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from tokenspeed.core.ipc import CacheChanges
from tokenspeed.server.grpc import cache_feed
from tokenspeed.server.grpc.cache_feed import CacheFeed, SlowSubscriberError
from unit.server.grpc.test_cached_blocks import changes, removed, stored


class FakeLLM:
    """Answers a watch as an engine does."""

    def __init__(self, first: CacheChanges | None = None) -> None:
        self.first = first or CacheChanges(root=99)
        self.watches: list[bool] = []
        self.tell: Callable[[CacheChanges | None], None] | None = None

    def watch_cache(self, on_changes: Callable[[CacheChanges | None], None] | None) -> None:
        self.watches.append(on_changes is not None)
        self.tell = on_changes
        if on_changes is not None:
            asyncio.get_running_loop().call_soon(on_changes, self.first)


def shown(batch: Any) -> list[Any]:
    """The events of a batch in short."""
    kinds = {
        "stored": lambda e: [b.block_hash for b in e.stored.blocks],
        "removed": lambda e: list(e.removed.block_hashes),
    }
    return [(which, kinds[which](e)) if (which := e.WhichOneof("data")) in kinds else which for e in batch.events]


def test_a_subscriber_gets_the_state_and_then_each_change_in_turn() -> None:
    async def run() -> None:
        llm = FakeLLM()
        feed = CacheFeed(llm, 2)
        first = feed.batches()
        state = await anext(first)
        assert shown(state) == ["cleared"]
        assert llm.tell is not None
        llm.tell(changes(stored(1), stored(2, 1)))
        second = feed.batches()
        later = await anext(second)
        assert shown(later) == ["cleared", ("stored", [1, 2])]
        assert later.snapshot.blocks == 2
        assert later.snapshot.unknown_before == 0
        llm.tell(changes(removed(2), stored(3, 1)))
        llm.tell(changes())
        llm.tell(None)
        for batches, before in ((first, state.sequence_number + 1), (second, later.sequence_number)):
            if batches is first:
                assert shown(await anext(batches)) == [("stored", [1, 2])]
            change, gone = await anext(batches), await anext(batches)
            assert shown(change) == [("removed", [2]), ("stored", [3])]
            assert shown(gone) == ["cleared"]
            assert [change.sequence_number, gone.sequence_number] == [before + 1, before + 2]
            await batches.aclose()
        assert llm.watches == [True]
        feed.close()
        assert llm.watches == [True, False]

    asyncio.run(run())


def test_what_came_before_the_state_is_told_once() -> None:
    async def run() -> None:
        llm = FakeLLM(changes(stored(1)))
        feed = CacheFeed(llm, 2)
        batches = feed.batches()
        assert shown(await anext(batches)) == ["cleared", ("stored", [1])]
        assert llm.tell is not None
        llm.tell(changes(stored(2, 1)))
        assert shown(await anext(batches)) == [("stored", [2])]
        await batches.aclose()
        feed.close()

    asyncio.run(run())


def test_a_large_state_comes_in_numbered_chunks_and_goes_on_where_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_feed, "_CHUNK_TOKENS", 6)

    async def run() -> None:
        llm = FakeLLM()
        feed = CacheFeed(llm, 2)
        keeper = feed.batches()
        await anext(keeper)
        assert llm.tell is not None
        llm.tell(changes(*(stored(block, block - 1 if block > 1 else 99) for block in range(1, 8)), has_missed=True))
        late = feed.batches()
        chunks = [await anext(late) for _ in range(3)]
        assert [shown(chunk) for chunk in chunks] == [
            ["cleared", ("stored", [1, 2, 3])],
            [("stored", [4, 5, 6])],
            [("stored", [7])],
        ]
        assert chunks[1].events[0].stored.parent_block_hash == 3
        assert [(c.snapshot.index, c.snapshot.count, c.snapshot.unknown_before) for c in chunks] == [
            (0, 3, 1),
            (1, 3, 1),
            (2, 3, 1),
        ]
        llm.tell(changes(removed(7)))
        numbers = [chunk.sequence_number for chunk in [*chunks, await anext(late)]]
        assert numbers == list(range(numbers[0], numbers[0] + 4))
        await late.aclose()
        await keeper.aclose()
        feed.close()

    asyncio.run(run())


def test_the_engine_is_watched_until_a_while_after_the_last_subscriber() -> None:
    async def run() -> None:
        llm = FakeLLM()
        feed = CacheFeed(llm, 2, linger_s=0.01)
        assert llm.watches == []
        one = feed.batches()
        await anext(one)
        assert llm.tell is not None
        llm.tell(changes(stored(1)))
        await one.aclose()
        again = feed.batches()
        assert shown(await anext(again)) == ["cleared", ("stored", [1])]
        await again.aclose()
        async with asyncio.timeout(5.0):
            while llm.watches != [True, False]:
                await asyncio.sleep(0.001)
        anew = feed.batches()
        assert shown(await anext(anew)) == ["cleared"]
        await anew.aclose()
        feed.close()

    asyncio.run(run())


def test_who_takes_nothing_is_cut_off_and_others_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_feed, "_NUM_BATCHES_MAX", 2)

    async def run() -> None:
        llm = FakeLLM()
        feed = CacheFeed(llm, 2)
        slow, fast = feed.batches(), feed.batches()
        await anext(slow)
        await anext(fast)
        assert llm.tell is not None
        for number in range(3):
            llm.tell(changes(stored(number)))
            assert shown(await anext(fast)) == [("stored", [number])]
        with pytest.raises(SlowSubscriberError, match="subscribe again"):
            await anext(slow)
        await fast.aclose()
        feed.close()

    asyncio.run(run())
