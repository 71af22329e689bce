# SPDX-License-Identifier: Apache-2.0
"""Encoding and decoding on tiny vocabularies of each kind."""

from __future__ import annotations

import dataclasses
import json
import random
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Engine

import tiny_vocabularies as tiny
from tokenspeed.checkpoints import GgufVocabulary, TokenizerFile
from tokenspeed.core.errors import StartError, TokenizerError
from tokenspeed.core.request import pack_ids
from tokenspeed.llm import gguf_tokenizer
from tokenspeed.llm.pretokenizers import PRE_TOKENIZERS
from tokenspeed.llm.tokenizer import Tokenizer

BYTE_LEVEL = Tokenizer.from_source(tiny.byte_level())
SPM = Tokenizer.from_source(tiny.spm())
GEMMA_LIKE = Tokenizer.from_source(tiny.spm(add_space_prefix=False))
ROUND_TRIPS = [
    "",
    "    .",
    " lead",
    "a , b",
    "don 't",
    "👩‍🚀",
    "  ",
    "hello  world\n\n\n x",
    "\x00é\u00a0",
    "ẞ 日本",
]


@pytest.mark.parametrize("text", ROUND_TRIPS)
@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SPM, GEMMA_LIKE], ids=["byte_level", "spm", "spm_no_prefix"])
def test_text_round_trips_exactly(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(tokenizer.encode(text, parse_special=False)) == text


@settings(deadline=None)
@given(st.text(alphabet=st.characters(codec="utf-8", exclude_characters="▁"), max_size=40))
def test_any_text_round_trips(text: str) -> None:
    for tokenizer in (BYTE_LEVEL, SPM, GEMMA_LIKE):
        assert tokenizer.decode(tokenizer.encode(text, parse_special=False)) == text


@settings(deadline=None)
@given(st.text(alphabet=" abn=éz\t日", max_size=40))
def test_spm_ids_follow_the_sentencepiece_rule(text: str) -> None:
    for vocabulary, tokenizer in ((tiny.spm(), SPM), (tiny.spm(add_space_prefix=False), GEMMA_LIKE)):
        ids = tokenizer.encode(text, add_special_tokens=False, parse_special=False)
        assert ids == tiny.SpmByRule(vocabulary).encode(text)


def test_user_defined_pieces_match_longest_first_and_take_no_part_in_merges() -> None:
    tokens = tiny.spm().tokens
    ids = GEMMA_LIKE.encode("a\n\n\n\nb<b>an", add_special_tokens=False)
    assert [tokens[i] for i in ids] == ["a", "\n\n\n", "<0x0A>", "b", "<b>", "an"]


def test_pre_tokenizers_cut_digits_as_their_models_do() -> None:
    def pieces(pre: str) -> list[str]:
        tokenizer = Tokenizer.from_source(tiny.byte_level(pre))
        return [tokenizer.token_text(i) for i in tokenizer.encode(" 123")]

    assert pieces("qwen2") == [" ", "1", "2", "3"]
    assert pieces("llama-bpe") == [" ", "123"]
    assert pieces("gpt-2") == [" ", "123"]
    assert pieces("smollm") == [" ", "1", "2", "3"]


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
def test_every_known_pre_tokenizer_compiles_and_loses_nothing(pre: str) -> None:
    tokenizer = Tokenizer.from_source(tiny.byte_level(pre))
    text = "Hello  12345 日本語 don't\r\n\tx=ǅé\u0301 ½ …\n "
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_unknown_pre_tokenizer_is_refused_by_name_with_the_known_ones() -> None:
    with pytest.raises(TokenizerError, match=r"'qwen99'.*deepseek-v3.*qwen2") as caught:
        Tokenizer.from_source(tiny.byte_level("qwen99"))
    assert isinstance(caught.value, StartError)
    assert "\n" not in str(caught.value)


def test_unknown_vocabulary_kind_is_refused_by_name() -> None:
    with pytest.raises(TokenizerError, match=r"'bert'.*gpt2"):
        Tokenizer.from_source(dataclasses.replace(tiny.byte_level(), model="bert"))


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": ()},
        {"merges": ("h e", "nonsense")},
        {"merges": ("日 本",)},
        {"bos_id": 100_000},
    ],
    ids=["no tokens", "half a merge", "merge of strangers", "bos out of range"],
)
def test_broken_vocabularies_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(TokenizerError):
        Tokenizer.from_source(dataclasses.replace(tiny.byte_level(), **change))  # type: ignore[arg-type]
    with pytest.raises(TokenizerError):
        Tokenizer.from_source(dataclasses.replace(tiny.spm(), scores=(0.0,)))


def test_control_tokens_are_special_and_user_defined_ones_are_not() -> None:
    ids = BYTE_LEVEL.encode("<think>hello<|end|>")
    assert ids[0] == 258
    assert ids[-1] == 257
    assert BYTE_LEVEL.is_special(257)
    assert not BYTE_LEVEL.is_special(258)
    assert BYTE_LEVEL.decode(ids) == "<think>hello"
    assert BYTE_LEVEL.decode(ids, skip_special_tokens=False) == "<think>hello<|end|>"
    assert BYTE_LEVEL.token_bytes(257) == b"<|end|>"


@pytest.mark.parametrize(
    ("tokenizer", "markup", "ordinary"),
    [(BYTE_LEVEL, {256, 257, 258}, {259}), (SPM, {0, 1, 2, 262, 263}, {259, 260, 261})],
    ids=["byte_level", "spm"],
)
def test_data_never_becomes_markup(tokenizer: Tokenizer, markup: set[int], ordinary: set[int]) -> None:
    text = "".join(tokenizer.token_text(i) + "." for i in sorted(markup | ordinary))
    assert markup | ordinary <= set(tokenizer.encode(text, add_special_tokens=False))
    data = tokenizer.encode(text, add_special_tokens=False, parse_special=False)
    assert not markup & set(data)
    assert ordinary <= set(data)
    assert tokenizer.decode(data, skip_special_tokens=False) == text


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.sampled_from(["<|bos|>", "<|end|>", "<think>", "<s>", "nab", "<|sep|>", "#", "h", "ello ", "a", "\n\n"])
    )
)
def test_marked_control_texts_are_encoded_as_data_alone_and_the_rest_as_ever(parts: list[str]) -> None:
    mark = "#"
    for tokenizer in (BYTE_LEVEL, SPM, GEMMA_LIKE):
        text = "".join(
            part[0] + mark + part[1:] if place % 2 and part in tokenizer.control_texts else part
            for place, part in enumerate(parts)
        )
        broken = sorted((each[0] + mark + each[1:] for each in tokenizer.control_texts), key=len, reverse=True)
        expected: list[int] = []
        for place, piece in enumerate(re.split(f"({'|'.join(map(re.escape, broken))})", text)):
            vocabulary, clean = tokenizer._vocabulary, piece.replace(mark, "")
            if place == 0:
                expected += tokenizer.encode(clean, add_special_tokens=False)
            else:
                engine = vocabulary.plain if place % 2 else vocabulary.engine
                expected += engine.encode(clean, add_special_tokens=False).ids
        encoded = tokenizer.encode_marked(text, mark)
        assert list(encoded) == expected
        assert encoded.packed == pack_ids(expected)


def test_bos_comes_only_where_the_vocabulary_says_so_and_never_twice() -> None:
    assert BYTE_LEVEL.encode("x") == BYTE_LEVEL.encode("x", add_special_tokens=False)
    with_bos = Tokenizer.from_source(tiny.byte_level(add_bos=True))
    assert with_bos.encode("x") == [256, ord("x")]
    assert with_bos.encode("<|bos|>x") == with_bos.encode("x")
    assert with_bos.encode("<|bos|>x", add_special_tokens=False) == with_bos.encode("x")
    assert with_bos.encode("<|bos|>x", parse_special=False)[0:2] == [256, ord("<")]
    assert SPM.encode("") == [1]


def test_spm_puts_its_space_before_the_text_and_nowhere_else() -> None:
    tokens = tiny.spm().tokens

    def pieces(text: str, parse_special: bool = True) -> list[str]:
        ids = SPM.encode(text, add_special_tokens=False, parse_special=parse_special)
        return [tokens[i] for i in ids]

    assert pieces("a") == ["▁a"]
    assert pieces(" a") == ["▁", "▁a"]
    assert pieces("</s>a</s> a") == ["</s>", "a", "</s>", "▁a"]
    assert pieces("a\n\na") == ["▁a", "\n\n", "a"]
    assert pieces("</s>a", parse_special=False)[0] == "▁"


def test_only_a_whole_text_loses_the_space_that_spm_put_before_it() -> None:
    ids = SPM.encode("banana", add_special_tokens=False)
    assert SPM.decode(ids) == "banana"
    assert SPM.decode(ids, from_start=False) == " banana"
    assert GEMMA_LIKE.decode(GEMMA_LIKE.encode(" banana")) == " banana"


def test_token_bytes_are_exact_for_every_token() -> None:
    assert b"".join(BYTE_LEVEL.token_bytes(i) for i in range(256)) == bytes(range(256))
    assert b"".join(SPM.token_bytes(i) for i in range(3, 259)) == bytes(range(256))
    tokens = tiny.spm().tokens
    assert SPM.token_bytes(tokens.index("▁ba")) == b" ba"
    assert BYTE_LEVEL.token_text(0xE9) == "\ufffd"
    assert BYTE_LEVEL.token_bytes(BYTE_LEVEL.vocab_size + 5) == b""
    assert BYTE_LEVEL.token_bytes(-1) == b""


def test_a_lone_surrogate_is_replaced_not_raised() -> None:
    assert BYTE_LEVEL.decode(BYTE_LEVEL.encode("a\ud83db")) == "a\ufffdb"


def test_threads_see_one_another_nowhere() -> None:
    text = "<|end|><think>hello 123" * 20
    expected = {flag: BYTE_LEVEL.encode(text, parse_special=flag) for flag in (True, False)}
    with ThreadPoolExecutor(4) as pool:
        flags = [place % 2 == 0 for place in range(200)]
        for flag, ids in zip(
            flags, pool.map(lambda flag: BYTE_LEVEL.encode(text, parse_special=flag), flags), strict=True
        ):
            assert ids == expected[flag]


def _write(path: Path, engine: Engine, config: dict[str, object]) -> TokenizerFile:
    engine.save(str(path))
    return TokenizerFile(path, config)


def _json_byte_level(tmp_path: Path, config: dict[str, object]) -> Tokenizer:
    letters = tiny.byte_letters()
    engine = Engine(models.BPE({letter: i for i, letter in enumerate(letters)} | {"he": 256}, [("h", "e")]))
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = decoders.ByteLevel()
    engine.add_special_tokens([AddedToken("<|bos|>", normalized=False)])
    engine.add_tokens([AddedToken("<tool_call>", normalized=False)])
    engine.post_processor = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", 257)])
    engine.enable_truncation(4)
    return Tokenizer.from_source(_write(tmp_path / "tokenizer.json", engine, config))


def test_tokenizer_json_keeps_ids_of_added_tokens_beyond_the_vocabulary(tmp_path: Path) -> None:
    tokenizer = _json_byte_level(tmp_path, {"bos_token": {"content": "<|bos|>"}, "eos_token": "<|none|>"})
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.vocab_size) == (257, None, 259)
    assert tokenizer.encode("<tool_call>he") == [257, 258, 256]
    assert 258 not in tokenizer.encode("<tool_call>", parse_special=False)
    assert tokenizer.decode(tokenizer.encode("hello <tool_call> a  b")) == "hello <tool_call> a  b"


def test_tokenizer_config_overrules_the_post_processor(tmp_path: Path) -> None:
    without = _json_byte_level(tmp_path, {"bos_token": "<|bos|>", "add_bos_token": False})
    assert without.encode("he") == [256]
    with_bos = _json_byte_level(tmp_path, {"bos_token": "<|bos|>", "add_bos_token": True})
    assert with_bos.encode("he") == [257, 256]


def test_tokenizer_json_of_the_spm_kind(tmp_path: Path) -> None:
    vocabulary = tiny.spm()
    ids = {token: i for i, token in enumerate(vocabulary.tokens)}
    engine = Engine(models.BPE(ids, [("a", "n"), ("▁", "an")], byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    engine.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    engine.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer = Tokenizer.from_source(_write(tmp_path / "tokenizer.json", engine, {}))
    assert tokenizer.strips_space
    for text in ROUND_TRIPS:
        assert tokenizer.decode(tokenizer.encode(text)) == engine.decode(engine.encode(text).ids)


@pytest.mark.parametrize("content", ["{", "{}", json.dumps({"model": {"type": "WordPiece"}})])
def test_broken_tokenizer_json_is_refused_with_its_path(tmp_path: Path, content: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(content)
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        Tokenizer.from_source(TokenizerFile(path, {}))


def test_a_tokenizer_that_cannot_be_decoded_exactly_is_refused(tmp_path: Path) -> None:
    engine = Engine(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    with pytest.raises(TokenizerError, match="neither a byte-level nor a SentencePiece"):
        Tokenizer.from_source(_write(tmp_path / "tokenizer.json", engine, {}))


def plain_merges(source: GgufVocabulary) -> list[tuple[str, str]]:
    """All pairs of pieces that make a piece, as the rule is written."""
    described = zip(source.tokens, source.scores, source.token_types, strict=True)
    scores = {token: score for token, score, kind in described if kind in (1, 5)}
    return [
        (token[:cut], token[cut:])
        for token in sorted(scores, key=lambda piece: (-scores[piece], -len(piece)))
        for cut in range(len(token) - 1, 0, -1)
        if token[:cut] in scores and token[cut:] in scores
    ]


@pytest.mark.parametrize("hash_base", [None, 1, 3], ids=["told-apart", "anagrams-alike", "some-alike"])
def test_spm_merges_are_all_pairs_of_pieces(hash_base: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of pieces that are there twice, empty, of equal scores, of kinds that never merge; whatever their hashes are."""
    if hash_base is not None:
        monkeypatch.setattr(gguf_tokenizer, "_HASH_BASE", hash_base)
    rng = random.Random(5)
    letters = "ab\u2581\U0001f600\ud800"
    tokens = ["", *letters, *("".join(rng.choices(letters, k=rng.randint(1, 9))) for _ in range(1500))]
    source = dataclasses.replace(
        tiny.spm(),
        tokens=tuple(tokens),
        scores=tuple(float(-rng.randint(0, 40)) for _ in tokens),
        token_types=tuple(rng.choice((1, 1, 1, 1, 3, 4, 5, 6)) for _ in tokens),
    )
    merges = gguf_tokenizer._spm_merges(source)
    assert len(merges) > 500
    assert merges == plain_merges(source)
    nothing = dataclasses.replace(source, token_types=(3,) * len(tokens))
    assert gguf_tokenizer._spm_merges(nothing) == []
