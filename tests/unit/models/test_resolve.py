# SPDX-License-Identifier: Apache-2.0
"""What a configuration turns into: families, spellings, refusals, and where checkpoint names go."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tokenspeed.core.errors import CheckpointError, ConfigError, UnsupportedModelError
from tokenspeed.layers.build import BuildContext
from tokenspeed.layers.rotary import LinearScaling, WavelengthScaling, YarnScaling, inverse_frequencies
from tokenspeed.models import ConfigFields, context_len_of, resolve, rotary_spec, supported

Config = Mapping[str, object]


def build(config: Config) -> Any:
    return resolve(config).build(config, BuildContext("cpu", torch.float32))


def test_families_are_found_by_scanning_and_each_has_an_oracle(tested_families: frozenset[str]) -> None:
    assert tested_families == set(supported())


def test_the_page_lists_every_family() -> None:
    page = Path(__file__).parents[3] / "docs" / "add-a-model.md"
    assert tuple(re.findall(r"^\| `(\w+)` \| \w", page.read_text(), re.MULTILINE)) == supported()


@pytest.mark.parametrize("model_type", ["gpt_bigcode", None, "__init__", "../llama"])
def test_unknown_family_is_refused_naming_the_supported(model_type: object) -> None:
    with pytest.raises(UnsupportedModelError, match=r"supported are .*gemma3_text, .*llama, .*qwen2, .*qwen3"):
        resolve({"model_type": model_type})


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"hidden_size": None}, CheckpointError, "hidden_size is missing"),
        ({"hidden_size": "48"}, CheckpointError, "hidden_size is '48', not a positive integer"),
        ({"num_hidden_layers": 0}, CheckpointError, "num_hidden_layers is 0, not a positive integer"),
        ({"rms_norm_eps": "tiny"}, CheckpointError, "rms_norm_eps is 'tiny', not a number"),
        ({"attention_bias": 1}, CheckpointError, "attention_bias is 1, not true or false"),
        ({"rope_scaling": [4]}, CheckpointError, "rope_scaling is .*, not an object"),
        ({"rope_scaling": {"rope_type": "linear"}}, CheckpointError, "factor is missing"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, UnsupportedModelError, "rope type 'dynamic'"),
        ({"hidden_act": "relu"}, UnsupportedModelError, "hidden_act 'relu' is not supported; supported: silu"),
        ({"hidden_size": 10**30}, CheckpointError, "hidden_size is 1000.* not a positive integer below 2"),
        ({"rms_norm_eps": -1.0}, CheckpointError, "rms_norm_eps is -1; it must be above 0"),
        ({"rms_norm_eps": float("inf")}, CheckpointError, "rms_norm_eps is inf, not a number"),
        ({"rope_theta": 0}, CheckpointError, "rope_theta is 0; it must be above 0"),
        ({"num_key_value_heads": 3}, CheckpointError, "4 attention heads cannot share num_key_value_heads 3"),
        ({"num_key_value_heads": 8}, CheckpointError, "4 attention heads cannot share num_key_value_heads 8"),
        ({"head_dim": 15}, CheckpointError, "15 of the 15 dimensions of a head would turn"),
        ({"partial_rotary_factor": 3.0}, CheckpointError, "36 of the 12 dimensions of a head would turn"),
        ({"partial_rotary_factor": 0.0}, CheckpointError, "0 of the 12 dimensions of a head would turn"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": -3.0}}, CheckpointError, "factor is -3; it must be above 0"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 2, "high_freq_factor": 2}},
            CheckpointError,
            "low_freq_factor and high_freq_factor are both 2",
        ),
    ],
)
def test_wrong_field_is_one_line_that_names_it(
    change: Config, error: type[Exception], says: str, tiny_config: Config
) -> None:
    with pytest.raises(error, match=says):
        build({**tiny_config, **change})


def test_unknown_layer_type_is_refused(tiny_config: Config) -> None:
    with pytest.raises(UnsupportedModelError, match="layer type 'linear_attention'"):
        build({**tiny_config, "model_type": "qwen2", "layer_types": ["linear_attention"] * 3})


def test_unknown_kernel_override_is_refused_when_the_model_is_built() -> None:
    with pytest.raises(ConfigError, match="no such op"):
        BuildContext("cpu", torch.float32, {"attention": "cpu"})


@pytest.mark.parametrize(
    ("scaling", "kind"),
    [
        ({"type": "linear", "factor": 4.0}, LinearScaling),
        (
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
            WavelengthScaling,
        ),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, YarnScaling),
    ],
)
def test_older_and_newer_rope_spellings_mean_the_same(scaling: Config, kind: type, tiny_config: Config) -> None:
    older = ConfigFields({**tiny_config, "rope_theta": 500.0, "rope_scaling": scaling})
    renamed = {("rope_type" if name == "type" else name): value for name, value in scaling.items()}
    newer = ConfigFields({**tiny_config, "rope_parameters": {"rope_theta": 500.0, **renamed}})
    assert rotary_spec(older, 12) == rotary_spec(newer, 12)
    assert isinstance(rotary_spec(older, 12).scaling, kind)
    assert rotary_spec(older, 12).base == 500.0


def test_frequencies_equal_the_oracle_at_real_sizes() -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = transformers.LlamaConfig(head_dim=64, max_position_embeddings=131072, rope_parameters=rope)
    expected, _ = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    actual = inverse_frequencies(rotary_spec(ConfigFields(config.to_dict()), 64))
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=0.0)


def test_yarn_stretches_the_context(tiny_config: Config) -> None:
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    fields = ConfigFields({**tiny_config, "max_position_embeddings": 32768, "rope_scaling": yarn})
    assert context_len_of(fields, rotary_spec(fields, 12)) == 131072


def test_tied_head_loads_with_and_without_its_own_copy(new_twin: Callable[..., Any]) -> None:
    twin = new_twin("qwen2")
    names = {slot.name for slot in twin.ours.weight_map()}
    assert "lm_head.weight" not in names
    assert twin.ours.weight_map().ignores("lm_head.weight")
    assert not twin.ours.weight_map().ignores("model.layers.0.mlp.down_proj.bias")


def test_untied_head_has_its_own_slot(tiny_config: Config) -> None:
    weight_map = build(tiny_config).weight_map()
    assert "lm_head.weight" in {slot.name for slot in weight_map}
    assert weight_map.ignores("model.layers.7.self_attn.rotary_emb.inv_freq")
    assert not weight_map.ignores("lm_head.weight")


def test_slots_cover_every_parameter_element_once(variant: str, twin: Any) -> None:
    values = [parameter.data.clone() for parameter in twin.ours.parameters()]
    for parameter in twin.ours.parameters():
        parameter.data.zero_()
    for slot in twin.ours.weight_map():
        slot.target.add_(1)
    num_filled = [parameter.data.clone() for parameter in twin.ours.parameters()]
    for parameter, value in zip(twin.ours.parameters(), values, strict=True):
        parameter.data.copy_(value)
    assert all(bool((filled == 1).all()) for filled in num_filled)


def test_text_part_of_a_multimodal_checkpoint(new_twin: Callable[..., Any]) -> None:
    text = new_twin("gemma3").theirs.config.to_dict()
    weight_map = build({"model_type": "gemma3", "text_config": text, "vision_config": {}}).weight_map()
    slot = next(each for each in weight_map if each.name.endswith("layers.0.mlp.down_proj.weight"))
    assert slot.names == (
        "language_model.model.layers.0.mlp.down_proj.weight",
        "model.language_model.layers.0.mlp.down_proj.weight",
        "model.layers.0.mlp.down_proj.weight",
    )
    assert weight_map.ignores("vision_tower.encoder.layers.0.weight")
    assert weight_map.ignores("model.vision_tower.encoder.layers.0.weight")
    assert weight_map.ignores("language_model.lm_head.weight")
    assert not weight_map.ignores("model.language_model.layers.9.weight")


def test_windows_reach_the_cache_specs(new_twin: Callable[..., Any]) -> None:
    assert [spec.window for spec in new_twin("qwen2-windows").ours.kv_specs] == [None, 13, 13]
    assert [spec.window for spec in new_twin("gemma3").ours.kv_specs] == [11, 11, None, 11]
    assert {spec.window for spec in new_twin("llama").ours.kv_specs} == {None}


@pytest.mark.parametrize("name", ["qwen2_moe-windows", "smollm3-windows", "gemma3", "gpt_oss", "olmo3"])
def test_layer_types_left_out_are_those_of_the_oracle(name: str, new_twin: Callable[..., Any]) -> None:
    config = new_twin(name).theirs.config.to_dict()
    del config["layer_types"]
    expected = transformers.AutoConfig.for_model(**config).layer_types
    windows = [spec.window for spec in build(config).kv_specs]
    assert [window is not None for window in windows] == [each == "sliding_attention" for each in expected]
    assert any(windows)


def test_layers_without_positions_are_those_of_the_oracle(new_twin: Callable[..., Any]) -> None:
    config = new_twin("smollm3").theirs.config.to_dict()
    del config["no_rope_layers"]
    expected = transformers.AutoConfig.for_model(**config).no_rope_layers
    assert [layer.attention.rotary is not None for layer in build(config).layers] == [each == 1 for each in expected]
    with pytest.raises(CheckpointError, match="no_rope_layers has 2 entries for 4 layers"):
        build({**config, "no_rope_layers": [1, 1]})


@pytest.mark.parametrize(("name", "spelling", "width"), [("minimax_m2", {"rotary_dim": 6}, 6), ("glm4_moe", {}, 8)])
def test_older_files_say_otherwise_how_much_of_a_head_turns(
    name: str, spelling: Config, width: int, new_twin: Callable[..., Any]
) -> None:
    config = {**new_twin(name).theirs.config.to_dict(), **spelling}
    del config["rope_parameters"]
    assert build(config).layers[0].attention.rotary.table_PR.shape[1] == width


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"num_experts_per_tok": 9}, "num_experts_per_tok is 9, a token can reach 4"),
        ({"n_group": 3}, "2 of 3 groups of 8 experts"),
        ({"topk_group": 5}, "5 of 4 groups of 8 experts"),
    ],
)
def test_experts_that_are_not_there_are_refused(change: Config, says: str, new_twin: Callable[..., Any]) -> None:
    config = new_twin("glm4_moe-groups-norms").theirs.config.to_dict()
    with pytest.raises(CheckpointError, match=says):
        build({**config, **change})


@pytest.mark.parametrize("kind", ["su", "yarn", "longrope"])
def test_a_stretch_with_two_sets_of_frequencies_is_not_taken_for_another(kind: str, tiny_config: Config) -> None:
    scaling = {"type": kind, "factor": 4.0, "original_max_position_embeddings": 64}
    with pytest.raises(UnsupportedModelError, match=f"rope_type '{kind}' is not supported"):
        build({**tiny_config, "model_type": "phi3", "rope_scaling": scaling})


@pytest.mark.parametrize(
    "change", [{"num_key_value_heads": 3}, {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 3.0}}]
)
def test_heads_that_cannot_be_are_refused_by_every_family(
    family: str, change: Config, new_twin: Callable[..., Any]
) -> None:
    config = {**new_twin(family).theirs.config.to_dict(), **change}
    if family.startswith("deepseek") and "num_key_value_heads" in change:
        assert build(config).kv_specs[0].num_kv_heads == 1  # one latent for all heads
        return
    nested = family.startswith(("gemma3", "olmo3")) and "rope_parameters" in change
    if nested:
        config["rope_parameters"] = {"full_attention": change["rope_parameters"], "sliding_attention": {}}
    with pytest.raises((CheckpointError, UnsupportedModelError), match=r"cannot share|would turn"):
        build(config)
