# SPDX-License-Identifier: Apache-2.0
"""The op decode_step: the chain of Triton kernels, interpreted, agrees with the reference on small models of many
shapes, and touches nothing else."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from drawn_dense import SHAPES, Drawn, agreement, solution

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


@needs_triton
@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs it compiled")
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("positions", [[70], [0, 33, 69]], ids=["one-row", "rows"])
def test_triton_agrees_with_the_reference_where_it_is_interpreted(name: str, positions: list[int]) -> None:
    drawn = Drawn(SHAPES[name], torch.float32)
    agreement(solution("triton", "cpu", torch.float32), drawn, positions, tolerance=1e-5)
