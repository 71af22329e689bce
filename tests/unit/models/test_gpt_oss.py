# SPDX-License-Identifier: Apache-2.0
"""Sinks and alternating windows through the cache, MXFP4 checkpoints, and what a silent configuration means."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tokenspeed.checkpoints import open_model
from tokenspeed.core.config import ModelConfig
from tokenspeed.core.errors import CheckpointError
from tokenspeed.execution.weights import load_weights
from tokenspeed.layers.build import BuildContext
from tokenspeed.models import resolve

IDS = torch.randint(0, 97, (60,), generator=torch.Generator().manual_seed(4)).tolist()
SIZES = {"gate_up_proj": (6, 64, 2), "down_proj": (6, 64, 1)}
"""Blocks an expert: outputs and groups of 32 inputs, for 64 hidden and 32 feed-forward dimensions."""


def error_of(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("kernels", [{}, {"paged_attention": "reference"}], ids=["own-choice", "reference"])
def test_window_layers_hold_only_their_window(
    kernels: dict[str, str], new_twin: Callable[..., Any], new_session: Callable[..., Any]
) -> None:
    twin = new_twin("gpt_oss", kernels)
    assert [spec.window for spec in twin.ours.kv_specs] == [11, None, 11, None]
    session = new_session(twin.ours, 1, 60)
    pieces = [session.step({0: IDS[start:end]})[0] for start, end in ((0, 25), (25, 30), (30, 55))]
    pieces += [session.step({0: IDS[at : at + 1]})[0] for at in range(55, 60)]
    assert error_of(torch.cat(pieces), twin.expected(IDS)) <= 1e-4
    # The last token sits at 59 and looks back to 49: blocks 0 to 5 of 8 tokens each are out of its sight.
    assert session.num_holes(0) == [0, 6]


def test_sinks_take_part(new_twin: Callable[..., Any], new_session: Callable[..., Any]) -> None:
    """The oracle's sinks are drawn at random; without them the logits are others."""
    twin = new_twin("gpt_oss")
    for slot in twin.ours.weight_map():
        if slot.name.endswith("sinks"):
            slot.target.fill_(-1e9)
    assert error_of(new_session(twin.ours, 1, 60).step({0: IDS})[0], twin.expected(IDS)) > 1e-2


def packed_checkpoint(folder: Path, theirs: transformers.PreTrainedModel) -> dict[str, torch.Tensor]:
    """Writes a checkpoint with random MXFP4 experts, and gives `theirs` their dequantised values. Its tensors."""
    generator = torch.Generator().manual_seed(8)
    tensors = {}
    for name, tensor in theirs.state_dict().items():
        prefix, _, part = name.rpartition(".")
        if part not in SIZES or "experts" not in name:
            tensors[name] = tensor.clone()
            continue
        shape = SIZES[part]
        blocks = torch.randint(0, 256, (*shape, 16), generator=generator).to(torch.uint8)
        scales = torch.randint(121, 125, shape, generator=generator).to(torch.uint8)
        tensors |= {f"{prefix}.{part}_blocks": blocks, f"{prefix}.{part}_scales": scales}
        tensor.copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
    config = theirs.config.to_dict() | {"quantization_config": {"quant_method": "mxfp4"}}
    write(folder, config, tensors)
    return tensors


def write(folder: Path, config: Mapping[str, object], tensors: Mapping[str, torch.Tensor]) -> None:
    (folder / "config.json").write_text(json.dumps(config))
    save_file(dict(tensors), folder / "model.safetensors")


def loaded(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    source = open_model(ModelConfig(model=str(folder)))
    model = resolve(source.config).build(source.config, BuildContext("cpu", dtype))
    load_weights(model, source.weights(), folder)
    return model


@pytest.fixture
def theirs(variant_fields: Mapping[str, object]) -> transformers.PreTrainedModel:
    torch.manual_seed(7)
    config = transformers.AutoConfig.for_model("gpt_oss", **variant_fields, dtype="float32")
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().float()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.normal_(std=0.3 if tensor.ndim == 1 else tensor.shape[-1] ** -0.5)
    return model


@pytest.fixture
def variant_fields(tiny_config: Mapping[str, object]) -> Mapping[str, object]:
    kept = ("vocab_size", "max_position_embeddings", "pad_token_id", "bos_token_id", "eos_token_id")
    sizes = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    experts = {"num_local_experts": 6, "num_experts_per_tok": 3, "sliding_window": 11}
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 1000.0}}
    return {**{name: tiny_config[name] for name in kept}, **sizes, **heads, **experts, **rope}


@torch.inference_mode()
def test_mxfp4_experts_are_read_as_what_they_stand_for(
    tmp_path: Path, theirs: transformers.PreTrainedModel, new_session: Callable[..., Any]
) -> None:
    packed_checkpoint(tmp_path, theirs)
    actual = new_session(loaded(tmp_path), 1, 60).step({0: IDS})[0]
    assert error_of(actual, theirs(torch.tensor([IDS]), use_cache=False).logits[0]) <= 1e-4


@torch.inference_mode()
def test_mxfp4_and_bf16_checkpoints_of_the_same_numbers_are_the_same_model(
    tmp_path: Path, theirs: transformers.PreTrainedModel
) -> None:
    """Every MXFP4 number is a bf16 number."""
    packed_checkpoint(tmp_path, theirs)
    packed = loaded(tmp_path, torch.bfloat16)
    config = theirs.config.to_dict()
    write(tmp_path, config, {name: tensor.bfloat16() for name, tensor in theirs.state_dict().items()})
    plain = loaded(tmp_path, torch.bfloat16)
    for ours, other in zip(packed.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.bfloat16(), other.bfloat16())


@torch.inference_mode()
@pytest.mark.parametrize(
    ("part", "change", "says"),
    [
        (
            "gate_up_proj_scales",
            None,
            "missing: model.layers.1.mlp.experts.gate_up_proj; 1 unexpected: .*gate_up_proj_blocks",
        ),
        ("down_proj_blocks", (6, 64, 2, 16), "down_proj_blocks .* are no MXFP4 tensor"),
        ("gate_up_proj", (6, 60, 2), r"gate_up_proj is \[6, 64, 60\], the model has \[6, 64, 64\]"),
    ],
)
def test_faults_of_mxfp4_tensors_are_named(
    part: str, change: tuple[int, ...] | None, says: str, tmp_path: Path, theirs: transformers.PreTrainedModel
) -> None:
    tensors, prefix = packed_checkpoint(tmp_path, theirs), "model.layers.1.mlp.experts."
    if change is None:
        del tensors[prefix + part]
    elif part.endswith("proj"):
        tensors[f"{prefix}{part}_blocks"] = torch.zeros((*change, 16), dtype=torch.uint8)
        tensors[f"{prefix}{part}_scales"] = torch.zeros(change, dtype=torch.uint8)
    else:
        tensors[prefix + part] = torch.zeros(change, dtype=torch.uint8)
    write(tmp_path, json.loads((tmp_path / "config.json").read_text()), tensors)
    with pytest.raises(CheckpointError, match=says):
        loaded(tmp_path)


def test_a_silent_configuration_means_what_the_oracle_takes_it_to_mean(variant_fields: Mapping[str, object]) -> None:
    """Windows on even layers of 128 tokens, and a context of 4096 stretched by 32."""
    silent = {
        name: value for name, value in variant_fields.items() if name not in ("rope_parameters", "sliding_window")
    }
    model: Any = resolve({"model_type": "gpt_oss"}).build(silent, BuildContext("cpu", torch.float32))
    assert [spec.window for spec in model.kv_specs] == [128, None]
    assert model.max_model_len == 131_072
    config = transformers.GptOssConfig(**silent)
    expected, amplitude = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")
    table_PR = model.layers[0].attention.rotary.table_PR
    torch.testing.assert_close(table_PR[1], torch.cat((expected.cos(), expected.sin())) * amplitude)
