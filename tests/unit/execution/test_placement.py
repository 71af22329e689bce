# SPDX-License-Identifier: Apache-2.0
"""How many tokens a step has, and of prompts where it decodes: as told, by measured speed on a CPU, within limits. And
where weights stay packed, and what is kept of K and V."""

from __future__ import annotations

import pytest
import torch

from tokenspeed.core.config import CacheConfig, KvDType, SchedulerConfig, WeightsForm
from tokenspeed.core.errors import ConfigError
from tokenspeed.execution import cuda_graph
from tokenspeed.execution.placement import (
    GPU_MIXED_STEP_UNIT,
    GPU_STEP_TOKENS,
    STEP_S,
    STEP_TOKENS_MAX,
    keeps_packed,
    mixed_prefill_tokens,
    mixed_step_unit,
    resolve_kv_dtype,
    step_tokens,
)

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


def test_steps_that_decode_have_whole_units_on_a_gpu_unless_their_prompt_tokens_are_given() -> None:
    assert mixed_step_unit(SchedulerConfig(), GPU) == GPU_MIXED_STEP_UNIT
    assert mixed_step_unit(SchedulerConfig(), CPU) is None
    assert mixed_step_unit(SchedulerConfig(max_num_mixed_prefill_tokens=777), GPU) is None
    sizes = {size.tokens for size in cuda_graph.step_sizes(64, GPU_STEP_TOKENS)}
    assert set(range(GPU_MIXED_STEP_UNIT, cuda_graph.TOKENS_MAX + 1, GPU_MIXED_STEP_UNIT)) <= sizes


@pytest.mark.parametrize(("given", "expected"), [(777, 777), (None, 8192), (9000, 8192)])
def test_prompt_tokens_of_a_step_that_decodes(given: int | None, expected: int) -> None:
    assert mixed_prefill_tokens(SchedulerConfig(max_num_mixed_prefill_tokens=given), GPU_STEP_TOKENS) == expected


@pytest.mark.parametrize(
    ("form", "device", "expected"),
    [
        ("auto", CPU, True),
        ("auto", GPU, False),
        ("exact", CPU, False),
        ("exact", GPU, False),
        ("packed", CPU, True),
        ("packed", GPU, True),
    ],
)
def test_weights_stay_packed_on_a_cpu_unless_told_otherwise(
    form: WeightsForm, device: torch.device, expected: bool
) -> None:
    assert keeps_packed(form, device) is expected


FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


@pytest.mark.parametrize(
    ("wanted", "device", "dtype", "is_packed", "expected"),
    [
        ("auto", CPU, FP32, True, BF16),
        ("auto", CPU, FP32, False, FP32),
        ("auto", CPU, FP16, True, FP16),
        ("auto", GPU, FP32, True, FP32),
        ("auto", GPU, BF16, False, BF16),
        ("fp32", CPU, FP32, True, FP32),
        ("bf16", CPU, FP32, False, BF16),
        ("bf16", GPU, BF16, False, BF16),
        ("int8", CPU, FP32, True, torch.int8),
        ("int8", CPU, FP32, False, torch.int8),
        ("int8", CPU, BF16, False, torch.int8),
    ],
)
def test_a_cpu_keeps_k_and_v_of_packed_weights_in_two_bytes_unless_told_otherwise(
    wanted: KvDType, device: torch.device, dtype: torch.dtype, is_packed: bool, expected: torch.dtype
) -> None:
    assert resolve_kv_dtype(CacheConfig(kv_dtype=wanted), device, dtype, is_packed=is_packed) is expected


@pytest.mark.parametrize(("wanted", "device", "dtype"), [("bf16", GPU, FP32), ("bf16", CPU, FP16), ("fp32", CPU, BF16)])
def test_a_pool_that_no_kernel_reads_is_refused(wanted: KvDType, device: torch.device, dtype: torch.dtype) -> None:
    with pytest.raises(ConfigError, match=f"--kv-cache-dtype {wanted}: the model runs in"):
        resolve_kv_dtype(CacheConfig(kv_dtype=wanted), device, dtype)


@pytest.mark.parametrize(("wanted", "device", "instead"), [("fp8", CPU, "int8"), ("int8", GPU, "fp8")])
def test_eight_bits_of_the_other_device_are_refused(wanted: KvDType, device: torch.device, instead: str) -> None:
    with pytest.raises(ConfigError, match=f"--kv-cache-dtype {wanted}: .* do not read it; use {instead} there"):
        resolve_kv_dtype(CacheConfig(kv_dtype=wanted), device, BF16)
