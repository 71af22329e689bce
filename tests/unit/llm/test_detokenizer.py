# SPDX-License-Identifier: Apache-2.0
"""The law of the incremental detokenizer: whatever the cuts, joined output equals the one-shot decode."""

from __future__ import annotations

import random

import pytest

import tiny_vocabularies as tiny
from tokenspeed.llm.detokenizer import IncrementalDetokenizer
from tokenspeed.llm.tokenizer import Tokenizer

KINDS = {
    "byte_level": Tokenizer.from_source(tiny.byte_level()),
    "spm": Tokenizer.from_source(tiny.spm()),
    "spm_no_prefix": Tokenizer.from_source(tiny.spm(add_space_prefix=False)),
}


def pushes(tokenizer: Tokenizer, ids: list[int], rng: random.Random, skip: bool, from_start: bool) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip, from_start=from_start)
    pieces = []
    place = 0
    while place < len(ids):
        size = rng.choice((0, 1, 1, 1, 2, 5))
        pieces.append(detokenizer.push(ids[place : place + size]))
        place += size
    return [*pieces, detokenizer.finish()]


@pytest.mark.parametrize("kind", KINDS)
def test_ten_thousand_random_id_lists_decode_as_one_shot(kind: str) -> None:
    tokenizer = KINDS[kind]
    rng = random.Random(7)
    for _ in range(10_000):
        ids = [rng.randrange(tokenizer.vocab_size + 2) for _ in range(rng.randrange(12))]
        skip, from_start = rng.random() < 0.5, rng.random() < 0.5
        whole = tokenizer.decode(ids, skip_special_tokens=skip, from_start=from_start)
        assert "".join(pushes(tokenizer, ids, rng, skip, from_start)) == whole, ids


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", ["    .", " lead", "a , b", "don 't", "👩‍🚀", "x  <|end|>  y", "日本語 🧪 é"])
def test_text_arrives_whole_and_final_token_by_token(kind: str, text: str) -> None:
    tokenizer = KINDS[kind]
    ids = tokenizer.encode(text, add_special_tokens=False)
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=False, from_start=True)
    received = ""
    for token_id in ids:
        received += detokenizer.push((token_id,))
        assert text.startswith(received)
    assert received + detokenizer.finish() == text


def test_two_space_pieces_and_a_special_token_in_the_middle() -> None:
    tokenizer = KINDS["spm"]
    space, end = tiny.spm().tokens.index("▁"), 2
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert [detokenizer.push((i,)) for i in (space, end, space)] == [" ", "", " "]


def test_a_broken_sequence_becomes_one_replacement_as_soon_as_it_is_broken() -> None:
    detokenizer = IncrementalDetokenizer(KINDS["byte_level"])
    assert detokenizer.push([0xF0]) == ""
    assert detokenizer.push([0x9F]) == ""
    assert detokenizer.push([ord("A")]) == "\ufffdA"
    assert detokenizer.push([0xE2]) == ""
    assert detokenizer.finish() == "\ufffd"


def test_each_token_is_looked_at_once() -> None:
    class Counting(Tokenizer):
        num_looks = 0

        def token_bytes(self, token_id: int) -> bytes:
            type(self).num_looks += 1
            return super().token_bytes(token_id)

    tokenizer = Counting.from_source(tiny.byte_level())
    detokenizer = IncrementalDetokenizer(tokenizer)
    for token_id in [0xE6, 0x97, 0xA5] * 1000:
        detokenizer.push((token_id,))
    assert Counting.num_looks == 3000
