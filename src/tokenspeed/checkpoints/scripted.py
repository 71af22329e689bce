# SPDX-License-Identifier: Apache-2.0
"""Opens a scripted model: a folder whose script.json says what is answered, with a real tokenizer.

Knows the form of script.json; knows no weights. Fields: tokenizer (alias, GGUF file or folder; may be absent),
context_length, replies [{match, text}], step_s, chat_template (text).
"""

from __future__ import annotations

from pathlib import Path

from tokenspeed.checkpoints import JsonObject, ProgressFn, Script, ScriptedReply, TokenizerSource, catalogue
from tokenspeed.checkpoints.dummy import DummyWeights
from tokenspeed.checkpoints.folder import read_chat_template, read_json, read_optional_json, read_tokenizer
from tokenspeed.checkpoints.gguf import read_gguf
from tokenspeed.checkpoints.gguf_metadata import generation_config, read_template, read_vocabulary
from tokenspeed.checkpoints.source import OpenedModel
from tokenspeed.core.errors import CheckpointError, ModelNotFoundError

SCRIPT_NAME = "script.json"

_FIELDS = {"tokenizer", "context_length", "vocab_size", "replies", "step_s", "chat_template"}
_CONTEXT_LENGTH = 8192
# A vocabulary of bytes and a few special tokens, where a script has no tokenizer.
_VOCAB_SIZE = 512


def open_scripted(folder: Path, progress: ProgressFn | None = None) -> OpenedModel:
    """The scripted model in a folder. Raises CheckpointError, ModelNotFoundError."""
    path = folder / SCRIPT_NAME
    if not path.is_file():
        raise ModelNotFoundError(f"{folder}: has no {SCRIPT_NAME}, which --load-format scripted needs")
    fields = read_json(path)
    unknown = sorted(set(fields) - _FIELDS)
    if unknown:
        raise CheckpointError(f"{path}: unknown field {unknown[0]}; known: {', '.join(sorted(_FIELDS))}")
    parts = _read_tokenizer(path, fields.get("tokenizer"), progress)
    vocab_size = _integer(path, fields, "vocab_size", parts.vocab_size)
    template = fields.get("chat_template", parts.chat_template)
    if template is not None and not isinstance(template, str):
        raise CheckpointError(f"{path}: chat_template must be a text")
    return OpenedModel(
        path=folder,
        config={
            "model_type": "scripted",
            "vocab_size": vocab_size,
            "max_position_embeddings": _integer(path, fields, "context_length", _CONTEXT_LENGTH),
        },
        read_generation_config=lambda: parts.generation_config,
        read_tokenizer=lambda: parts.tokenizer,
        chat_template=template,
        open_weights=DummyWeights,
        script=Script(_replies(path, fields.get("replies", [])), _seconds(path, fields.get("step_s", 0.0))),
    )


class _Parts:
    """What a script borrows from another model."""

    def __init__(self, tokenizer: TokenizerSource | None, generation: JsonObject, template: str | None) -> None:
        self.tokenizer = tokenizer
        self.generation_config = generation
        self.chat_template = template
        self.vocab_size = _VOCAB_SIZE


def _read_tokenizer(script: Path, name: object, progress: ProgressFn | None) -> _Parts:
    if name is None:
        return _Parts(None, {}, None)
    if not isinstance(name, str):
        raise CheckpointError(f"{script}: tokenizer must be an alias, a GGUF file or a folder, not {name!r}")
    path = catalogue.fetch(name, progress) if name in catalogue.ALIASES else script.parent / Path(name).expanduser()
    if path.is_dir():
        return _from_folder(path)
    if not path.is_file():
        raise ModelNotFoundError(f"{script}: no tokenizer {path}; give an alias, a GGUF file or a folder")
    gguf = read_gguf(path)
    vocabulary = read_vocabulary(gguf)
    if vocabulary is None:
        raise CheckpointError(f"{path}: holds no vocabulary")
    parts = _Parts(vocabulary, generation_config(gguf, vocabulary), read_template(gguf))
    embedding = gguf.tensors.get("token_embd.weight")
    parts.vocab_size = len(vocabulary.tokens) if embedding is None else embedding.shape[0]
    return parts


def _from_folder(folder: Path) -> _Parts:
    tokenizer = read_tokenizer(folder)
    if tokenizer is None:
        raise CheckpointError(f"{folder}: has no tokenizer.json")
    generation = read_optional_json(folder / "generation_config.json")
    parts = _Parts(tokenizer, generation, read_chat_template(folder))
    model_vocab_size = read_optional_json(folder / "config.json").get("vocab_size")
    parts.vocab_size = model_vocab_size if isinstance(model_vocab_size, int) else _ids_end(tokenizer.path)
    return parts


def _ids_end(path: Path) -> int:
    """One past the largest token id of a tokenizer.json."""
    fields = read_json(path)
    model, added = fields.get("model"), fields.get("added_tokens")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    # Unigram vocabularies are lists, the others map text to id.
    ids = list(vocab.values()) if isinstance(vocab, dict) else list(range(len(vocab) if isinstance(vocab, list) else 0))
    ids += [item.get("id") for item in added if isinstance(item, dict)] if isinstance(added, list) else []
    return 1 + max((token_id for token_id in ids if isinstance(token_id, int)), default=_VOCAB_SIZE - 1)


def _replies(path: Path, value: object) -> tuple[ScriptedReply, ...]:
    if not isinstance(value, list):
        raise CheckpointError(f"{path}: replies must be a list of {{match, text}}")
    replies = []
    for i, item in enumerate(value):
        fields = item if isinstance(item, dict) else {}
        match, text = fields.get("match", ""), fields.get("text")
        if not isinstance(match, str) or not isinstance(text, str):
            raise CheckpointError(f"{path}: reply {i} must have a text, and its match must be a text")
        replies.append(ScriptedReply(match, text))
    return tuple(replies)


def _integer(path: Path, fields: JsonObject, name: str, default: int) -> int:
    value = fields.get(name, default)
    if type(value) is not int or value <= 0:
        raise CheckpointError(f"{path}: {name} must be a positive integer, not {value!r}")
    return value


def _seconds(path: Path, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        raise CheckpointError(f"{path}: step_s must be a number of seconds, not {value!r}")
    return float(value)
