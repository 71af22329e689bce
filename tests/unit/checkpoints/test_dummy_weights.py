# SPDX-License-Identifier: Apache-2.0
"""Dummy weights: the same on each run, different by name, of a sensible scale."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from tokenspeed.checkpoints import Repeated
from tokenspeed.checkpoints.dummy import DummyWeights
from tokenspeed.execution.weights import _as_tensor


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
