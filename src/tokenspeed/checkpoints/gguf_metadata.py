# SPDX-License-Identifier: Apache-2.0
"""Typed access to GGUF metadata, and what it holds besides weights: vocabulary, chat template, end tokens.

Knows the standard keys; knows no architecture.
"""

from __future__ import annotations

from pathlib import Path

from tokenspeed.checkpoints import GgufVocabulary
from tokenspeed.checkpoints.gguf import GgufFile, GgufMetadata, MetaValue
from tokenspeed.core.errors import CheckpointError

# Byte-level BPE vocabularies whose models expect a leading BOS although the file may not say so.
_BOS_BY_PRE_TOKENIZER = frozenset({"llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "tekken"})

# Control tokens that end a turn, whatever the file names as EOS.
_END_OF_TURN_TEXTS = (
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<end_of_turn>",
)
_CONTROL_TYPE = 3


class Metadata:
    """The metadata of one file; a value of an unexpected type is a CheckpointError naming its key."""

    def __init__(self, path: Path, values: GgufMetadata) -> None:
        self.path = path
        self._values = values

    def has(self, key: str) -> bool:
        """Whether the file has this key."""
        return key in self._values

    def num_items(self, key: str) -> int:
        """Of a list, which is not read for it; 0 when absent."""
        return self._values.num_items(key)

    def find_int(self, key: str) -> int | None:
        """An integer, None when absent. A list of equal integers, one a layer, counts as that integer."""
        value = self._values.get(key)
        if isinstance(value, tuple) and value and all(item == value[0] for item in value):
            value = value[0]
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong(key, "one integer")
        return value

    def need_int(self, key: str) -> int:
        """An integer that must be there and positive."""
        value = self.find_int(key)
        if value is None:
            raise CheckpointError(f"{self.path}: GGUF metadata lacks {key}")
        if value <= 0:
            raise self._wrong(key, "a positive integer")
        return value

    def find_float(self, key: str) -> float | None:
        """A number, None when absent."""
        value = self._values.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(key, "a number")
        return float(value)

    def find_text(self, key: str) -> str | None:
        """A text, None when absent."""
        value = self._values.get(key)
        if value is not None and not isinstance(value, str):
            raise self._wrong(key, "a text")
        return value

    def find_flag(self, key: str) -> bool | None:
        """A boolean, None when absent."""
        value = self._values.get(key)
        if value is not None and not isinstance(value, bool):
            raise self._wrong(key, "true or false")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of texts, empty when absent."""
        items = self._items(key)
        texts = tuple([item for item in items if isinstance(item, str)])
        if len(texts) != len(items):
            raise self._wrong(key, "a list of texts")
        return texts

    def ints(self, key: str) -> tuple[int, ...]:
        """A list of integers (booleans count as 0 and 1), empty when absent."""
        items = self._items(key)
        ints = tuple(int(item) for item in items if isinstance(item, int))
        if len(ints) != len(items):
            raise self._wrong(key, "a list of integers")
        return ints

    def floats(self, key: str) -> tuple[float, ...]:
        """A list of numbers, empty when absent."""
        items = self._items(key)
        floats = tuple(float(item) for item in items if isinstance(item, int | float))
        if len(floats) != len(items):
            raise self._wrong(key, "a list of numbers")
        return floats

    def _items(self, key: str) -> tuple[MetaValue, ...]:
        value = self._values.get(key, ())
        if not isinstance(value, tuple):
            raise self._wrong(key, "a list")
        return value

    def _wrong(self, key: str, wanted: str) -> CheckpointError:
        found = repr(self._values[key])
        found = found if len(found) <= 40 else found[:40] + "…"
        return CheckpointError(f"{self.path}: GGUF metadata {key} is {found}; it must be {wanted}")


def read_vocabulary(gguf: GgufFile) -> GgufVocabulary | None:
    """The embedded vocabulary; None when the file has none."""
    metadata = Metadata(gguf.path, gguf.metadata)
    tokens = metadata.texts("tokenizer.ggml.tokens")
    if not tokens:
        return None
    scores = metadata.floats("tokenizer.ggml.scores")
    token_types = metadata.ints("tokenizer.ggml.token_type")
    for what, items in (("scores", scores), ("token_type", token_types)):
        if items and len(items) != len(tokens):
            raise CheckpointError(
                f"{gguf.path}: tokenizer.ggml.{what} has {len(items)} entries for {len(tokens)} tokens"
            )
    model = metadata.find_text("tokenizer.ggml.model") or ""
    is_spm = model == "llama"
    pre = metadata.find_text("tokenizer.ggml.pre") or "default"
    add_bos = metadata.find_flag("tokenizer.ggml.add_bos_token")
    add_space_prefix = metadata.find_flag("tokenizer.ggml.add_space_prefix")
    bos_id, eos_id, unk_id, pad_id = _special_ids(metadata, is_spm, len(tokens))
    return GgufVocabulary(
        model=model,
        pre=pre,
        tokens=tokens,
        scores=scores,
        token_types=token_types,
        merges=metadata.texts("tokenizer.ggml.merges"),
        bos_id=bos_id,
        eos_id=eos_id,
        unk_id=unk_id,
        pad_id=pad_id,
        add_bos=(is_spm or pre in _BOS_BY_PRE_TOKENIZER) if add_bos is None else add_bos,
        add_eos=metadata.find_flag("tokenizer.ggml.add_eos_token") or False,
        add_space_prefix=is_spm if add_space_prefix is None else add_space_prefix,
    )


def read_template(gguf: GgufFile) -> str | None:
    """The chat template, None when the file has none."""
    return Metadata(gguf.path, gguf.metadata).find_text("tokenizer.chat_template")


def generation_config(gguf: GgufFile, vocabulary: GgufVocabulary | None) -> dict[str, object]:
    """What a generation_config.json would say: bos_token_id, eos_token_id (a list when there are several)."""
    metadata = Metadata(gguf.path, gguf.metadata)
    ends: list[int] = []
    if vocabulary is not None:
        ends += [] if vocabulary.eos_id is None else [vocabulary.eos_id]
        ends += _end_of_turn_ids(metadata, vocabulary)
    ends = list(dict.fromkeys(ends))
    config: dict[str, object] = {}
    if vocabulary is not None and vocabulary.bos_id is not None:
        config["bos_token_id"] = vocabulary.bos_id
    if ends:
        config["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    return config


def _special_ids(
    metadata: Metadata, is_spm: bool, num_tokens: int
) -> tuple[int | None, int | None, int | None, int | None]:
    """bos, eos, unk, pad. SPM vocabularies have customary ids where the file is silent."""
    defaults = (1, 2, 0, None) if is_spm else (None, None, None, None)
    names = ("bos_token_id", "eos_token_id", "unknown_token_id", "padding_token_id")
    found: list[int | None] = []
    for name, default in zip(names, defaults, strict=True):
        token_id = metadata.find_int(f"tokenizer.ggml.{name}")
        token_id = default if token_id is None else token_id
        # Some converters write the largest integer for "none"; such an id names no token.
        found.append(token_id if token_id is not None and 0 <= token_id < num_tokens else None)
    return found[0], found[1], found[2], found[3]


def _end_of_turn_ids(metadata: Metadata, vocabulary: GgufVocabulary) -> list[int]:
    ids: list[int] = []
    for name in ("eot_token_id", "eom_token_id"):
        token_id = metadata.find_int(f"tokenizer.ggml.{name}")
        if token_id is not None and 0 <= token_id < len(vocabulary.tokens):
            ids.append(token_id)
    if not vocabulary.token_types:
        return ids
    wanted = frozenset(_END_OF_TURN_TEXTS)
    types = vocabulary.token_types
    return ids + [i for i, text in enumerate(vocabulary.tokens) if text in wanted and types[i] == _CONTROL_TYPE]
