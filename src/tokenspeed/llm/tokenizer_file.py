# SPDX-License-Identifier: Apache-2.0
"""Tokenizers that come as a tokenizer.json, with the settings of a tokenizer_config.json beside it.

Knows these two files; everything else about them is the engine's matter.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from tokenizers import Tokenizer

from tokenspeed.checkpoints import TokenizerFile
from tokenspeed.core.errors import TokenizerError
from tokenspeed.llm.cuts import cuts_of_file
from tokenspeed.llm.vocabulary import Spelling, Vocabulary, assemble_plain


def build_file(source: TokenizerFile) -> Vocabulary:
    """The vocabulary as an engine. Raises TokenizerError when the file is broken or spells bytes in an unknown way."""
    try:
        text = source.path.read_text(encoding="utf-8")
        parsed = json.loads(text)
        engine = Tokenizer.from_str(text)
    except Exception as error:
        raise TokenizerError(f"{source.path} is not a readable tokenizer.json: {error}") from error
    engine.no_truncation()
    engine.no_padding()
    spelling = _spelling(parsed, source)
    added = sorted(engine.get_added_tokens_decoder().items())
    tokens = [token for _, token in added]
    bos_id, eos_id = _named_id(engine, source, "bos_token"), _named_id(engine, source, "eos_token")
    prefix_ids, suffix_ids = _surroundings(engine)
    return Vocabulary(
        engine=engine,
        plain=assemble_plain(engine.model, engine.normalizer, engine.pre_tokenizer, tokens, spelling),
        spelling=spelling,
        size=max(engine.get_vocab_size(with_added_tokens=True), max((index for index, _ in added), default=-1) + 1),
        token=engine.id_to_token,
        literals={index: token.content for index, token in added},
        special_ids=frozenset(index for index, token in added if token.special),
        bos_id=bos_id,
        eos_id=eos_id,
        prefix_ids=_wanted(prefix_ids, bos_id, source.config.get("add_bos_token"), at_front=True),
        suffix_ids=_wanted(suffix_ids, eos_id, source.config.get("add_eos_token"), at_front=False),
        strips_space=spelling == "spm" and _strips_space(parsed.get("decoder")),
        lead="",
        cuts=cuts_of_file(parsed, tokens, engine),
    )


def _spelling(parsed: Mapping[str, object], source: TokenizerFile) -> Spelling:
    parts = [part for key in ("pre_tokenizer", "decoder") for part in _flatten(parsed.get(key))]
    if any(part.get("type") == "ByteLevel" for part in parts):
        return "byte_level"
    model = parsed.get("model")
    falls_back = isinstance(model, dict) and model.get("byte_fallback") is True
    if falls_back or any(part.get("type") in ("Metaspace", "ByteFallback") for part in parts):
        return "spm"
    raise TokenizerError(
        f"{source.path} is neither a byte-level nor a SentencePiece tokenizer; only these kinds can be decoded exactly"
    )


def _strips_space(decoder: object) -> bool:
    for part in _flatten(decoder):
        if part.get("type") == "Strip" and part.get("start") == 1:
            return True
        if part.get("type") == "Metaspace":
            return part.get("prepend_scheme", "always") != "never" and part.get("add_prefix_space", True) is not False
    return False


def _flatten(part: object) -> Iterator[Mapping[str, object]]:
    if not isinstance(part, dict):
        return
    yield part
    for key in ("pretokenizers", "decoders"):
        for inner in part.get(key) or ():
            yield from _flatten(inner)


def _named_id(engine: Tokenizer, source: TokenizerFile, name: str) -> int | None:
    value = source.config.get(name)
    if isinstance(value, dict):
        value = value.get("content")
    if not isinstance(value, str):
        return None
    return engine.token_to_id(value)


def _surroundings(engine: Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What the post-processor puts before and after a text."""
    bare = engine.encode("a", add_special_tokens=False).ids
    full = engine.encode("a", add_special_tokens=True).ids
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return tuple(full[:start]), tuple(full[start + len(bare) :])
    return (), ()


def _wanted(ids: tuple[int, ...], token_id: int | None, flag: object, at_front: bool) -> tuple[int, ...]:
    """add_bos_token and add_eos_token of the configuration overrule the post-processor, where they are given."""
    if token_id is None or not isinstance(flag, bool):
        return ids
    rest = tuple(index for index in ids if index != token_id)
    if not flag:
        return rest
    return (token_id, *rest) if at_front else (*rest, token_id)
