# SPDX-License-Identifier: Apache-2.0
"""Qwen2 and Qwen1.5 with experts (arXiv:2407.10671): biases on q, k and v, experts beside one shared block that a
sigmoid gates, dense layers among the sparse ones, optional windows on alternate layers.

Knows no other family.
"""

from __future__ import annotations

import dataclasses

from tokenspeed.layers.activation import GatedMLP
from tokenspeed.layers.build import BuildContext
from tokenspeed.layers.decoder import Decoder, DecoderLayer, SelfAttention, SelfAttentionSpec
from tokenspeed.layers.moe import MoE, MoeSpec, RouterSpec, Scoring, SharedSpec
from tokenspeed.layers.rotary import RotaryEmbedding
from tokenspeed.models import (
    ATTENTION_NAMES,
    DECODER_NAMES,
    LAYER_NAMES,
    MLP_NAMES,
    MOE_NAMES,
    CausalLM,
    Config,
    ConfigFields,
    attention_spec,
    context_len_of,
    decoder_spec,
    head_dim_of,
    layer_windows,
    moe_spec,
    num_experts_of,
    rotary_spec,
    sparse_layers,
)

EXPERTS = dataclasses.replace(
    MOE_NAMES,
    shared=("shared_expert.gate_proj", "shared_expert.up_proj", "shared_expert.down_proj"),
    shared_gate="shared_expert_gate",
)


def build(config: Config, ctx: BuildContext) -> CausalLM:
    """A Qwen2 with experts whose weights are still to be loaded."""
    fields = ConfigFields(config)
    fields.require("hidden_act", "silu", ("silu",))
    head_dim, qkv_bias = head_dim_of(fields), fields.flag("qkv_bias", True)
    rope = rotary_spec(fields, head_dim)
    spec = decoder_spec(fields, context_len_of(fields, rope))
    rotary = RotaryEmbedding(ctx, rope, spec.max_model_len)
    experts, ff_size = _moe_spec(fields), fields.integer("intermediate_size")

    def layer(index: int, window: int | None, sparse: bool) -> DecoderLayer:
        geometry = attention_spec(fields, head_dim, window)
        attention = SelfAttentionSpec(spec.hidden_size, geometry, spec.norm, qkv_bias)
        attend = SelfAttention(ctx, attention, rotary, index, names=ATTENTION_NAMES)
        mlp = (
            MoE(ctx, spec.hidden_size, experts, names=EXPERTS)
            if sparse
            else GatedMLP(ctx, spec.hidden_size, ff_size, "silu_mul", names=MLP_NAMES)
        )
        return DecoderLayer(ctx, spec, attend, mlp, names=LAYER_NAMES)

    kinds = zip(_windows(fields), sparse_layers(fields), strict=True)
    return Decoder(ctx, spec, [layer(index, *kind) for index, kind in enumerate(kinds)], names=DECODER_NAMES)


def _moe_spec(fields: ConfigFields) -> MoeSpec:
    top_k, renormalise = fields.integer("num_experts_per_tok", 4), fields.flag("norm_topk_prob", False)
    router = RouterSpec(num_experts_of(fields), top_k, Scoring.SOFTMAX, renormalise)
    shared = SharedSpec(fields.integer("shared_expert_intermediate_size"), gated=True)
    return moe_spec(router, fields.integer("moe_intermediate_size"), shared)


def _windows(fields: ConfigFields) -> tuple[int | None, ...]:
    num_layers, last = fields.integer("num_hidden_layers"), fields.integer("max_window_layers", 28)
    window = fields.optional_integer("sliding_window") if fields.flag("use_sliding_window", False) else None
    windowed = [window is not None and index % 2 == 0 and index < last for index in range(num_layers)]
    default = tuple("sliding_attention" if each else "full_attention" for each in windowed)
    return layer_windows(fields, default, window)
