# SPDX-License-Identifier: Apache-2.0
"""Real GGUF files: every tensor equals, to the bit, what transformers loads from them, and the fields agree."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tokenspeed.checkpoints.gguf_source import open_gguf

pytestmark = pytest.mark.models

FIELDS = (
    "model_type",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "rms_norm_eps",
    "vocab_size",
    "max_position_embeddings",
    "sliding_window",
    "layer_types",
    "query_pre_attn_scalar",
    "hidden_activation",
    "hidden_act",
    "bos_token_id",
    "eos_token_id",
    "final_logit_softcapping",
    "attention_bias",
    "mlp_bias",
)


def check_against_transformers(path: Path) -> None:
    source = open_gguf(path)
    torch.set_num_threads(1)
    oracle = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name)
    expected = oracle.config.to_dict()
    shared = [name for name in FIELDS if name in source.config and name in expected]
    assert len(shared) >= 10
    assert {name: source.config[name] for name in shared} == {name: expected[name] for name in shared}
    rope = expected["rope_parameters"]
    assert source.config["rope_theta"] == rope.get("full_attention", rope)["rope_theta"]
    weights = source.weights()
    infos = weights.infos()
    assert infos is not None
    state = {name: tensor.numpy() for name, tensor in oracle.state_dict().items()}
    if source.config["tie_word_embeddings"]:
        np.testing.assert_array_equal(state.pop("lm_head.weight"), state["model.embed_tokens.weight"])
    assert set(state) == set(infos)
    for name, values in state.items():
        assert infos[name].shape == values.shape
        assert np.array_equal(weights.read(name, values.shape), values), name


def test_smollm2(smollm2_path: Path) -> None:
    check_against_transformers(smollm2_path)


# transformers alone takes half a minute to read the 262,144 tokens.
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_gemma3(gemma3_path: Path) -> None:
    check_against_transformers(gemma3_path)


def test_tinycoder(tinycoder_path: Path) -> None:
    check_against_transformers(tinycoder_path)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_qwen_coder(qwen_coder_path: Path) -> None:
    check_against_transformers(qwen_coder_path)
