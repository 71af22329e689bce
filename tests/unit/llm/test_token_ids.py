# SPDX-License-Identifier: Apache-2.0
"""Packed ids behave as the tuple of their numbers."""

from __future__ import annotations

import pickle

from hypothesis import given
from hypothesis import strategies as st

from tokenspeed.core.request import pack_ids
from tokenspeed.llm.token_ids import TokenIds

numbers = st.lists(st.integers(0, 2**31 - 1), max_size=20).map(tuple)
bounds = st.none() | st.integers(-25, 25)


@given(numbers, numbers, bounds, bounds, st.sampled_from([None, 1, 2, -1, -3]))
def test_they_are_what_a_tuple_is(
    ids: tuple[int, ...], others: tuple[int, ...], start: int | None, stop: int | None, step: int | None
) -> None:
    packed = TokenIds.of(ids)
    assert packed.packed == pack_ids(ids)
    assert (len(packed), bool(packed), tuple(packed), packed) == (len(ids), bool(ids), ids, ids)
    assert ids == packed and packed == list(ids) and hash(packed) == hash(ids)
    assert [packed[place] for place in range(-len(ids), len(ids))] == [*ids, *ids]
    assert packed[start:stop:step] == ids[start:stop:step]
    assert (packed == TokenIds.of(others)) == (ids == others)
    assert packed != "text"
    assert pickle.loads(pickle.dumps(packed)) == packed
