# SPDX-License-Identifier: Apache-2.0
"""Opens a GGUF file as a model source: its config, vocabulary, template, and weights under Hugging Face names.

Knows how to undo what conversion did to values; leaves block maths and naming to the files beside it.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tokenspeed.checkpoints import GgufVocabulary, SourceFile, TensorInfo
from tokenspeed.checkpoints.gguf import GgufFile, GgufTensor, check_tensors, read_gguf, tensor_num_bytes
from tokenspeed.checkpoints.gguf_dequant import dequantize
from tokenspeed.checkpoints.gguf_metadata import generation_config, read_template, read_vocabulary
from tokenspeed.checkpoints.gguf_names import Config, Renamed, config_of, rename
from tokenspeed.checkpoints.source import OpenedModel
from tokenspeed.core.errors import CheckpointError

_PLAIN_DTYPES = {"F32": np.float32, "F16": np.float16}


def open_gguf(path: Path) -> OpenedModel:
    """The model in one GGUF file. Raises UnsupportedModelError or CheckpointError."""
    gguf = read_gguf(path)
    config = config_of(gguf)
    check_tensors(gguf)
    num_tokens, vocab_size = gguf.metadata.num_items("tokenizer.ggml.tokens"), config["vocab_size"]
    assert isinstance(vocab_size, int), f"vocab_size is {vocab_size!r}"
    if num_tokens > vocab_size:
        raise CheckpointError(
            f"{path}: the vocabulary has {num_tokens} tokens, but the embedding only {vocab_size} rows"
        )
    vocabulary = functools.cache(lambda: read_vocabulary(gguf))
    return OpenedModel(
        path=path,
        config=config,
        read_generation_config=lambda: generation_config(gguf, vocabulary()),
        read_tokenizer=vocabulary,
        chat_template=read_template(gguf),
        open_weights=lambda: GgufWeights(gguf, config),
        file=SourceFile.of(path, gguf.status, f"gguf {_code_digest()}"),
    )


@functools.cache
def _code_digest() -> str:
    """Of the code that puts rows in order."""
    return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()


def open_vocabulary(path: Path) -> tuple[GgufVocabulary | None, str | None]:
    """The vocabulary and chat template of a GGUF file, whose tensors may be absent or of any type."""
    gguf = read_gguf(path)
    return read_vocabulary(gguf), read_template(gguf)


class GgufWeights:
    """The tensors of a GGUF file under Hugging Face names, rows first, blocks as float32."""

    def __init__(self, gguf: GgufFile, config: Config) -> None:
        self._gguf = gguf
        self._config = config
        self._slots: dict[str, tuple[GgufTensor, Renamed]] = {}
        for tensor in gguf.tensors.values():
            renamed = rename(config, tensor.name)
            if renamed is not None:
                self._slots |= {name: (part, renamed) for name, part in self._parts(tensor, renamed)}

    def infos(self) -> Mapping[str, TensorInfo]:
        """All tensors by Hugging Face name."""
        return {name: self._info(*slot) for name, slot in self._slots.items()}

    def read(self, name: str, shape: tuple[int, ...]) -> NDArray[np.generic]:
        """The tensor as f32 or f16, see checkpoints.Weights."""
        if name not in self._slots:
            raise CheckpointError(f"{self._gguf.path}: tensor {name} is missing")
        tensor, renamed = self._slots[name]
        if tensor.shape != shape:
            raise CheckpointError(
                f"{self._gguf.path}: tensor {name} ({tensor.name}) has shape {tensor.shape}; the model needs {shape}"
            )
        values = _decode(self._raw(tensor, renamed), tensor)
        if renamed.change == "norm_minus_one":
            less_one: NDArray[np.float32] = values.astype(np.float32) - np.float32(1)
            return less_one
        return values

    def close(self) -> None:
        """Forget the tensors; the map ends with the last view of it."""
        self._slots = {}

    def _parts(self, tensor: GgufTensor, renamed: Renamed) -> list[tuple[str, GgufTensor]]:
        """The tensor under its name, or the tensors of the experts that lie in it one behind another."""
        if renamed.change == "as_one_row" and len(tensor.shape) == 1:
            return [(renamed.name, dataclasses.replace(tensor, shape=(1, *tensor.shape)))]
        if renamed.change != "per_expert":
            return [(renamed.name, tensor)]
        num_experts = self._config.get("num_experts") or self._config.get("num_local_experts")
        if len(tensor.shape) != 3 or tensor.shape[0] != num_experts:
            raise CheckpointError(
                f"{self._gguf.path}: {tensor.name} has shape {tensor.shape}, not that of {num_experts} experts"
            )
        size = tensor_num_bytes(tensor) // tensor.shape[0]
        parts = (
            dataclasses.replace(tensor, shape=tensor.shape[1:], offset=tensor.offset + expert * size)
            for expert in range(tensor.shape[0])
        )
        return [(renamed.name.format(expert), part) for expert, part in enumerate(parts)]

    def _info(self, tensor: GgufTensor, renamed: Renamed) -> TensorInfo:
        blocks = None
        if len(tensor.shape) == 2 and tensor.type_name not in _PLAIN_DTYPES and renamed.change != "norm_minus_one":
            num_rows = tensor.shape[0]
            blocks = lambda: self._raw(tensor, renamed).reshape(num_rows, -1)  # noqa: E731 - read when it is wanted
        return TensorInfo(tensor.shape, tensor.type_name.lower(), blocks)

    def _raw(self, tensor: GgufTensor, renamed: Renamed) -> NDArray[np.uint8]:
        """The tensor's bytes with its rows in the order of the model."""
        raw = self._gguf.raw(tensor)
        return self._unpermute(raw, tensor, renamed) if renamed.change in ("unpermute_q", "unpermute_k") else raw

    def _unpermute(self, raw: NDArray[np.uint8], tensor: GgufTensor, renamed: Renamed) -> NDArray[np.uint8]:
        """Conversion interleaved the two halves of each head's rows; rows are whole blocks, so move them packed."""
        field = "num_attention_heads" if renamed.change == "unpermute_q" else "num_key_value_heads"
        num_heads, num_rows = self._config[field], tensor.shape[0]
        assert isinstance(num_heads, int), f"{field} is {num_heads!r}"
        if num_rows % (2 * num_heads):
            raise CheckpointError(
                f"{self._gguf.path}: {tensor.name} has {num_rows} rows, which {num_heads} heads cannot share in pairs"
            )
        pairs = raw.reshape(num_heads, num_rows // num_heads // 2, 2, raw.size // num_rows)
        return pairs.swapaxes(1, 2).reshape(raw.size)


def _decode(raw: NDArray[np.uint8], tensor: GgufTensor) -> NDArray[np.generic]:
    plain = _PLAIN_DTYPES.get(tensor.type_name)
    if plain is not None:
        return raw.view(plain).reshape(tensor.shape)
    out = np.empty(tensor.shape, np.float32)
    dequantize(tensor.type_name, raw, out.reshape(-1))
    return out
