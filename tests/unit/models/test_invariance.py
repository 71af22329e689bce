# SPDX-License-Identifier: Apache-2.0
"""A sequence's logits are the same bits however it is chunked and batched, with kernels that promise it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tokenspeed.kernels.platform import compiled_cpu
from tokenspeed.kernels.registry import KernelContext, Ok

pytestmark = pytest.mark.skipif(
    compiled_cpu(KernelContext("cpu", torch.float32)) != Ok(), reason="the compiled CPU kernels are not built"
)


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3", "glm4_moe"])
def test_chunks_and_neighbours_do_not_change_a_bit(
    name: str, new_twin: Callable[..., Any], new_session: Callable[..., Any]
) -> None:
    model = new_twin(name).ours
    ids = torch.randint(0, 97, (70,), generator=torch.Generator().manual_seed(5)).tolist()
    whole = new_session(model, 1, 70).step({0: ids})[0]
    alone = new_session(model, 1, 70)
    chunked = torch.cat([alone.step({0: ids[start : start + 9]})[0] for start in range(0, 70, 9)])
    assert torch.equal(whole, chunked)
    together = new_session(model, 3, 70)
    together.step({1: ids[:40]})
    pieces = [
        together.step({1: [ids[40 + step]], 0: ids[2 * step : 2 * step + 2], 2: ids[:5]})[0] for step in range(10)
    ]
    assert torch.equal(whole[:20], torch.cat(pieces))
