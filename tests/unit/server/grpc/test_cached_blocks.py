# SPDX-License-Identifier: Apache-2.0
"""The copy of the prefix index: what is told of it, and what it holds, is what the engine's index holds."""

from __future__ import annotations

import random

import numpy as np

from tokenspeed.core.ipc import CacheChanges
from tokenspeed.server.grpc.cached_blocks import CachedBlocks, Removed, Stored

ROOT = 99
DEVICE, HOST, OTHER_DEVICE = 0, 1, 2


def changes(*rows: tuple[int, ...], has_missed: bool = False) -> CacheChanges:
    """rows: (stored, place, hash, parent, *token ids)."""
    packed = np.array([(*row[:4], len(row) - 4) for row in rows], np.int64)
    token_ids = np.array([token_id for row in rows for token_id in row[4:]], np.int32)
    return CacheChanges(root=ROOT, has_missed=has_missed, rows=packed.tobytes(), token_ids=token_ids.tobytes())


def stored(block: int, parent: int = ROOT, place: int = DEVICE) -> tuple[int, ...]:
    return (1, place, block, parent, *(() if place == HOST else (block, block + 1)))


def removed(block: int, place: int = DEVICE) -> tuple[int, ...]:
    return (0, place, block, 0)


def told(news: list[Stored | Removed]) -> list[tuple[object, ...]]:
    """("+", parent of the first, hashes) and ("-", hashes)."""
    return [
        ("-", *each.hashes)
        if isinstance(each, Removed)
        else ("+", each.blocks[0].parent, *(b.hash for b in each.blocks))
        for each in news
    ]


def test_a_chain_is_one_event_and_keeps_its_tokens() -> None:
    blocks = CachedBlocks()
    news = blocks.apply(changes(stored(1), stored(2, 1), stored(3, 2), stored(7)))
    assert told(news) == [("+", None, 1, 2, 3), ("+", None, 7)]
    assert isinstance(news[0], Stored)
    assert [block.token_ids for block in news[0].blocks] == [(1, 2), (2, 3), (3, 4)]
    assert told(blocks.apply(changes(removed(3), removed(2), stored(4, 1)))) == [("-", 3, 2), ("+", 1, 4)]


def test_a_block_counts_until_it_has_left_its_last_place() -> None:
    blocks = CachedBlocks()
    blocks.apply(changes(stored(1)))
    assert blocks.apply(changes(stored(1, place=HOST), stored(1, place=OTHER_DEVICE), removed(1))) == []
    assert blocks.apply(changes(removed(1, OTHER_DEVICE), removed(1, OTHER_DEVICE))) == []
    assert told(blocks.apply(changes(removed(1, HOST)))) == [("-", 1)]


def test_what_cannot_be_placed_is_never_told() -> None:
    blocks = CachedBlocks()
    assert blocks.apply(changes(stored(5, 4), stored(6, 5), stored(8, place=HOST), has_missed=True)) == []
    assert not blocks.is_whole
    assert list(blocks.chains()) == []
    assert blocks.apply(changes(removed(6), removed(8, HOST), removed(77))) == []
    assert told(blocks.apply(changes(stored(4), stored(9, 4)))) == [("+", None, 4, 9)]


def test_the_state_begins_with_parents() -> None:
    blocks = CachedBlocks()
    blocks.apply(changes(stored(1), stored(2, 1), stored(3, 2), stored(4, 2), stored(5, 4), stored(6)))
    blocks.apply(changes(removed(1), stored(1)))
    assert told(list(blocks.chains())) == [("+", None, 6), ("+", None, 1, 2, 3), ("+", 2, 4, 5)]
    blocks.clear()
    assert list(blocks.chains()) == []
    assert len(blocks) == 0


def test_whoever_follows_holds_what_the_engine_holds_whenever_it_began() -> None:
    """Random trees grow and lose leaves; a follower from the start and one from the middle end with the same."""
    random_state = random.Random(3)
    blocks, parents, early, late = CachedBlocks(), {ROOT: ROOT}, {}, None
    for number in range(400):
        leaves = [block for block in parents if block != ROOT and block not in parents.values()]
        if leaves and random_state.random() < 0.4:
            gone = random_state.choice(leaves)
            row = removed(gone)
            del parents[gone]
        else:
            row = stored(1000 + number, random_state.choice(list(parents)))
            parents[row[2]] = row[3]
        news = blocks.apply(changes(row))
        for follower in (early, *([] if late is None else [late])):
            follow(follower, news)
        if number == 200:
            late = {}
            follow(late, list(blocks.chains()))
    del parents[ROOT]
    assert early == late == {block: None if parent == ROOT else parent for block, parent in parents.items()}


def follow(held: dict[int, int | None], news: list[Stored | Removed]) -> None:
    """As a router does: a block is placed below a parent that is held."""
    for each in news:
        if isinstance(each, Removed):
            for block_hash in each.hashes:
                del held[block_hash]
            continue
        for block in each.blocks:
            assert block.parent is None or block.parent in held
            held[block.hash] = block.parent
