# SPDX-License-Identifier: Apache-2.0
"""What is remembered is what encoding afresh gives; nothing is encoded twice; memory is bounded."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tiny_vocabularies as tiny
from tokenspeed.core.request import pack_ids
from tokenspeed.llm import piece_cache
from tokenspeed.llm.gguf_tokenizer import build_gguf
from tokenspeed.llm.piece_cache import PieceCache
from tokenspeed.llm.token_ids import TokenIds
from tokenspeed.llm.tokenizer import Tokenizer

VOCABULARIES = [
    build_gguf(tiny.byte_level()),
    build_gguf(tiny.byte_level("smollm")),
    build_gguf(tiny.spm()),
    build_gguf(tiny.spm(add_space_prefix=False)),
]
BITS = (
    *("hello ", "world", "he", " 123", "456", "7, ", "x = 1\n", "\n\n", "  \n", "    ", "\t", "\r\n", ".", "/"),
    *(
        "<|end|>",
        "<think>",
        "<|sep|>",
        "nab",
        "<b>",
        "banana ",
        "==",
        "日本語",
        "一。",
        "한",
        "e\u0301",
        "👩‍🚀",
        "½",
        "\ud83d",
    ),
)
bits = st.lists(st.sampled_from(BITS) | st.text(max_size=4), max_size=12).map("".join)
edits = st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1), bits), min_size=1, max_size=8)


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(piece_cache, "BLOCK_CHARS", 40)
    monkeypatch.setattr(piece_cache, "PIECE_CHARS", 6)


class CountingEngine:
    """One token a character; notes what it encodes."""

    def __init__(self) -> None:
        self.encoded: list[str] = []

    def encode_batch_fast(self, texts: list[str], add_special_tokens: bool) -> list[SimpleNamespace]:
        assert not add_special_tokens
        self.encoded += texts
        return [SimpleNamespace(ids=[ord(character) % 100 for character in text]) for text in texts]


def counting_cache(bytes_max: int = 10**6) -> tuple[CountingEngine, PieceCache]:
    engine = CountingEngine()
    return engine, PieceCache(engine, VOCABULARIES[0].cuts, bytes_max)  # type: ignore[arg-type]


def num_ids(cache: PieceCache, text: str) -> int:
    return len(TokenIds(b"".join(cache.encode(text))))


@pytest.mark.parametrize("vocabulary", VOCABULARIES, ids=["qwen2", "smollm", "spm", "spm_no_prefix"])
def test_texts_that_grow_and_change_have_the_ids_of_fresh_ones(vocabulary) -> None:  # type: ignore[no-untyped-def]
    cache = PieceCache(vocabulary.engine, vocabulary.cuts, 20_000)

    @settings(max_examples=60, deadline=None)
    @given(bits, edits)
    def law(text: str, changes: list[tuple[float, float, str]]) -> None:
        for at, length, inserted in changes:
            grown = text + inserted
            start = int(at * len(text))
            edited = text[:start] + inserted + text[start + int(length * 8) :]
            for version in (text, grown, edited):
                fresh = vocabulary.engine.encode(version.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))
                encoded = TokenIds(b"".join(cache.encode(version)))
                assert list(encoded) == fresh.ids
                assert encoded.packed == pack_ids(fresh.ids)
            text = grown if at < 0.7 else edited

    law()


def test_a_text_that_grows_is_encoded_once() -> None:
    engine, cache = counting_cache()
    text = ""
    for turn in range(40):
        text += f"user says {turn}, and then some more words;\nso on. "
        assert num_ids(cache, text) == len(text)
    assert sum(map(len, engine.encoded)) < 3 * len(text)
    before = len(engine.encoded)
    cache.encode(text)
    assert len(engine.encoded) == before


def test_sessions_share_what_they_begin_with() -> None:
    engine, cache = counting_cache()
    common = "You are a helpful assistant, who does this and that.\n" * 20
    cache.encode(common + "first")
    engine.encoded.clear()
    cache.encode(common + "second")
    assert sum(map(len, engine.encoded)) < 60


def test_memory_is_bounded_and_the_oldest_goes_first() -> None:
    engine, cache = counting_cache(bytes_max=30_000)
    first = "the first text, which is used again and again\n" * 2
    for number in range(200):
        cache.encode(f"text number {number} with words, words and words\n" * 5)
        cache.encode(first)
        assert cache.num_bytes <= 30_000
    assert engine.encoded.count(first[:6]) <= 1
    engine.encoded.clear()
    cache.encode(first)
    assert not engine.encoded
    cache.encode("text number 0 with words, words and words\n" * 5)
    assert engine.encoded


def test_what_is_larger_than_the_memory_is_encoded_and_forgotten() -> None:
    engine, cache = counting_cache(bytes_max=600)
    for _ in range(2):
        assert num_ids(cache, "a" * 500) == 500
    assert engine.encoded == ["a" * 500] * 2
    assert cache.num_bytes == 0


def test_an_empty_text_has_no_ids() -> None:
    assert counting_cache()[1].encode("") == []


def test_threads_that_share_the_memory_get_their_own_answers() -> None:
    tokenizer = Tokenizer.from_source(tiny.byte_level())
    engine = build_gguf(tiny.byte_level()).engine
    texts = [f"hello world {number % 7}, 123 <|end|>\n" * (number % 5 + 1) for number in range(200)]
    with ThreadPoolExecutor(4) as pool:
        for text, encoded in zip(texts, pool.map(tokenizer.encode_prompt, texts), strict=True):
            assert list(encoded) == engine.encode(text, add_special_tokens=False).ids
