# SPDX-License-Identifier: Apache-2.0
"""Dummy weights: the same on each run, different by name, of a sensible scale."""

from __future__ import annotations

import numpy as np

from tokenspeed.checkpoints.dummy import DummyWeights


def test_values_depend_on_the_name_alone() -> None:
    first = DummyWeights().read("model.layers.0.mlp.up_proj.weight", (64, 32))
    np.testing.assert_array_equal(first, DummyWeights().read("model.layers.0.mlp.up_proj.weight", (64, 32)))
    assert not np.array_equal(first, DummyWeights().read("model.layers.1.mlp.up_proj.weight", (64, 32)))
    # The same on every machine and in every process: pinned, not only repeated.
    assert first[0, :2].tolist() == [-0.033663734793663025, 0.07469438761472702]


def test_scale() -> None:
    weights = DummyWeights()
    matrix = weights.read("m.weight", (2000, 1000))
    assert matrix.dtype == np.float32
    assert abs(float(matrix.std()) * 1000**0.5 - 1) < 0.02
    assert len(np.unique(matrix, axis=0)) == 2000
    np.testing.assert_array_equal(weights.read("norm.weight", (8,)), np.ones(8))
    np.testing.assert_array_equal(weights.read("q_proj.bias", (8,)), np.zeros(8))
