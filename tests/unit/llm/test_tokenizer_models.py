# SPDX-License-Identifier: Apache-2.0
"""Real vocabularies give the ids that transformers gives for the same file, and SentencePiece's where the two differ.

transformers' conversion of GGUF vocabularies departs from the models' own tokenizers in three known ways, and there the
published tokenizer is followed: SmolLM2's numerals outside 0-9 are cut one by one; an SPM text that begins with a space
keeps it after the space that SPM adds; Gemma's runs of spaces are matched longest first, as user-defined pieces are.
"""

from __future__ import annotations

import random
import time
from functools import cache
from pathlib import Path

import pytest
from transformers.integrations.gguf import convert_gguf_tokenizer

import tiny_vocabularies as tiny
from tokenspeed.checkpoints import GgufVocabulary, open_model
from tokenspeed.core import config
from tokenspeed.llm.detokenizer import IncrementalDetokenizer
from tokenspeed.llm.tokenizer import Tokenizer

pytestmark = pytest.mark.models

TEXTS = [
    "",
    "Hello world",
    "a , b don 't DON'T we'LL",
    "def f(x):\n    return x**2\n\n\n\tif a:\n\t\tb()\n",
    "x" * 300,
    "日本語 text 12345  \n\n  x 한국어 ไทย العربية हिन्दी",
    "👩‍🚀 🧪 é e\u0301 ǅ ſ ﬁ",
    "a\u200b\ufeff\u00a0\u2028b\x00\x01\x7f",
    "=====----====#### 1000000 3.14159 0x1F <b>bold</b><table>\n\n\n<tr>",
    "a<|im_start|>user\nhi<|im_end|>\n<tool_call>\n{}\n</tool_call><start_of_turn>user\n",
    "a \n \t\r\n\r\n  b",
    "a" + " " * 29 + "b",
]
LEADING_SPACE = [" lead", "    .", " \n x"]
MODELS = [
    ("smollm2_path", "llama"),
    ("tinycoder_path", "llama"),
    pytest.param("qwen_coder_path", "qwen2", marks=pytest.mark.slow),
    ("gemma3_path", "gemma3"),
]


@cache
def vocabulary_of(path: Path) -> GgufVocabulary:
    source = open_model(config.ModelConfig(model=str(path))).tokenizer
    assert isinstance(source, GgufVocabulary)
    return source


@cache
def tokenizer_of(path: Path) -> Tokenizer:
    return Tokenizer.from_source(vocabulary_of(path))


def oracle(architecture: str, source: GgufVocabulary):  # type: ignore[no-untyped-def]
    described = {
        "tokenizer_type": source.model,
        "pre_tokenizer_type": source.pre,
        "tokens": list(source.tokens),
        "scores": list(source.scores),
        "token_type": list(source.token_types),
        "add_prefix_space": source.add_space_prefix,
    }
    if source.merges:
        described["merges"] = list(source.merges)
    engine, _ = convert_gguf_tokenizer(architecture, described)
    return engine


def check(tokenizer: Tokenizer, text: str) -> None:
    for parse_special in (True, False):
        ids = tokenizer.encode(text, add_special_tokens=False, parse_special=parse_special)
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
        for skip in (True, False):
            detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip, from_start=True)
            joined = "".join(detokenizer.push((i,)) for i in ids) + detokenizer.finish()
            assert joined == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize(("fixture", "architecture"), MODELS)
def test_ids_equal_transformers(fixture: str, architecture: str, request: pytest.FixtureRequest) -> None:
    path: Path = request.getfixturevalue(fixture)
    source, tokenizer = vocabulary_of(path), tokenizer_of(path)
    engine = oracle(architecture, source)
    samples = [*TEXTS, Path(config.__file__).read_text()]
    samples += [] if source.model == "llama" and source.add_space_prefix else LEADING_SPACE
    for text in samples:
        assert tokenizer.encode(text, add_special_tokens=False) == engine.encode(text, add_special_tokens=False).ids
        check(tokenizer, text)


@pytest.mark.parametrize("fixture", ["tinycoder_path", "gemma3_path"])
def test_spm_ids_follow_the_sentencepiece_rule(fixture: str, request: pytest.FixtureRequest) -> None:
    path: Path = request.getfixturevalue(fixture)
    source, tokenizer = vocabulary_of(path), tokenizer_of(path)
    pieces = [token for token, kind in zip(source.tokens, source.token_types, strict=True) if kind == 1]
    rng = random.Random(3)
    texts = [*LEADING_SPACE[:1], "banana ananas == === ====="]
    texts += ["".join(rng.choices(pieces, k=6)).replace("▁", " ") for _ in range(100)]
    user_defined = {t for t, kind in zip(source.tokens, source.token_types, strict=True) if kind == 4}
    by_rule = tiny.SpmByRule(source)
    for text in texts:
        if not any(piece in text for piece in user_defined):
            assert tokenizer.encode(text, add_special_tokens=False) == by_rule.encode(text), text


def test_gemma_matches_runs_of_spaces_longest_first(gemma3_path: Path) -> None:
    tokenizer = tokenizer_of(gemma3_path)
    ids = tokenizer.encode("a" + " " * 70 + "b", add_special_tokens=False)
    assert [len(tokenizer.token_bytes(i)) for i in ids] == [1, 31, 31, 8, 1]


def test_smollm2_cuts_every_numeral(smollm2_path: Path) -> None:
    tokenizer = tokenizer_of(smollm2_path)
    assert [tokenizer.token_text(i) for i in tokenizer.encode("a ½12")] == ["a", " ", "½", "1", "2"]


def test_the_largest_vocabulary_is_built_in_seconds(gemma3_path: Path) -> None:
    source = vocabulary_of(gemma3_path)
    start = time.process_time()
    tokenizer = Tokenizer.from_source(source)
    assert time.process_time() - start < 15.0
    assert tokenizer.encode("Hello") == [source.bos_id, *tokenizer.encode("Hello", add_special_tokens=False)]


@pytest.mark.parametrize("fixture", ["smollm2_path", "gemma3_path", "tinycoder_path"])
def test_random_ids_decode_incrementally_as_at_once(fixture: str, request: pytest.FixtureRequest) -> None:
    tokenizer = tokenizer_of(request.getfixturevalue(fixture))
    rng = random.Random(11)
    for _ in range(2000):
        ids = [rng.randrange(tokenizer.vocab_size) for _ in range(10)]
        detokenizer = IncrementalDetokenizer(tokenizer)
        joined = "".join(detokenizer.push((i,)) for i in ids) + detokenizer.finish()
        assert joined == tokenizer.decode(ids, from_start=False)


@pytest.mark.parametrize(
    "fixture", ["smollm2_path", "gemma3_path", pytest.param("qwen_coder_path", marks=pytest.mark.slow)]
)
def test_control_text_in_data_becomes_no_control_token(fixture: str, request: pytest.FixtureRequest) -> None:
    """With real vocabularies: every control text, alone and glued to words, between real control tokens."""
    tokenizer = Tokenizer.from_source(
        open_model(config.ModelConfig(model=str(request.getfixturevalue(fixture)))).tokenizer
    )
    mark, real = "\uf8c0", tokenizer.control_texts[0]
    control = {tokenizer.encode(text, add_special_tokens=False)[0] for text in tokenizer.control_texts}
    assert len(control) == len(tokenizer.control_texts) > 0
    for text in tokenizer.control_texts[:40]:
        data = f"x{text}y {text}"
        ids = tokenizer.encode_marked(f"{real}{data.replace(text, text[0] + mark + text[1:])}{real}", mark)
        inside = ids[1:-1]
        assert ids[0] == ids[-1] == tokenizer.encode(real, add_special_tokens=False)[0]
        assert not control & set(inside), text
        assert tokenizer.decode(inside, skip_special_tokens=False, from_start=False).strip() == data
