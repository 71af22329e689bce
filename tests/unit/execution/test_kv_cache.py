# SPDX-License-Identifier: Apache-2.0
"""How large the KV pool is, and how it is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tokenspeed.core.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from tokenspeed.core.errors import CapacityError, ConfigError
from tokenspeed.core.plan import CacheGroup, GroupKind
from tokenspeed.execution import kv_cache, placement
from tokenspeed.execution.kv_cache import PoolSize, size_pool
from tokenspeed.layers.attention import KvSpec
from tokenspeed.layers.build import BuildContext

SPECS = (KvSpec(2, 8), KvSpec(2, 8))
TOKEN_BYTES = 2 * 2 * 2 * 8 * 4


def sized(
    kv_tokens: int | None = None, max_model_len: int | None = None, model_len: int = 1000, fraction: float = 0.5
) -> PoolSize:
    config = EngineConfig(
        model=ModelConfig(max_model_len=max_model_len),
        cache=CacheConfig(kv_tokens=kv_tokens, memory_fraction=fraction),
        scheduler=SchedulerConfig(max_num_seqs=4),
    )
    return size_pool(config, SPECS, model_len, BuildContext("cpu", torch.float32))


def memory(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    monkeypatch.setattr(kv_cache, "available_memory_bytes", lambda device: num_bytes)


def test_given_tokens_are_whole_blocks_and_cut_the_context() -> None:
    size = sized(kv_tokens=250)
    assert (size.num_blocks, size.num_tokens, size.max_model_len) == (15, 240, 240)
    assert size.kv_bytes == 16 * 16 * TOKEN_BYTES
    assert sized(kv_tokens=5000).max_model_len == 1000


def test_the_default_takes_a_fraction_of_memory_but_no_more_than_the_seats_can_fill(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory(monkeypatch, 1000 * TOKEN_BYTES)
    assert sized().num_tokens == 480  # half of 1000 less the null page, in whole blocks
    memory(monkeypatch, 1 << 50)
    assert sized().num_tokens == 4 * 1008
    assert sized(max_model_len=100).num_tokens == 4 * 112


def test_a_pool_below_one_request_is_refused_with_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CapacityError, match=r"holds 240 tokens but one request may need 500 .*--kv-tokens"):
        sized(kv_tokens=250, max_model_len=500)
    memory(monkeypatch, 40 * TOKEN_BYTES)
    with pytest.raises(CapacityError, match="holds 0 tokens but one request may need 32"):
        sized()


def test_a_context_beyond_the_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="1001 exceeds the 1000 tokens"):
        sized(kv_tokens=2000, max_model_len=1001)


def test_a_pool_that_memory_cannot_hold_is_refused() -> None:
    with pytest.raises(CapacityError, match="out of memory: the KV pool"):
        kv_cache.allocate(
            PoolSize((CacheGroup(GroupKind.FULL, 16, 1 << 40),), (0, 0), 1000, 1 << 55),
            SPECS,
            BuildContext("cpu", torch.float32),
        )


def test_pages_are_zeroed_and_copied_whole() -> None:
    layers = kv_cache.allocate(sized(kv_tokens=64), SPECS, BuildContext("cpu", torch.float32))
    assert layers[0].k.shape == (5, 16, 2, 8)
    assert not any(layer.k.any() or layer.v.any() for layer in layers)
    layers[1].v[2] = 3.0
    kv_cache.copy_pages(layers, torch.tensor([2]), torch.tensor([4]))
    assert (layers[1].v[4] == 3.0).all()
    kv_cache.zero_pages(layers, torch.tensor([2]))
    assert not layers[1].v[2].any()
    assert (layers[1].v[4] == 3.0).all()


def test_cgroup_limits_bound_memory_and_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = tmp_path / "outer" / "inner"
    inner.mkdir(parents=True)
    (tmp_path / "outer" / "memory.max").write_text("1000\n")
    (tmp_path / "outer" / "memory.current").write_text("700\n")
    (tmp_path / "outer" / "memory.stat").write_text("anon 300\ninactive_file 400\n")
    (inner / "memory.max").write_text("max\n")
    (inner / "memory.current").write_text("700\n")
    (inner / "cpu.max").write_text("150000 100000\n")
    monkeypatch.setattr(placement, "_CGROUP", tmp_path)
    monkeypatch.setattr(placement, "_cgroup_dirs", lambda: [inner, inner.parent, tmp_path])
    assert placement.available_memory_bytes(torch.device("cpu")) == 700
    assert placement._cpu_quota() == 2


@pytest.mark.parametrize(("dtype", "expected"), [("auto", torch.float32), ("bfloat16", torch.bfloat16)])
def test_auto_is_float32_on_a_cpu(dtype: Any, expected: torch.dtype) -> None:
    assert placement.resolve_dtype(dtype, torch.device("cpu"), {"torch_dtype": "bfloat16"}) == expected


def test_auto_is_the_checkpoints_own_half_precision_elsewhere() -> None:
    gpu = torch.device("cuda")
    assert placement.resolve_dtype("auto", gpu, {"torch_dtype": "float16"}) == torch.float16
    assert placement.resolve_dtype("auto", gpu, {"dtype": "float32"}) == torch.bfloat16
