# SPDX-License-Identifier: Apache-2.0
"""How many tokens a step has: as told, by measured speed on a CPU, within limits."""

from __future__ import annotations

import pytest
import torch

from tokenspeed.core.config import SchedulerConfig
from tokenspeed.execution.placement import GPU_STEP_TOKENS, STEP_S, STEP_TOKENS_MAX, step_tokens

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("scheduler", "device", "token_s", "expected"),
    [
        (SchedulerConfig(max_num_batched_tokens=777), CPU, 1.0, 777),
        (SchedulerConfig(max_num_seqs=8), CPU, STEP_S / 100.5, 100),
        (SchedulerConfig(max_num_seqs=8), CPU, STEP_S, 8),
        (SchedulerConfig(max_num_seqs=8), CPU, STEP_S / 1e6, STEP_TOKENS_MAX),
        (SchedulerConfig(max_num_seqs=8), CPU, None, STEP_TOKENS_MAX),
        (SchedulerConfig(max_num_seqs=8), GPU, STEP_S, GPU_STEP_TOKENS),
        (SchedulerConfig(max_num_seqs=GPU_STEP_TOKENS + 1), GPU, None, GPU_STEP_TOKENS + 1),
    ],
)
def test_tokens_of_a_step(
    scheduler: SchedulerConfig, device: torch.device, token_s: float | None, expected: int
) -> None:
    assert step_tokens(scheduler, device, token_s) == expected
