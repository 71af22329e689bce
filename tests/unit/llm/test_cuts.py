# SPDX-License-Identifier: Apache-2.0
"""A text cut wherever its vocabulary allows has the token ids of the whole text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Engine

import tiny_vocabularies as tiny
from tokenspeed.checkpoints import TokenizerFile
from tokenspeed.llm.cuts import Cuts, cuts_at_markup, cuts_of_pieces, cuts_of_words
from tokenspeed.llm.gguf_tokenizer import build_gguf
from tokenspeed.llm.pretokenizers import PRE_TOKENIZERS
from tokenspeed.llm.tokenizer_file import build_file
from tokenspeed.llm.vocabulary import Vocabulary

WORDS = (
    "he",
    "hello",
    " w",
    "don't",
    "I'LL",
    "'s",
    "ana",
    " banana",
    "<|end|>",
    "<|bos|>",
    "<think>",
    "<|sep|>",
    "nab",
)
SPACES = (" ", "  ", "    ", "\n", "\n\n", "\n\n\n", "\r\n", "\t", "  \n", "\u00a0", "\u2028", "\u3000")
MARKS = (".", ",", "/", "//", "'", '"', "(", "_", "|", "<", ">", "=", "====", "#", "`", "▁", "\x00", "\u0338")
SIGNS = (
    "1",
    "12",
    "1234",
    "½",
    "é",
    "e\u0301",
    "ǅ",
    "日本",
    "一。",
    "你，好",
    "한국",
    "हि",
    "👩‍🚀",
    "A",
    "z",
    "\u0301",
    "<b>",
)
texts = st.lists(st.sampled_from(WORDS + SPACES + MARKS + SIGNS) | st.text(max_size=3), max_size=30).map("".join)
PLAIN_BPE = {"a": 0, "b": 1, " ": 2, "▁": 3, "▁a": 4, "ab": 5, "b▁": 6}


def cut(text: str, cuts: Cuts) -> list[str]:
    places = [0, *sorted({match.start() for match in cuts.finditer(text)} - {0}), len(text)]
    return [text[start:end] for start, end in pairwise(places)]


def ids_of(engine: Engine, text: str) -> list[int]:
    return list(engine.encode(text.encode("utf-8", "replace").decode(), add_special_tokens=False).ids)


def check(vocabulary: Vocabulary, text: str) -> None:
    assert vocabulary.cuts is not None
    pieces = cut(text, vocabulary.cuts)
    assert [i for piece in pieces for i in ids_of(vocabulary.engine, piece)] == ids_of(vocabulary.engine, text), pieces


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
def test_no_known_pre_tokenizer_has_a_word_across_a_cut(pre: str) -> None:
    vocabulary = build_gguf(tiny.byte_level(pre))
    cuts = vocabulary.cuts
    words = vocabulary.engine.pre_tokenizer

    @settings(max_examples=60, deadline=None)
    @given(texts)
    @example("a\n\nb x\n\nfoo.\n/a's b\n'tis one, two\n1. d\n\n\n")
    @example("一。二，三 \nA\r\nB \n c\n")
    def law(text: str) -> None:
        assert cuts is not None
        text = text.encode("utf-8", "replace").decode()
        whole = [piece for piece, _ in words.pre_tokenize_str(text)]
        assert [piece for part in cut(text, cuts) for piece, _ in words.pre_tokenize_str(part)] == whole
        check(vocabulary, text)

    law()


@pytest.mark.parametrize("has_prefix", [True, False])
def test_no_piece_lies_across_a_cut(has_prefix: bool) -> None:
    vocabulary = build_gguf(tiny.spm(add_space_prefix=has_prefix))

    @settings(max_examples=200, deadline=None)
    @given(texts)
    def law(text: str) -> None:
        check(vocabulary, text)

    law()


def test_cuts_are_where_texts_have_many() -> None:
    text = "def add(a, b):\n    return a + b\n\n\nprint(add(1, 2))\nx = 1\n"
    for vocabulary in (build_gguf(tiny.byte_level()), build_gguf(tiny.spm())):
        assert vocabulary.cuts is not None
        assert len(cut(text, vocabulary.cuts)) > 8


def added(*contents: str, **flags: bool) -> list[AddedToken]:
    return [AddedToken(content, normalized=False, special=True, **flags) for content in contents]


def engine_of(tokens: Sequence[AddedToken]) -> Engine:
    engine = Engine(models.BPE({**PLAIN_BPE, **{f"<0x{b:02X}>": 7 + b for b in range(256)}}, [], byte_fallback=True))
    engine.add_special_tokens(list(tokens))
    return engine


def test_no_cut_through_an_added_token() -> None:
    tokens = added("<|end of\ntext|>")
    cuts = cuts_of_words(tokens, engine_of(tokens))
    assert cuts is not None
    assert cut("it ends of course\nthen <|end of\ntext|>", cuts) == ["it ends of course\nthen <|end of\ntext|>"]


def test_no_cut_where_a_piece_of_the_vocabulary_is() -> None:
    engine = engine_of([])
    cuts = cuts_of_pieces([], engine, [*PLAIN_BPE, "end."])
    assert cuts is not None
    assert cut("ab ab. ab, ab", cuts) == ["ab ab. ab", ", ab"]  # b▁ and d. forbid what is after any letter


@pytest.mark.parametrize("flag", ["single_word", "lstrip"])
def test_no_cut_between_words_where_added_tokens_look_around(flag: str) -> None:
    tokens = added("<x>", **{flag: True})
    assert cuts_of_words(tokens, engine_of(tokens)) is None
    assert cuts_of_pieces(tokens, engine_of(tokens), PLAIN_BPE) is None
    assert cuts_at_markup(tokens, engine_of(tokens)) is None


def test_unknown_neighbours_become_one_so_that_nothing_is_cut() -> None:
    engine = Engine(models.BPE(PLAIN_BPE, [], unk_token="a", fuse_unk=True))
    assert cuts_of_pieces([], engine, PLAIN_BPE) is None


def test_markup_that_may_lie_inside_other_markup_is_no_place_to_cut() -> None:
    tokens = added("<a>", "[b]", "x[c]")
    cuts = cuts_at_markup(tokens, engine_of(tokens))
    assert cuts is not None
    assert cut("1<a>2[b]3x[c]4", cuts) == ["1", "<a>2[b]3", "x[c]4"]


def file_engine(kind: str) -> Engine:
    letters = tiny.byte_letters()
    if kind in ("words", "nfc", "unknown words"):
        engine = Engine(models.BPE({letter: i for i, letter in enumerate(letters)} | {"he": 256}, [("h", "e")]))
        split = PRE_TOKENIZERS["qwen2"].patterns[0] if kind != "unknown words" else r"\S+\s\S+|\s+"
        parts = [
            pre_tokenizers.Split(Regex(split), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
        engine.pre_tokenizer = pre_tokenizers.Sequence(parts)
        if kind == "nfc":
            engine.normalizer = normalizers.NFC()
    else:
        ids = {token: i for i, token in enumerate(tiny.spm().tokens)}
        merges = [("a", "n"), ("▁", "an"), ("▁", "a"), ("=", "="), ("▁", "▁")]
        engine = Engine(models.BPE(ids, merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
        if kind == "pieces":
            engine.normalizer = normalizers.Replace(" ", "▁")
            engine.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
        elif kind == "prepended":
            engine.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        else:
            engine.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    engine.add_special_tokens(added("<|end|>", "<|sep|>"))
    return engine


@pytest.mark.parametrize(
    ("kind", "between_words"),
    [
        ("words", True),
        ("nfc", True),
        ("pieces", True),
        ("unknown words", False),
        ("prepended", False),
        ("metaspace", False),
    ],
)
def test_tokenizer_json_is_cut_by_what_it_says(kind: str, between_words: bool, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    file_engine(kind).save(str(path))
    described = json.loads(path.read_text())
    described["decoder"] = described["decoder"] or {"type": "ByteFallback"}
    path.write_text(json.dumps(described))
    vocabulary = build_file(TokenizerFile(path, {}))
    assert vocabulary.cuts is not None
    assert bool(vocabulary.cuts.search("some words, then")) == between_words
    assert len(cut("a<|end|>b<|sep|>c, d\ne", vocabulary.cuts)) > 1

    @settings(max_examples=150, deadline=None)
    @given(texts)
    def law(text: str) -> None:
        check(vocabulary, text)

    law()
