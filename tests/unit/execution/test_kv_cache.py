# SPDX-License-Identifier: Apache-2.0
"""How large the KV pool is, and how it is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tokenspeed.core.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from tokenspeed.core.errors import CapacityError, ConfigError
from tokenspeed.core.plan import CacheGroup, GroupKind
from tokenspeed.execution import kv_cache, placement
from tokenspeed.execution.kv_cache import PoolSize, size_pool
from tokenspeed.layers.attention import KvSpec
from tokenspeed.layers.build import BuildContext
from tokenspeed.transfer import resolve as resolve_mover

SPECS = (KvSpec(2, 8), KvSpec(2, 8))
MIXED = (KvSpec(4, 16, 100), KvSpec(4, 8), KvSpec(4, 8, 100))
TOKEN_BYTES = 2 * 2 * 2 * 8 * 4


def sized(
    kv_tokens: int | None = None, max_model_len: int | None = None, model_len: int = 1000, **options: Any
) -> PoolSize:
    config = EngineConfig(
        model=ModelConfig(max_model_len=max_model_len),
        cache=CacheConfig(kv_tokens=kv_tokens, host_tokens=options.get("host_tokens", 0)),
        scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=options.get("step_tokens")),
    )
    return size_pool(config, options.get("specs", SPECS), model_len, BuildContext("cpu", torch.float32))


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


def test_layers_of_a_window_have_the_pages_that_the_planner_charges_for() -> None:
    """Four seats of 100 - 1 tokens in blocks of 16 and seven more, and four margins of a step of 64 tokens and one."""
    size = sized(kv_tokens=5000, specs=MIXED, step_tokens=64)
    full, window = size.groups
    assert (full.kind, full.window, full.num_blocks) == (GroupKind.FULL, None, 312)
    assert (window.kind, window.window, window.num_blocks) == (GroupKind.WINDOW, 100, 4 * (7 + 7) + 4 * (4 + 1))
    assert size.group_of_layer == (1, 0, 1)
    assert (size.num_blocks, size.num_tokens, size.max_model_len) == (312, 4992, 1000)
    assert size.kv_bytes == (313 * 64 + 77 * (128 + 64)) * 16 * 4
    assert sized(kv_tokens=5000, specs=MIXED).groups[1].num_blocks == 312, "a step may have 2048 tokens until measured"
    layers = kv_cache.allocate(size, MIXED, BuildContext("cpu", torch.float32))
    assert [(layer.group, len(layer.k)) for layer in layers] == [(1, 77), (0, 313), (1, 77)]
    groups = kv_cache.page_groups(size, layers)
    assert [tensor.data_ptr() for group in groups for tensor in group.tensors] == [
        tensor.data_ptr() for index in (1, 0, 2) for tensor in (layers[index].k, layers[index].v)
    ]


def test_a_latent_is_kept_once_and_moves_as_one_tensor() -> None:
    """24 numbers a token, not twice as many; its value is a view, so that whoever moves or clears pages moves it too.
    Layers of latents and of heads may share a group."""
    specs, ctx = (KvSpec(1, 24, value_dim=16), KvSpec(2, 8)), BuildContext("cpu", torch.float32)
    size = sized(kv_tokens=160, specs=specs, host_tokens=80)
    assert size.kv_bytes == 11 * 16 * (24 + 2 * 2 * 8) * 4
    assert size.host_bytes == 6 * 16 * (24 + 2 * 2 * 8) * 4
    latent, heads = kv_cache.allocate(size, specs, ctx)
    assert (latent.k.shape, latent.v.shape) == ((11, 16, 1, 24), (11, 16, 1, 16))
    (group,) = kv_cache.page_groups(size, (latent, heads))
    assert [each.data_ptr() for each in group.tensors] == [each.data_ptr() for each in (latent.k, heads.k, heads.v)]
    latent.k[2] = torch.arange(24.0)
    before = latent.k[2].clone()
    mover = resolve_mover("host")((group,))
    mover.start(np.zeros((0, 4), np.int32), np.array([[1, 0, 2, 5]], np.int32))
    kv_cache.copy_pages((latent, heads), torch.tensor([2]), torch.tensor([4]))
    kv_cache.zero_pages((latent, heads), torch.tensor([2]))
    assert torch.equal(latent.v[4], before[..., :16])
    assert not latent.k[2].any()
    mover.start(np.array([[2, 0, 3, 5]], np.int32), np.zeros((0, 4), np.int32))
    assert mover.poll() == ((1, True), (2, True))
    assert torch.equal(latent.k[3], before)


def test_a_window_group_never_has_more_than_the_full_one() -> None:
    assert [group.num_blocks for group in sized(kv_tokens=250, specs=MIXED, step_tokens=64).groups] == [15, 15]


def test_memory_that_windows_leave_goes_to_the_full_group(monkeypatch: pytest.MonkeyPatch) -> None:
    full_bytes, window_bytes = 64 * 16 * 4, (128 + 64) * 16 * 4
    memory(monkeypatch, 2 * (101 * full_bytes + 77 * window_bytes))
    size = sized(specs=MIXED, step_tokens=64)
    assert [group.num_blocks for group in size.groups] == [100, 76]
    assert size.kv_bytes == 101 * full_bytes + 77 * window_bytes
    memory(monkeypatch, 2 * (101 * full_bytes + 77 * window_bytes) - 2)
    assert sized(specs=MIXED, step_tokens=64).num_blocks == 99
    memory(monkeypatch, 2 * 41 * (full_bytes + window_bytes))
    assert [group.num_blocks for group in sized(specs=MIXED, step_tokens=64).groups] == [40, 40]
    memory(monkeypatch, 1 << 50)
    assert [group.num_blocks for group in sized(specs=MIXED, step_tokens=64).groups] == [4 * 63, 76]


def test_layers_that_look_back_alike_are_one_group_and_the_furthest_comes_first() -> None:
    assert kv_cache.group_layers((KvSpec(1, 8, 5), KvSpec(2, 8, 5))) == ((5,), (0, 0))
    assert kv_cache.group_layers((KvSpec(1, 8, 5), KvSpec(1, 8), KvSpec(1, 8, 9))) == ((None, 9, 5), (2, 0, 1))
    assert kv_cache.group_layers(()) == ((None,), ())
    (only,) = sized(kv_tokens=5000, specs=(KvSpec(1, 8, 32),), step_tokens=64).groups
    assert (only.kind, only.window, only.num_blocks) == (GroupKind.WINDOW, 32, 312)


def test_a_host_tier_has_pages_for_its_tokens_in_each_group_and_must_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    size = sized(kv_tokens=250, specs=MIXED, host_tokens=1000)
    assert [group.num_host_blocks for group in size.groups] == [62, 62]
    assert size.host_bytes == 63 * (64 + 128 + 64) * 16 * 4
    assert sized(kv_tokens=250, specs=MIXED).host_bytes == 0
    ctx = BuildContext("cpu", torch.float32)
    memory(monkeypatch, size.kv_bytes + size.host_bytes)
    kv_cache.allocate(size, MIXED, ctx)
    memory(monkeypatch, size.kv_bytes + size.host_bytes - 1)
    with pytest.raises(CapacityError, match=r"out of memory: the host tier of 992 tokens .*--host-kv-tokens"):
        kv_cache.allocate(size, MIXED, ctx)


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


def test_a_pool_of_fp8_holds_twice_as_many_tokens_of_16_bits() -> None:
    sizes = []
    for kv_dtype in (None, torch.float8_e4m3fn):
        ctx = BuildContext("cpu", torch.bfloat16, kv_dtype=kv_dtype)
        config = EngineConfig(cache=CacheConfig(kv_tokens=640, block_size=16))
        size = size_pool(config, SPECS, 4096, ctx)
        layers = kv_cache.allocate(size, SPECS, ctx)
        assert {tensor.dtype for layer in layers for tensor in layer.tensors} == {ctx.kv_dtype}
        sizes.append(size.kv_bytes)
    assert sizes[0] == 2 * sizes[1]


def test_a_pool_of_int8_has_a_scale_for_each_head_of_a_token() -> None:
    ctx = BuildContext("cpu", torch.float32, kv_dtype=torch.int8)
    config = EngineConfig(cache=CacheConfig(kv_tokens=640, block_size=16))
    size = size_pool(config, SPECS, 4096, ctx)
    layers = kv_cache.allocate(size, SPECS, ctx)
    assert size.kv_bytes == sum(tensor.nbytes for layer in layers for tensor in layer.tensors)
    for layer, spec in zip(layers, SPECS, strict=True):
        assert layer.k.shape[2:] == layer.v.shape[2:] == (spec.num_kv_heads, spec.head_dim + 4)
        assert spec.token_bytes(torch.int8) == 2 * spec.num_kv_heads * (spec.head_dim + 4)
        assert spec.token_bytes(torch.bfloat16) == 4 * spec.num_kv_heads * spec.head_dim


def test_pages_of_fp8_are_copied_and_cleared() -> None:
    ctx = BuildContext("cpu", torch.float32, kv_dtype=torch.float8_e4m3fn)
    size = size_pool(EngineConfig(cache=CacheConfig(kv_tokens=64, block_size=16)), SPECS, 4096, ctx)
    layers = kv_cache.allocate(size, SPECS, ctx)
    for layer in layers:
        layer.k[1] = torch.full(layer.k.shape[1:], 1.5).to(layer.k.dtype)
    kv_cache.copy_pages(layers, torch.tensor([1]), torch.tensor([3]))
    kv_cache.zero_pages(layers, torch.tensor([1]))
    assert all(layer.k[3].float().unique().tolist() == [1.5] for layer in layers)
    assert not any(layer.k[1].float().any() for layer in layers)
