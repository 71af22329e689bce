# SPDX-License-Identifier: Apache-2.0
"""What looks at the device's numbers while it computes says so: a graph captured of it would end the start."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import tokenspeed.layers
from tokenspeed.layers.build import BuildContext
from tokenspeed.layers.moe import Experts, ExpertsSpec

LOOKS = re.compile(r"\.(tolist|item|nonzero|cpu|numpy)\(")
FILES = sorted(Path(tokenspeed.layers.__file__).parent.glob("*.py"))


def test_experts_cannot_be_captured() -> None:
    ctx = BuildContext("cpu", torch.float32)
    assert "experts" not in ctx.uncapturable()
    Experts(ctx, 8, ExpertsSpec(num_experts=4, ff_size=6, activation="silu_mul"))
    assert "experts" in ctx.uncapturable()


def test_an_op_is_as_capturable_as_its_solution() -> None:
    ctx = BuildContext("cpu", torch.float32)
    ctx.bind("linear")
    assert ctx.uncapturable() == ["linear"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_layer_that_looks_at_numbers_says_so(path: Path) -> None:
    text = path.read_text()
    assert not LOOKS.search(text) or "ctx.host_bound.add(" in text
