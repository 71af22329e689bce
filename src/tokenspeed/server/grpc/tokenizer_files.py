# SPDX-License-Identifier: Apache-2.0
"""The served model's tokenizer as the files that other programs read, in one zip archive.

A vocabulary that came inside a GGUF file is written as a tokenizer.json. Knows file formats; sends nothing.
"""

from __future__ import annotations

import hashlib
import io
import zipfile
from dataclasses import dataclass

import msgspec
from tokenizers import Tokenizer, decoders, pre_tokenizers, processors

from tokenspeed.checkpoints import GgufVocabulary, ModelSource, TokenizerFile
from tokenspeed.llm.gguf_tokenizer import build_gguf
from tokenspeed.llm.vocabulary import Vocabulary

_FIXED_DATE = (1980, 1, 1, 0, 0, 0)
_SPACE = "▁"


@dataclass(frozen=True, slots=True)
class Archive:
    """A zip file and the SHA-256 of its bytes, in hex."""

    data: bytes
    sha256: str


def pack(source: ModelSource, template: str | None) -> Archive:
    """The archive. template: the chat template that holds, whatever the files say. Same model, same bytes."""
    assert source.tokenizer is not None, "a served model has a tokenizer"
    tokenizer, settings = _tokenizer(source.tokenizer)
    if template is not None:
        settings = {**settings, "chat_template": template}
    files = {
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": msgspec.json.encode(settings),
        "config.json": msgspec.json.encode(dict(source.config)),
        "generation_config.json": msgspec.json.encode(dict(source.generation_config)),
    }
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(zipfile.ZipInfo(name, _FIXED_DATE), data, zipfile.ZIP_DEFLATED)
    data = buffer.getvalue()
    return Archive(data, hashlib.sha256(data).hexdigest())


def _tokenizer(source: TokenizerFile | GgufVocabulary) -> tuple[bytes, dict[str, object]]:
    """tokenizer.json and the settings beside it."""
    if isinstance(source, TokenizerFile):
        return source.path.read_bytes(), dict(source.config)
    vocabulary = build_gguf(source)
    names = {"bos_token": source.bos_id, "eos_token": source.eos_id, "pad_token": source.pad_id}
    settings: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": source.add_bos,
        "add_eos_token": source.add_eos,
        "clean_up_tokenization_spaces": False,
    }
    settings |= {name: source.tokens[token_id] for name, token_id in names.items() if token_id is not None}
    return _complete(vocabulary, source).to_str().encode(), settings


def _complete(vocabulary: Vocabulary, source: GgufVocabulary) -> Tokenizer:
    """The engine with what its user otherwise does outside of it: decoding, special tokens around a text, the space
    before one. A text that begins with a space of its own gets no other, which it does outside."""
    engine = vocabulary.engine
    if vocabulary.spelling == "byte_level":
        engine.decoder = decoders.ByteLevel()
    else:
        strip = [decoders.Strip(" ", 1, 0)] if vocabulary.strips_space else []
        engine.decoder = decoders.Sequence(
            [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
        )
        if vocabulary.lead:
            engine.pre_tokenizer = pre_tokenizers.Metaspace(_SPACE, prepend_scheme="first", split=False)
    before = [(source.tokens[token_id], token_id) for token_id in vocabulary.prefix_ids]
    after = [(source.tokens[token_id], token_id) for token_id in vocabulary.suffix_ids]
    if before or after:
        single = [*(text for text, _ in before), "$A", *(text for text, _ in after)]
        engine.post_processor = processors.TemplateProcessing(
            single=single, pair=[*single, "$B"], special_tokens=list(dict.fromkeys([*before, *after]))
        )
    return engine
