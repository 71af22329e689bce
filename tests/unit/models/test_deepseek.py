# SPDX-License-Identifier: Apache-2.0
"""Latent attention in both forms through the cache, real softmax scales, and models that are a DeepSeek-V3 in all but
name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from tokenspeed.core.errors import CheckpointError, ConfigError, UnsupportedModelError
from tokenspeed.layers.attention import KvSpec
from tokenspeed.layers.build import BuildContext
from tokenspeed.models import ConfigFields, latent_rotary_spec, mla_spec, resolve

IDS = torch.randint(0, 97, (60,), generator=torch.Generator().manual_seed(4)).tolist()


def built(config: Mapping[str, object]) -> Any:
    return resolve(config).build(config, BuildContext("cpu", torch.float32))


def fill(model: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    unused = set(tensors)
    for slot in model.weight_map().for_checkpoint(tensors):
        name = next(name for name in slot.names if name in tensors)
        slot.fill(tensors[name])
        unused.discard(name)
    assert not [name for name in unused if not model.weight_map().ignores(name)]


def logits_of(model: Any, new_session: Callable[..., Any], sizes: tuple[int, ...] = (60,)) -> torch.Tensor:
    session, start, pieces = new_session(model, 1, len(IDS)), 0, []
    for size in sizes:
        pieces.append(session.step({0: IDS[start : start + size]})[0])
        start += size
    return torch.cat(pieces)


@pytest.mark.parametrize("kernel", ["portable", "reference"])
@pytest.mark.parametrize("name", ["deepseek_v2-groups-yarn", "deepseek_v3"])
def test_both_kernels_agree_with_the_oracle(
    name: str, kernel: str, new_twin: Callable[..., Any], new_session: Callable[..., Any]
) -> None:
    """Chunks over a cached prefix and decodes: the portable kernel absorbs some and expands others."""
    twin = new_twin(name, {"mla_attention": kernel})
    actual = logits_of(twin.ours, new_session, (33, 2, 21, 1, 1, 1, 1))
    expected = twin.expected(IDS)
    assert float((actual - expected).abs().max() / expected.abs().max()) <= 1e-4


def test_a_token_keeps_one_latent(new_twin: Callable[..., Any]) -> None:
    assert set(new_twin("deepseek_v3").ours.kv_specs) == {KvSpec(1, 32 + 8, value_dim=32)}


@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.int8], ids=str)
def test_latents_are_not_kept_in_8_bits(new_twin: Callable[..., Any], kv_dtype: torch.dtype) -> None:
    config = new_twin("deepseek_v3").theirs.config.to_dict()
    with pytest.raises(ConfigError, match="leave --kv-cache-dtype at auto"):
        resolve(config).build(config, BuildContext("cpu", torch.float32, kv_dtype=kv_dtype))


def test_softmax_scale_at_real_sizes() -> None:
    """192 ** -0.5, times (0.1 ln 40 + 1) ** 2 where the context is stretched by 40 with mscale_all_dim 1."""
    fields = {"num_attention_heads": 128, "max_position_embeddings": 163_840, "rope_theta": 10_000}
    yarn = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "mscale": 1.0}
    for change, expected in (
        ({}, 0.07216878),
        ({"rope_scaling": yarn}, 0.07216878),
        ({"rope_scaling": {**yarn, "mscale_all_dim": 1.0}}, 0.13523378),
    ):
        config = ConfigFields({**fields, **change})
        assert mla_spec(config, latent_rotary_spec(config)).scale == pytest.approx(expected, rel=1e-6)


def test_layers_that_predict_further_tokens_are_not_read(new_twin: Callable[..., Any]) -> None:
    config = new_twin("deepseek_v3").theirs.config.to_dict()
    weight_map = built({**config, "num_nextn_predict_layers": 2}).weight_map()
    ignored = [weight_map.ignores(f"model.layers.{index}.eh_proj.weight") for index in (2, 3, 4, 5)]
    assert ignored == [False, True, True, False]
    weight_map = built({**config, "num_nextn_predict_layers": 0, "num_mtp_layers": 0}).weight_map()
    assert not weight_map.ignores("model.layers.3.eh_proj.weight")


def kimi(config: Mapping[str, object]) -> dict[str, object]:
    """The configuration as those checkpoints spell it."""
    rope = dict(config["rope_parameters"])  # type: ignore[call-overload]
    older = {"rope_theta": rope.pop("rope_theta"), "rope_scaling": {"type": rope.pop("rope_type"), **rope}}
    kept = {name: value for name, value in config.items() if name != "rope_parameters"}
    return {**kept, **older, "model_type": "kimi_k2", "scoring_func": "sigmoid", "topk_method": "noaux_tc"}


@pytest.mark.parametrize("architectures", [["DeepseekV3ForCausalLM"], None])
def test_kimi_k2_is_a_deepseek_v3(
    architectures: list[str] | None, new_twin: Callable[..., Any], new_session: Callable[..., Any]
) -> None:
    twin = new_twin("deepseek_v3-yarn-no-groups")
    model = built({**kimi(twin.theirs.config.to_dict()), "architectures": architectures})
    fill(model, twin.theirs.state_dict())
    assert torch.equal(logits_of(model, new_session), logits_of(twin.ours, new_session))


def test_kimi_k25_is_served_as_text(new_twin: Callable[..., Any], new_session: Callable[..., Any]) -> None:
    twin = new_twin("deepseek_v3-yarn-no-groups")
    text = kimi(twin.theirs.config.to_dict())
    architectures = ["KimiK25ForConditionalGeneration"]
    model = built({"model_type": "kimi_k25", "architectures": architectures, "text_config": text, "vision_config": {}})
    others = {"vision_tower.encoder.blocks.0.wqkv.weight": torch.zeros(2), "mm_projector.proj.0.bias": torch.zeros(2)}
    fill(model, {f"language_model.{name}": tensor for name, tensor in twin.theirs.state_dict().items()} | others)
    assert torch.equal(logits_of(model, new_session), logits_of(twin.ours, new_session))


def test_a_type_without_a_file_is_what_its_architecture_is() -> None:
    assert resolve({"model_type": "renamed", "architectures": ["Qwen3ForCausalLM"]}).model_type == "renamed"
    with pytest.raises(UnsupportedModelError, match="model_type is 'renamed'"):
        resolve({"model_type": "renamed", "architectures": ["UnheardOfForCausalLM"]})


@pytest.mark.parametrize(
    ("name", "change", "error", "says"),
    [
        ("deepseek_v2", {"topk_method": "noaux_tc"}, UnsupportedModelError, "topk_method 'noaux_tc'"),
        ("deepseek_v2", {"norm_topk_prob": True}, UnsupportedModelError, "norm_topk_prob is not supported"),
        ("deepseek_v2", {"mlp_bias": True}, UnsupportedModelError, "mlp_bias is not supported"),
        ("deepseek_v2", {"moe_layer_freq": 2}, UnsupportedModelError, "moe_layer_freq"),
        ("deepseek_v3", {"moe_layer_freq": 2}, UnsupportedModelError, "moe_layer_freq"),
        ("deepseek_v3", {"scoring_func": "softmax"}, UnsupportedModelError, "scoring_func 'softmax'"),
        ("deepseek_v3", {"n_group": 3}, CheckpointError, "2 of 3 groups of 8 experts"),
        ("deepseek_v3", {"num_experts_per_tok": 5}, CheckpointError, "num_experts_per_tok is 5, a token can reach 4"),
        ("deepseek_v3", {"first_k_dense_replace": -1}, CheckpointError, "first_k_dense_replace is -1"),
    ],
)
def test_what_is_not_here_is_refused(
    name: str, change: Mapping[str, object], error: type[Exception], says: str, new_twin: Callable[..., Any]
) -> None:
    with pytest.raises(error, match=says):
        built({**new_twin(name).theirs.config.to_dict(), **change})
