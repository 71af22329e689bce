# SPDX-License-Identifier: Apache-2.0
"""Tiny random models of every family beside their transformers twins, and a batch builder over random page tables.

A test oracle only: builds what execution would build, in the slowest obvious way.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import pytest
import torch
import transformers

from tokenspeed.models import CausalLM
from unit.models.sessions import Session, build_model, load

VOCAB_SIZE = 97

TINY = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
YARN_MSCALE_ROPE = {**YARN_ROPE, "mscale": 1.0, "mscale_all_dim": 0.7, "beta_fast": 16.0, "truncate": False}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
GEMMA = {**TINY, "num_hidden_layers": 4, "head_dim": 24, "query_pre_attn_scalar": 20, "sliding_window": 11}
GEMMA_TYPES = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
QWEN_TYPES = ["full_attention", "sliding_attention", "sliding_attention"]
SMOLLM3 = {**TINY, "num_hidden_layers": 4, "no_rope_layer_interval": 2}
MOE = {**TINY, "head_dim": 16, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
QWEN2_MOE = {**MOE, "shared_expert_intermediate_size": 28}
SPARSE_LATER = {"decoder_sparse_step": 2, "mlp_only_layers": [0]}
GLM4_MOE = {**MOE, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 2}
GPT_OSS = {
    **TINY,
    "num_hidden_layers": 4,
    "head_dim": 16,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "intermediate_size": 20,
    "sliding_window": 11,
    "rope_parameters": {**YARN_ROPE, "truncate": False},
}
DEEPSEEK = {
    **TINY,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "moe_intermediate_size": 20,
    "first_k_dense_replace": 1,
}
MINIMAX_M2 = {**TINY, "head_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 20}

VARIANTS: Mapping[str, tuple[str, Mapping[str, object]]] = {
    "llama": ("llama", {**TINY, "rope_parameters": DEFAULT_ROPE}),
    "llama-biases-mha-tied": (
        "llama",
        {**TINY, "num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "llama-wide-heads": ("llama", {**TINY, "head_dim": 20, "num_key_value_heads": 1}),
    "llama-llama3": ("llama", {**TINY, "rope_parameters": LLAMA3_ROPE}),
    "llama-yarn": ("llama", {**TINY, "rope_parameters": YARN_ROPE}),
    "llama-yarn-mscale": ("llama", {**TINY, "rope_parameters": YARN_MSCALE_ROPE}),
    "llama-linear": ("llama", {**TINY, "rope_parameters": LINEAR_ROPE}),
    "qwen2": ("qwen2", {**TINY, "tie_word_embeddings": True}),
    "qwen2-yarn": ("qwen2", {**TINY, "rope_parameters": YARN_ROPE}),
    "qwen2-windows": (
        "qwen2",
        {**TINY, "use_sliding_window": True, "sliding_window": 13, "max_window_layers": 1, "layer_types": QWEN_TYPES},
    ),
    "qwen3": ("qwen3", {**TINY, "head_dim": 16}),
    "qwen3-biases-yarn": ("qwen3", {**TINY, "head_dim": 24, "attention_bias": True, "rope_parameters": YARN_ROPE}),
    "mistral": ("mistral", {**TINY, "head_dim": 16, "sliding_window": None}),
    "mistral-window": ("mistral", {**TINY, "sliding_window": 13}),
    "smollm3": ("smollm3", {**SMOLLM3, "attention_bias": True, "mlp_bias": True}),
    "smollm3-windows": (
        "smollm3",
        {**SMOLLM3, "no_rope_layers": [0, 1, 1, 0], "use_sliding_window": True, "sliding_window": 13},
    ),
    "mixtral": ("mixtral", {**TINY, "num_local_experts": 5, "num_experts_per_tok": 2}),
    "qwen2_moe": ("qwen2_moe", {**QWEN2_MOE, **SPARSE_LATER}),
    "qwen2_moe-windows": (
        "qwen2_moe",
        {**QWEN2_MOE, "norm_topk_prob": True, "qkv_bias": False, "use_sliding_window": True, "sliding_window": 13},
    ),
    "qwen3_moe": ("qwen3_moe", {**MOE, "norm_topk_prob": True, "attention_bias": True, **SPARSE_LATER}),
    "qwen3_moe-window": ("qwen3_moe", {**MOE, "use_sliding_window": True, "sliding_window": 13}),
    "glm4_moe": ("glm4_moe", {**GLM4_MOE, "attention_bias": True, "routed_scaling_factor": 2.5}),
    "glm4_moe-groups-norms": (
        "glm4_moe",
        {**GLM4_MOE, "n_group": 4, "topk_group": 2, "use_qk_norm": True, "norm_topk_prob": False},
    ),
    "minimax_m2": ("minimax_m2", {**MINIMAX_M2, "rotary_dim": 8}),
    "gpt_oss": ("gpt_oss", GPT_OSS),
    "gpt_oss-no-biases": ("gpt_oss", {**GPT_OSS, "attention_bias": False, "rope_parameters": DEFAULT_ROPE}),
    "deepseek_v2": ("deepseek_v2", {**DEEPSEEK, "q_lora_rank": None, "first_k_dense_replace": 0}),
    "deepseek_v2-groups-yarn": (
        "deepseek_v2",
        {
            **DEEPSEEK,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.6,
            "rope_parameters": YARN_MSCALE_ROPE,
        },
    ),
    "deepseek_v3": ("deepseek_v3", {**DEEPSEEK, "n_group": 4, "topk_group": 2}),
    "deepseek_v3-yarn-no-groups": (
        "deepseek_v3",
        {
            **DEEPSEEK,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": False,
            "attention_bias": True,
            "rope_interleave": False,
            "q_lora_rank": None,
            "rope_parameters": YARN_MSCALE_ROPE,
        },
    ),
    "olmo3": (
        "olmo3",
        {
            **TINY,
            "num_hidden_layers": 4,
            "sliding_window": 11,
            "rope_parameters": {"full_attention": YARN_ROPE, "sliding_attention": DEFAULT_ROPE},
        },
    ),
    "phi3": ("phi3", {**TINY, "sliding_window": 13, "partial_rotary_factor": 0.5}),
    "gemma3": ("gemma3_text", {**GEMMA, "layer_types": GEMMA_TYPES}),
    "gemma3-untied-linear": (
        "gemma3_text",
        {
            **GEMMA,
            "layer_types": GEMMA_TYPES,
            "tie_word_embeddings": False,
            "final_logit_softcapping": 5.0,
            "rope_parameters": {"full_attention": LINEAR_ROPE, "sliding_attention": DEFAULT_ROPE},
        },
    ),
}


@dataclass(slots=True)
class Twin:
    """Our model and transformers' with the same random weights, in float32."""

    ours: CausalLM
    theirs: transformers.PreTrainedModel

    def expected(self, token_ids: Sequence[int]) -> torch.Tensor:
        """(len, V) logits of a whole sequence."""
        with torch.inference_mode():
            logits: torch.Tensor = self.theirs(torch.tensor([token_ids]), use_cache=False).logits[0]
        return logits


def make_twin(variant: str, overrides: Mapping[str, str] | None = None) -> Twin:
    """Both models of one entry of VARIANTS."""
    theirs = make_oracle(variant)
    ours = build_model(theirs.config.to_dict(), overrides)
    load(ours, theirs.state_dict())
    return Twin(ours, theirs)


def make_oracle(variant: str, **changed: object) -> transformers.PreTrainedModel:
    """The transformers model of an entry of VARIANTS, some fields of its configuration changed."""
    model_type, fields = VARIANTS[variant]
    torch.manual_seed(7)
    config = transformers.AutoConfig.for_model(model_type, **{**fields, **changed})
    theirs: transformers.PreTrainedModel = (
        transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().float()
    )
    with torch.no_grad():
        for tensor in theirs.state_dict().values():
            tensor.normal_(std=0.3 if tensor.ndim == 1 else tensor.shape[-1] ** -0.5)
    return theirs


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that takes `variant` runs once for each entry of VARIANTS, one that takes `family` once for the first
    entry of each family."""
    if "variant" in metafunc.fixturenames:
        metafunc.parametrize("variant", VARIANTS)
    if "family" in metafunc.fixturenames:
        families = {model_type: name for name, (model_type, _) in reversed(VARIANTS.items())}
        metafunc.parametrize("family", sorted(families.values()))


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@functools.cache
def _cached_twin(variant: str) -> Twin:
    return make_twin(variant)


@pytest.fixture
def twin(variant: str) -> Twin:
    """The pair of models of this variant, made once."""
    return _cached_twin(variant)


@pytest.fixture
def new_session() -> type[Session]:
    """How a test runs sequences through a model."""
    return Session


@pytest.fixture
def new_twin() -> Callable[..., Twin]:
    """make_twin, for tests that choose their own variant or kernels."""
    return make_twin


@pytest.fixture
def tiny_config() -> Mapping[str, object]:
    """A llama configuration as in config.json."""
    return {"model_type": "llama", "rms_norm_eps": 1e-6, "hidden_act": "silu", **TINY}


@pytest.fixture
def tested_families() -> frozenset[str]:
    """The model types that VARIANTS has."""
    return frozenset(model_type for model_type, _ in VARIANTS.values())
