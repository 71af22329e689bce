# SPDX-License-Identifier: Apache-2.0
"""Where weights, configurations and tokenizer files come from. Torch-free: tensors are numpy views.

Knows file formats and the names that each format gives to tensors; a source presents every format as one
Hugging Face checkpoint (names, config fields, layouts), so that a model is written once. Knows no model maths.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tokenspeed.core.config import ModelConfig

JsonObject = Mapping[str, object]
ProgressFn = Callable[[str, int, int, str], None]
"""(stage, done, total, unit), see core.ipc.Progress."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """dtype: f32, f16, bf16, mxfp4 or a GGUF block type such as q4_k. shape is in Hugging Face order (rows first).
    blocks: of a matrix of a block type gives (rows, bytes of a row) uint8, the blocks as they are in the file."""

    shape: tuple[int, ...]
    dtype: str
    blocks: Callable[[], NDArray[np.uint8]] | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Repeated:
    """A tensor of `shape` whose elements, in order, are `period` again and again: element i is period[i % len]. Made
    whole where it is wanted, since that may be far faster on a device than here."""

    period: NDArray[np.float32]
    shape: tuple[int, ...]

    def whole(self) -> NDArray[np.float32]:
        """All elements."""
        return np.resize(self.period, self.shape)


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file as it was when it was opened: whoever writes to it changes at least the last of these. reader: the code
    that reads tensors from it. is_settled: it had been left alone for long enough that a change after it was opened
    shows in its times."""

    path: Path
    device: int
    inode: int
    num_bytes: int
    modified_ns: int
    changed_ns: int
    reader: str = field(default="", compare=False, repr=False)
    is_settled: bool = field(default=True, compare=False, repr=False)

    @classmethod
    def of(cls, path: Path, status: os.stat_result, reader: str = "") -> SourceFile:
        """status: of the open file."""
        times_ns = (status.st_mtime_ns, status.st_ctime_ns)
        is_settled = max(times_ns) < time.time_ns() - _SETTLING_NS
        return cls(path.resolve(), status.st_dev, status.st_ino, status.st_size, *times_ns, reader, is_settled)

    def is_unchanged(self) -> bool:
        """Whether the path still has this file as it was. OSError where it has none."""
        return SourceFile.of(self.path, self.path.stat()) == self


_SETTLING_NS = 2 * 10**9
"""File systems count time in steps of up to two seconds."""


class Weights(Protocol):
    """The tensors of one checkpoint, read one at a time."""

    def infos(self) -> Mapping[str, TensorInfo] | None:
        """All tensors by Hugging Face name; None when any name may be asked for (dummy weights)."""
        ...

    def read(self, name: str, shape: tuple[int, ...]) -> NDArray[np.generic] | Repeated:
        """The tensor: f32 and f16 as they are, bf16 as uint16 bit patterns, block types dequantised to f32.
        Raises CheckpointError when it is missing, truncated or not of `shape`."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class TokenizerFile:
    """A tokenizer.json with its tokenizer_config.json (empty when absent)."""

    path: Path
    config: JsonObject


@dataclass(frozen=True, slots=True)
class GgufVocabulary:
    """A vocabulary embedded in a GGUF file. model: gpt2 (byte-level BPE) or llama (SPM).
    token_types follow GGUF: 1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte."""

    model: str
    pre: str
    tokens: tuple[str, ...]
    scores: tuple[float, ...]
    token_types: tuple[int, ...]
    merges: tuple[str, ...]
    bos_id: int | None
    eos_id: int | None
    unk_id: int | None
    pad_id: int | None
    add_bos: bool
    add_eos: bool
    add_space_prefix: bool


TokenizerSource = TokenizerFile | GgufVocabulary


@dataclass(frozen=True, slots=True)
class ScriptedReply:
    """Serve `text` for a prompt that contains `match` (an empty match takes any prompt)."""

    match: str
    text: str


@dataclass(frozen=True, slots=True)
class Script:
    """What a scripted model says: the first reply whose match is in the rendered prompt. step_s delays each step."""

    replies: tuple[ScriptedReply, ...]
    step_s: float = 0.0


class ModelSource(Protocol):
    """An opened model. Cheap to open: weights are only mapped when `weights()` is called.

    config: as in config.json. generation_config: as in generation_config.json, {} when absent.
    tokenizer: None when the source has none. Both may be read only now, and raise CheckpointError. script: only of
    scripted models. file: that holds all of it, where one does.
    """

    path: Path
    config: JsonObject
    chat_template: str | None
    script: Script | None
    file: SourceFile | None

    @property
    def generation_config(self) -> JsonObject: ...

    @property
    def tokenizer(self) -> TokenizerSource | None: ...

    def weights(self) -> Weights: ...


@dataclass(frozen=True, slots=True)
class CatalogueModel:
    """A model with a short name. num_bytes: of its file; is_cached: that file is already here."""

    name: str
    description: str
    licence: str
    num_bytes: int
    is_cached: bool


def list_models() -> tuple[CatalogueModel, ...]:
    """The catalogue, default model first."""
    catalogue = importlib.import_module("tokenspeed.checkpoints.catalogue")
    models: tuple[CatalogueModel, ...] = catalogue.list_models()
    return models


def open_model(model: ModelConfig, progress: ProgressFn | None = None) -> ModelSource:
    """Find (download if need be) and open what `model` names.

    Order: alias of the catalogue, GGUF file, local folder, hub id. Raises a StartError subclass.
    """
    locate = importlib.import_module("tokenspeed.checkpoints.locate")
    source: ModelSource = locate.open_model(model, progress)
    return source
