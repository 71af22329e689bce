# SPDX-License-Identifier: Apache-2.0
"""MXFP4 (OCP Microscaling Formats 1.0): blocks of 32 four-bit numbers that share a power of two.

A checkpoint keeps a tensor T as T_blocks, two numbers a byte with the first in the low bits, and T_scales, a biased
exponent a block. Shows both as T, in the layout that the same checkpoint has in bf16: every number is one bf16 value
exactly, or infinite beyond 2 ** 128. Knows neither files nor models.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tokenspeed.checkpoints import JsonObject, TensorInfo
from tokenspeed.core.errors import CheckpointError

QUANT_METHOD = "mxfp4"

_BLOCK_BYTES = 16
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_PAIRS = np.array([(_E2M1[byte & 15], _E2M1[byte >> 4]) for byte in range(256)], np.float32)
_SCALES = np.array([2.0 ** (exponent - 127) for exponent in range(255)] + [np.nan], np.float32)


class RawWeights(Protocol):
    """Weights that also give bytes as they lie."""

    def infos(self) -> Mapping[str, TensorInfo]: ...

    def read(self, name: str, shape: tuple[int, ...]) -> NDArray[np.generic]: ...

    def read_bytes(self, name: str) -> NDArray[np.uint8]: ...

    def close(self) -> None: ...


def is_mxfp4(config: JsonObject) -> bool:
    """Whether config.json says that the checkpoint keeps tensors so."""
    quantization = config.get("quantization_config")
    return isinstance(quantization, Mapping) and quantization.get("quant_method") == QUANT_METHOD


def plain_config(config: JsonObject) -> JsonObject:
    """The configuration of what Mxfp4Weights shows."""
    return {name: value for name, value in config.items() if name != "quantization_config"}


def dequantise(blocks: NDArray[np.uint8], scales: NDArray[np.uint8]) -> NDArray[np.uint16]:
    """(..., G, 16) and (..., G) -> (..., 32 G) bit patterns of bf16."""
    out = np.empty((*scales.shape[:-1], scales.shape[-1] * 2 * _BLOCK_BYTES), np.uint16)
    # A slice at a time: the float32 values in between take eight times what the blocks do.
    for index in np.ndindex(scales.shape[:-2]):
        values = _PAIRS[blocks[index]].reshape(*scales[index].shape, 2 * _BLOCK_BYTES)
        with np.errstate(over="ignore"):
            values *= _SCALES[scales[index]][..., None]
        out[index] = (values.view(np.uint32) >> 16).reshape(out[index].shape)
    return out


class Mxfp4Weights:
    """Other weights with each pair of T_blocks (E, N, G, 16) and T_scales (E, N, G) as T (E, 32 G, N). Raises
    CheckpointError where the two do not fit."""

    def __init__(self, inner: RawWeights) -> None:
        self._inner = inner
        infos = inner.infos()
        stems = [name.removesuffix("_blocks") for name in infos if name.endswith("_blocks")]
        self._packed = {stem: _shape(stem, infos) for stem in stems if f"{stem}_scales" in infos}
        self._hidden = {f"{stem}_{part}" for stem in self._packed for part in ("blocks", "scales")}

    def infos(self) -> Mapping[str, TensorInfo]:
        """All tensors by name."""
        plain = {name: info for name, info in self._inner.infos().items() if name not in self._hidden}
        return plain | {name: TensorInfo(shape, QUANT_METHOD) for name, shape in self._packed.items()}

    def read(self, name: str, shape: tuple[int, ...]) -> NDArray[np.generic]:
        """As Weights.read."""
        packed = self._packed.get(name)
        if packed is None:
            return self._inner.read(name, shape)
        if packed != shape:
            raise CheckpointError(f"tensor {name} has shape {packed} in MXFP4; the model needs {shape}")
        patterns = dequantise(self._inner.read_bytes(f"{name}_blocks"), self._inner.read_bytes(f"{name}_scales"))
        return patterns.swapaxes(1, 2)

    def close(self) -> None:
        self._inner.close()


def _shape(stem: str, infos: Mapping[str, TensorInfo]) -> tuple[int, int, int]:
    blocks, scales = infos[f"{stem}_blocks"], infos[f"{stem}_scales"]
    fits = len(scales.shape) == 3 and blocks.shape == (*scales.shape, _BLOCK_BYTES)
    if not fits or (blocks.dtype, scales.dtype) != ("u8", "u8"):
        raise CheckpointError(
            f"{stem}_blocks {list(blocks.shape)} of {blocks.dtype} and {stem}_scales {list(scales.shape)} of "
            f"{scales.dtype} are no MXFP4 tensor: that has u8 blocks [E, N, G, {_BLOCK_BYTES}] and scales [E, N, G]"
        )
    num_experts, num_outputs, num_blocks = scales.shape
    return num_experts, num_blocks * 2 * _BLOCK_BYTES, num_outputs
