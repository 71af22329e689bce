# SPDX-License-Identifier: Apache-2.0
"""Cache events for those who subscribe: first the state, in chunks, then every change as a numbered batch.

The engine tells its changes only while somebody listens, and for a while after the last has gone, so that a gateway
that comes back gets the whole state. Knows the messages of the service; sends nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterable
from typing import Any, Protocol

from smg_grpc_proto.generated import common_pb2

from tokenspeed.core.ipc import CacheChanges
from tokenspeed.server.grpc.cached_blocks import CachedBlocks, Removed, Stored

FIRST_SEQUENCE = 1 << 32
"""The chunks of a state are numbered up to the batch that it was taken at, so there must be room before the first."""
_CHUNK_TOKENS = 131_072
_NUM_BATCHES_MAX = 4096
_LINGER_S = 600.0


class SlowSubscriberError(Exception):
    """A subscriber took too little of what happened, and has to begin again from the state."""


class WatchedLLM(Protocol):
    """An engine that tells what its cache gains and loses."""

    def watch_cache(self, on_changes: Callable[[CacheChanges | None], None] | None) -> None:
        """Call with each message from now on, the first of which comes soon, and with None when all has gone; None
        ends it."""
        ...


class CacheFeed:
    """Subscriptions to one engine's cache. All methods belong to the loop on which changes come."""

    def __init__(self, llm: WatchedLLM, block_size: int, linger_s: float = _LINGER_S) -> None:
        self._llm = llm
        self._block_size = block_size
        self._linger_s = linger_s
        self._blocks = CachedBlocks()
        self._sequence = FIRST_SEQUENCE
        self._num_events = 0
        self._subscribers: set[_Subscriber] = set()
        self._is_watching = False
        self._is_ready = asyncio.Event()
        self._ending: asyncio.TimerHandle | None = None

    async def batches(self) -> AsyncGenerator[Any, None]:
        """KvEventBatch messages, without an end. Raises SlowSubscriberError."""
        subscriber = _Subscriber()
        self._begin()
        self._subscribers.add(subscriber)
        try:
            await self._is_ready.wait()
            subscriber.clear()  # what came so far is in the state
            for chunk in self._state():
                yield chunk
            while True:
                yield await subscriber.next()
        finally:
            self._subscribers.discard(subscriber)
            self._end_later()

    def close(self) -> None:
        """Ends the watch."""
        if self._ending is not None:
            self._ending.cancel()
        self._end()

    def _begin(self) -> None:
        if self._ending is not None:
            self._ending.cancel()
            self._ending = None
        if not self._is_watching:
            self._is_watching = True
            self._llm.watch_cache(self._changed)

    def _end_later(self) -> None:
        if not self._subscribers and self._is_watching:
            self._ending = asyncio.get_running_loop().call_later(self._linger_s, self._end)

    def _end(self) -> None:
        if self._is_watching:
            self._llm.watch_cache(None)
        self._is_watching = False
        self._is_ready.clear()
        self._blocks.clear()

    def _changed(self, changes: CacheChanges | None) -> None:
        if changes is None:
            self._blocks.clear()
            self._publish([common_pb2.KvCacheEvent(cleared=common_pb2.KvCacheCleared())])
            return
        news = self._blocks.apply(changes)
        self._is_ready.set()
        if news:
            self._publish([self._event(each) for each in news])

    def _publish(self, events: list[Any]) -> None:
        self._sequence += 1
        for event in events:
            self._num_events += 1
            event.event_id = self._num_events
        batch = common_pb2.KvEventBatch(sequence_number=self._sequence, timestamp=time.time(), events=events)
        for subscriber in self._subscribers:
            subscriber.push(batch)

    def _state(self) -> Iterable[Any]:
        """The chunks of the state as it is now; made one by one, since they may be many."""
        pieces = _pieces(self._blocks.chains(), max(1, _CHUNK_TOKENS // self._block_size)) or [[]]
        first, num_blocks = self._sequence - len(pieces) + 1, len(self._blocks)
        unknown = 0 if self._blocks.is_whole else 1
        for index, chains in enumerate(pieces):
            begins = [common_pb2.KvCacheEvent(cleared=common_pb2.KvCacheCleared())] if index == 0 else []
            yield common_pb2.KvEventBatch(
                sequence_number=first + index,
                timestamp=time.time(),
                events=[*begins, *(self._event(chain) for chain in chains)],
                snapshot=common_pb2.KvSnapshotChunk(
                    index=index, count=len(pieces), blocks=num_blocks, unknown_before=unknown
                ),
            )

    def _event(self, news: Stored | Removed) -> Any:
        if isinstance(news, Removed):
            return common_pb2.KvCacheEvent(removed=common_pb2.KvBlocksRemoved(block_hashes=news.hashes))
        blocks = [
            common_pb2.KvBlock(block_hash=block.hash, token_ids=block.token_ids, block_size=len(block.token_ids))
            for block in news.blocks
        ]
        stored = common_pb2.KvBlocksStored(blocks=blocks, parent_block_hash=news.blocks[0].parent)
        return common_pb2.KvCacheEvent(stored=stored)


class _Subscriber:
    """What one subscriber has still to take."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[Any] = asyncio.Queue()
        self._is_lost = False

    def push(self, batch: Any) -> None:
        """One more, unless too many wait."""
        self._is_lost = self._is_lost or self._queue.qsize() >= _NUM_BATCHES_MAX
        if not self._is_lost:
            self._queue.put_nowait(batch)

    def clear(self) -> None:
        """Nothing of what came so far is wanted."""
        self._queue = asyncio.Queue()
        self._is_lost = False

    async def next(self) -> Any:
        """The next batch. Raises SlowSubscriberError once some were lost."""
        if self._is_lost:
            raise SlowSubscriberError(f"more than {_NUM_BATCHES_MAX} batches waited; subscribe again")
        return await self._queue.get()


def _pieces(chains: Iterable[Stored], num_blocks_max: int) -> list[list[Stored]]:
    """Chains in groups of at most so many blocks; a long one is cut."""
    groups: list[list[Stored]] = []
    room = 0
    for chain in chains:
        rest = chain.blocks
        while rest:
            if room == 0:
                groups.append([])
                room = num_blocks_max
            part, rest = rest[:room], rest[room:]
            groups[-1].append(Stored(part))
            room -= len(part)
    return groups
