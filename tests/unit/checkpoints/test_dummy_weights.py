# SPDX-License-Identifier: Apache-2.0
"""Dummy weights: the same on each run, different by name, of a sensible scale."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tokenspeed.checkpoints import Repeated
from tokenspeed.checkpoints.dummy import DummyWeights
from tokenspeed.execution.weights import _as_tensor, load_weights
from tokenspeed.layers.build import BuildContext
from tokenspeed.models import resolve


def matrix(name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    values = DummyWeights().read(name, shape)
    assert isinstance(values, Repeated)
    return values.whole()


def test_values_depend_on_the_name_alone() -> None:
    first = matrix("model.layers.0.mlp.up_proj.weight", (64, 32))
    np.testing.assert_array_equal(first, matrix("model.layers.0.mlp.up_proj.weight", (64, 32)))
    assert not np.array_equal(first, matrix("model.layers.1.mlp.up_proj.weight", (64, 32)))
    # The same on every machine and in every process: pinned, not only repeated.
    assert first[0, :2].tolist() == [-0.033663734793663025, 0.07469438761472702]


def test_scale() -> None:
    weights = DummyWeights()
    values = matrix("m.weight", (2000, 1000))
    assert values.dtype == np.float32
    assert abs(float(values.std()) * 1000**0.5 - 1) < 0.02
    assert len(np.unique(values, axis=0)) == 2000
    np.testing.assert_array_equal(weights.read("norm.weight", (8,)), np.ones(8))
    np.testing.assert_array_equal(weights.read("q_proj.bias", (8,)), np.zeros(8))


def test_what_repeats_is_the_same_made_whole_by_the_loader() -> None:
    for period_len, shape in ((7, (3, 4)), (12, (3, 4)), (30, (3, 4)), (6, (3, 4)), (5, (2, 3, 4)), (3, (0, 4))):
        values = Repeated(np.arange(period_len, dtype=np.float32), shape)
        whole = _as_tensor(values, torch.empty(0, dtype=torch.bfloat16))
        np.testing.assert_array_equal(whole.numpy(), values.whole())
        assert whole.shape == shape


@pytest.mark.parametrize("model_type", ["qwen3", "phi3"])
def test_a_model_is_filled_with_them_whoever_draws_them(model_type: str) -> None:
    config = {
        "model_type": model_type,
        "vocab_size": 50,
        "hidden_size": 32,
        "intermediate_size": 24,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
    }
    model = resolve(config).build(config, BuildContext("cpu", torch.float32))
    told: list[int] = []
    load_weights(model, DummyWeights(), Path("dummy"), lambda stage, done, total, unit: told.append(done))
    slots = list(model.weight_map())
    assert told == list(range(1, len(slots) + 1))
    for slot in slots:
        values = DummyWeights().read(slot.name, slot.cut.shape)
        whole = values.whole() if isinstance(values, Repeated) else values
        np.testing.assert_array_equal(slot.target.numpy(), whole[slot.cut.index], err_msg=slot.name)
