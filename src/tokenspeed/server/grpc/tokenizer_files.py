# SPDX-License-Identifier: Apache-2.0
"""The served model's tokenizer as the files that other programs read, in one zip archive.

A vocabulary that came inside a GGUF file is written as a tokenizer.json. Knows file formats; sends nothing.
"""

from __future__ import annotations

import hashlib
import io
import zipfile
from dataclasses import dataclass
from typing import Protocol

import msgspec
from tokenizers import Tokenizer, decoders, pre_tokenizers, processors

from tokenspeed.checkpoints import GgufVocabulary, ModelSource, TokenizerFile

_FIXED_DATE = (1980, 1, 1, 0, 0, 0)
_SPACE = "▁"


@dataclass(frozen=True, slots=True)
class Archive:
    """A zip file and the SHA-256 of its bytes, in hex."""

    data: bytes
    sha256: str


class EngineSource(Protocol):
    """A tokenizer that shows the engine it encodes with."""

    def engine_json(self) -> str: ...


def pack(source: ModelSource, tokenizer: EngineSource, template: str | None) -> Archive:
    """The archive. tokenizer: what encodes here. template: the chat template that holds, whatever the files say. Same
    model, same bytes."""
    assert source.tokenizer is not None, "a served model has a tokenizer"
    if isinstance(source.tokenizer, TokenizerFile):
        own, settings = source.tokenizer.path.read_bytes(), dict(source.tokenizer.config)
    else:
        engine = Tokenizer.from_str(tokenizer.engine_json())
        own, settings = _complete(engine, source.tokenizer).to_str().encode(), _settings(source.tokenizer)
    if template is not None:
        settings = {**settings, "chat_template": template}
    files = {
        "tokenizer.json": own,
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


def _settings(source: GgufVocabulary) -> dict[str, object]:
    """tokenizer_config.json."""
    names = {"bos_token": source.bos_id, "eos_token": source.eos_id, "pad_token": source.pad_id}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": source.add_bos,
        "add_eos_token": source.add_eos,
        "clean_up_tokenization_spaces": False,
        **{name: source.tokens[token_id] for name, token_id in names.items() if token_id is not None},
    }


def _complete(engine: Tokenizer, source: GgufVocabulary) -> Tokenizer:
    """The engine with what its user otherwise does outside of it: decoding, special tokens around a text, the space
    before one. A text that begins with a space of its own gets no other, which it does outside."""
    if source.model == "gpt2":
        engine.decoder = decoders.ByteLevel()
    else:
        strip = [decoders.Strip(" ", 1, 0)] if source.add_space_prefix else []
        engine.decoder = decoders.Sequence(
            [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
        )
        if source.add_space_prefix:
            engine.pre_tokenizer = pre_tokenizers.Metaspace(_SPACE, prepend_scheme="first", split=False)
    before = [source.bos_id] if source.add_bos and source.bos_id is not None else []
    after = [source.eos_id] if source.add_eos and source.eos_id is not None else []
    if before or after:
        single = [*(source.tokens[token_id] for token_id in before), "$A", *(source.tokens[each] for each in after)]
        marks = [(source.tokens[token_id], token_id) for token_id in dict.fromkeys([*before, *after])]
        engine.post_processor = processors.TemplateProcessing(single=single, pair=[*single, "$B"], special_tokens=marks)
    return engine
