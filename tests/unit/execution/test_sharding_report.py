# SPDX-License-Identifier: Apache-2.0
"""What a rank would hold and exchange is told without weights, as it would be."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from golden import assert_golden
from tokenspeed.core.config import ParallelConfig
from tokenspeed.core.errors import ConfigError, UnsupportedModelError
from tokenspeed.execution.forward import plan_of
from tokenspeed.execution.sharding_report import kv_token_bytes, sharding_report, weight_bytes
from tokenspeed.layers.build import BuildContext
from tokenspeed.models import CausalLM, resolve
from tokenspeed.spmd.mesh import GroupSizes, Mesh

SIZES = {"hidden_size": 64, "num_hidden_layers": 4, "vocab_size": 96, "max_position_embeddings": 64}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
LLAMA = SIZES | {
    "model_type": "llama",
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
}
QWEN3_MOE = (
    SIZES
    | EXPERTS
    | {
        "model_type": "qwen3_moe",
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "num_experts": 8,
    }
)
DEEPSEEK_V3 = (
    SIZES
    | EXPERTS
    | {
        "model_type": "deepseek_v3",
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "q_lora_rank": 24,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.5,
    }
)
GOLDEN: dict[str, tuple[Mapping[str, object], ParallelConfig]] = {
    "llama_tp2": (LLAMA, ParallelConfig(tp=2)),
    "qwen3_moe_tp2_dp2_ep2": (QWEN3_MOE, ParallelConfig(tp=2, dp_attention=2, ep=2)),
    "deepseek_v3_tp2_dp2": (DEEPSEEK_V3, ParallelConfig(tp=2, dp_attention=2)),
}


def built(config: Mapping[str, object], sizes: GroupSizes, rank: int, device: str) -> tuple[CausalLM, BuildContext]:
    ctx = BuildContext(device, torch.bfloat16, mesh=Mesh.of(sizes), rank=rank)
    return resolve(config).build(config, ctx), ctx


@pytest.mark.parametrize("name", GOLDEN)
def test_reports_are_golden(name: str) -> None:
    config, parallel = GOLDEN[name]
    text = sharding_report(name, config, "auto", parallel)
    assert_golden(Path(__file__).parent / "golden" / f"{name}.txt", text)


@pytest.mark.parametrize("config", [LLAMA, QWEN3_MOE, DEEPSEEK_V3], ids=lambda config: str(config["model_type"]))
def test_every_rank_holds_as_much_as_the_report_says(config: Mapping[str, object]) -> None:
    """Rank 0 is told about without storage; all of them are built with it here."""
    sizes = GroupSizes.of(2, attention_dp=2, ep=2)
    told, ctx = built(config, sizes, 0, "meta")
    for rank in range(4):
        real, real_ctx = built(config, sizes, rank, "cpu")
        assert weight_bytes(real) == weight_bytes(told)
        assert kv_token_bytes(real, real_ctx) == kv_token_bytes(told, ctx)
        assert plan_of(real, real_ctx).digest() == plan_of(told, ctx).digest()


def test_no_weight_is_in_memory() -> None:
    model, _ = built(DEEPSEEK_V3, GroupSizes.of(2), 0, "meta")
    assert all(parameter.is_meta for parameter in model.parameters())


def test_memory_is_that_of_the_split() -> None:
    """K/V heads that do not suffice for the ranks are kept more than once, latents by every rank."""
    alone = sharding_report("m", QWEN3_MOE, "bfloat16", ParallelConfig())
    assert "256 bytes a token a rank; 1 rank a request holds 1 copy" in alone
    shared = sharding_report("m", QWEN3_MOE, "bfloat16", ParallelConfig(tp=4))
    assert "256 bytes a token a rank; 4 ranks a request hold 4 copies" in shared
    split = sharding_report("m", LLAMA, "float32", ParallelConfig(tp=2))
    assert f"{4 * 4 * 2 * 16:,} bytes a token a rank; 2 ranks a request hold 1 copy" in split
    latents = sharding_report("m", DEEPSEEK_V3, "bfloat16", ParallelConfig(tp=2, dp_attention=2))
    assert f"{4 * 40 * 2:,} bytes a token a rank; 2 ranks a request hold 2 copies" in latents


def test_the_dtype_is_what_a_gpu_would_take_unless_it_is_given() -> None:
    assert "in bfloat16" in sharding_report("m", LLAMA, "auto", ParallelConfig())
    assert "in float16" in sharding_report("m", LLAMA | {"torch_dtype": "float16"}, "auto", ParallelConfig())
    assert "in float32" in sharding_report("m", LLAMA, "float32", ParallelConfig())


@pytest.mark.parametrize(
    ("parallel", "words"),
    [
        (ParallelConfig(tp=4, ep=3), "ep 3 does not divide the 4 ranks; ep may be 1, 2 or 4"),
        (ParallelConfig(tp=3), "attention"),
        (ParallelConfig(tp=8), "4 attention heads do not split over 8 ranks"),
        (ParallelConfig(tp=4, ep=2, moe_tp=4), "moe_tp"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(parallel: ParallelConfig, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        sharding_report("m", QWEN3_MOE, "auto", parallel)


def test_a_family_that_is_not_here_is_named() -> None:
    with pytest.raises(UnsupportedModelError, match="mamba9"):
        sharding_report("m", {"model_type": "mamba9"}, "auto", ParallelConfig())
