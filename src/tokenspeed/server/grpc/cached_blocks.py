# SPDX-License-Identifier: Apache-2.0
"""A copy of the engine's prefix index, kept up to date from its messages: which blocks a prompt could resume from.

A block counts once, on however many devices and in whatever tier it lies. A block whose parent was never seen cannot be
placed and is not told of. Knows no wire.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from tokenspeed.core.ipc import CacheChanges

_NUM_COLUMNS = 5


@dataclass(slots=True)
class Block:
    """A block of tokens. parent: None for the first of a prompt. places: a bit for each place where it lies. is_placed:
    all before it were known when it came, so that it was told of."""

    hash: int
    parent: int | None
    token_ids: tuple[int, ...]
    places: int
    is_placed: bool


@dataclass(frozen=True, slots=True)
class Stored:
    """Blocks that came, each the parent of the next."""

    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class Removed:
    """Blocks that went."""

    hashes: tuple[int, ...]


class CachedBlocks:
    """The blocks. is_whole: nothing was stored that we were not told of."""

    def __init__(self) -> None:
        self._blocks: dict[int, Block] = {}
        self.is_whole = True

    def __len__(self) -> int:
        return len(self._blocks)

    def clear(self) -> None:
        """Everything has gone."""
        self._blocks.clear()
        self.is_whole = True

    def apply(self, changes: CacheChanges) -> list[Stored | Removed]:
        """Take a message; what of it matters to a router, in order."""
        self.is_whole = self.is_whole and not changes.has_missed
        rows = np.frombuffer(changes.rows, np.int64).reshape(-1, _NUM_COLUMNS).tolist()
        token_ids = np.frombuffer(changes.token_ids, np.int32).tolist()
        news: list[Block | int] = []
        start = 0
        for stored, place, block_hash, parent, num_tokens in rows:
            end = start + num_tokens
            if not stored:
                news += self._remove(block_hash, 1 << place)
            elif block_hash in self._blocks:
                self._blocks[block_hash].places |= 1 << place
            elif num_tokens > 0:  # one that is only in a lower tier and was never seen before cannot be placed
                own_parent = None if parent == changes.root else parent
                news += self._add(Block(block_hash, own_parent, tuple(token_ids[start:end]), 1 << place, False))
            start = end
        return _grouped(news)

    def chains(self) -> Iterator[Stored]:
        """All blocks that can be placed, parents before children."""
        children: dict[int | None, list[Block]] = {}
        for block in self._blocks.values():
            if block.is_placed:
                children.setdefault(block.parent, []).append(block)
        beginnings = deque(children.get(None, ()))
        while beginnings:
            chain = [beginnings.popleft()]
            while following := children.get(chain[-1].hash):
                first, *others = following
                beginnings.extend(others)
                chain.append(first)
            yield Stored(tuple(chain))

    def _add(self, block: Block) -> list[Block | int]:
        parent = None if block.parent is None else self._blocks.get(block.parent)
        block.is_placed = block.parent is None or (parent is not None and parent.is_placed)
        self._blocks[block.hash] = block
        return [block] if block.is_placed else []

    def _remove(self, block_hash: int, place: int) -> list[Block | int]:
        block = self._blocks.get(block_hash)
        if block is None:
            return []
        block.places &= ~place
        if block.places:
            return []
        del self._blocks[block_hash]
        return [block_hash] if block.is_placed else []


def _grouped(news: list[Block | int]) -> list[Stored | Removed]:
    """Neighbours that belong together in one."""
    groups: list[Stored | Removed] = []
    for is_block, run in groupby(news, key=lambda each: isinstance(each, Block)):
        if is_block:
            groups += _chained([each for each in run if isinstance(each, Block)])
        else:
            groups.append(Removed(tuple(each for each in run if isinstance(each, int))))
    return groups


def _chained(blocks: list[Block]) -> Iterator[Stored]:
    """Cut where a block is not the child of the one before."""
    start = 0
    for at in range(1, len(blocks) + 1):
        if at == len(blocks) or blocks[at].parent != blocks[at - 1].hash:
            yield Stored(tuple(blocks[start:at]))
            start = at
