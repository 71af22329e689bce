# SPDX-License-Identifier: Apache-2.0
"""MXFP4 as the format's own table says, through files, and refused where its two halves do not fit."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tokenspeed.checkpoints import ModelSource, open_model
from tokenspeed.checkpoints.mxfp4 import dequantise
from tokenspeed.core.config import ModelConfig
from tokenspeed.core.errors import CheckpointError


def floats(patterns: np.ndarray) -> np.ndarray:
    return (patterns.astype(np.uint32) << 16).view(np.float32)


def e2m1(code: int) -> float:
    """Sign, two bits of exponent with a bias of 1, one bit of mantissa."""
    sign, exponent, mantissa = -1.0 if code & 8 else 1.0, (code >> 1) & 3, code & 1
    return sign * (mantissa * 0.5 if exponent == 0 else 2.0 ** (exponent - 1) * (1 + mantissa * 0.5))


def test_every_code_at_every_scale_is_what_the_format_says() -> None:
    blocks = np.tile(np.arange(256, dtype=np.uint8).reshape(1, 16, 16), (253, 1, 1))
    scales = np.repeat(np.arange(253, dtype=np.uint8)[:, None], 16, axis=1)
    expected = [[e2m1(byte & 15), e2m1(byte >> 4)] for byte in range(256)]
    for exponent, row in enumerate(floats(dequantise(blocks, scales))):
        np.testing.assert_array_equal(row.astype(np.float64), np.ravel(expected) * 2.0 ** (exponent - 127))
    assert np.isnan(floats(dequantise(blocks[:1, :1], np.full((1, 1), 255, np.uint8)))[..., 2:]).all()


def random_pair(shape: tuple[int, int, int], seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    scales = generator.integers(110, 135, shape).astype(np.uint8)
    return generator.integers(0, 256, (*shape, 16)).astype(np.uint8), scales


def test_stacked_experts_equal_the_oracle() -> None:
    blocks, scales = random_pair((3, 6, 2))
    expected = convert_moe_packed_tensors(torch.from_numpy(blocks), torch.from_numpy(scales), dtype=torch.float32)
    np.testing.assert_array_equal(floats(dequantise(blocks, scales)).swapaxes(1, 2), expected.numpy())


def opened(folder: Path, tensors: Mapping[str, np.ndarray], method: str = "mxfp4") -> ModelSource:
    config = {"model_type": "gpt_oss", "quantization_config": {"quant_method": method}}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(dict(tensors), folder / "model.safetensors")
    return open_model(ModelConfig(model=str(folder)))


def test_a_checkpoint_shows_plain_tensors(tmp_path: Path) -> None:
    blocks, scales = random_pair((3, 6, 2))
    source = opened(tmp_path, {"a.w_blocks": blocks, "a.w_scales": scales, "bias": np.ones(4, np.float32)})
    assert source.config == {"model_type": "gpt_oss"}
    weights = source.weights()
    infos = weights.infos()
    assert infos is not None
    assert {name: info.shape for name, info in infos.items()} == {"a.w": (3, 64, 6), "bias": (4,)}
    np.testing.assert_array_equal(weights.read("a.w", (3, 64, 6)), dequantise(blocks, scales).swapaxes(1, 2))
    np.testing.assert_array_equal(weights.read("bias", (4,)), np.ones(4, np.float32))
    with pytest.raises(CheckpointError, match=r"a\.w has shape \(3, 64, 6\) in MXFP4; the model needs \(3, 6, 64\)"):
        weights.read("a.w", (3, 6, 64))
    weights.close()


def test_half_a_pair_keeps_its_own_name(tmp_path: Path) -> None:
    blocks, _ = random_pair((3, 6, 2))
    infos = opened(tmp_path, {"a.w_blocks": blocks}).weights().infos()
    assert infos is not None
    assert set(infos) == {"a.w_blocks"}


@pytest.mark.parametrize("shape", [(3, 6, 1), (3, 5, 2), (18, 2)])
def test_halves_that_do_not_fit_are_refused(tmp_path: Path, shape: tuple[int, ...]) -> None:
    blocks, _ = random_pair((3, 6, 2))
    source = opened(tmp_path, {"a.w_blocks": blocks, "a.w_scales": np.zeros(shape, np.uint8)})
    with pytest.raises(CheckpointError, match=r"a\.w_blocks \[3, 6, 2, 16\] of u8 and a\.w_scales .* are no MXFP4"):
        source.weights()


def test_other_methods_are_left_to_who_builds_the_model(tmp_path: Path) -> None:
    assert "quantization_config" in opened(tmp_path, {}, "fp8").config
