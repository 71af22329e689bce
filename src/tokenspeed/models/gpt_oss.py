# SPDX-License-Identifier: Apache-2.0
"""gpt-oss (arXiv:2508.10925): heads with sinks, every other layer windowed, biases throughout, experts with a clamped
gate in every layer, chosen by a softmax over the chosen ones.

Knows no other family.
"""

from __future__ import annotations

import dataclasses

from tokenspeed.layers.activation import ClampedSwiglu
from tokenspeed.layers.build import BuildContext
from tokenspeed.layers.decoder import Decoder, DecoderLayer, SelfAttention, SelfAttentionSpec
from tokenspeed.layers.moe import ExpertsSpec, MoE, MoeNames, MoeSpec, RouterSpec, Scoring
from tokenspeed.layers.rotary import RotaryEmbedding, RotarySpec
from tokenspeed.models import (
    ATTENTION_NAMES,
    DECODER_NAMES,
    LAYER_NAMES,
    CausalLM,
    Config,
    ConfigFields,
    attention_spec,
    context_len_of,
    decoder_spec,
    layer_windows,
    rotary_spec,
)

MOE_NAMES = MoeNames(
    router=("router",), each=None, stacked=("experts.gate_up_proj", "experts.down_proj"), transposed=True
)


def build(config: Config, ctx: BuildContext) -> CausalLM:
    """A gpt-oss whose weights are still to be loaded."""
    fields = ConfigFields(config)
    fields.require("hidden_act", "silu", ("silu",))
    head_dim, bias = fields.integer("head_dim", 64), fields.flag("attention_bias", True)
    rope = _rotary_spec(fields, head_dim)
    spec = decoder_spec(fields, context_len_of(fields, rope), eps=1e-5)
    rotary = RotaryEmbedding(ctx, rope, spec.max_model_len)
    moe = _moe_spec(fields)

    def layer(index: int, window: int | None) -> DecoderLayer:
        geometry = dataclasses.replace(attention_spec(fields, head_dim, window), has_sinks=True)
        attention = SelfAttentionSpec(spec.hidden_size, geometry, spec.norm, bias, bias)
        attend = SelfAttention(ctx, attention, rotary, index, names=ATTENTION_NAMES)
        mlp = MoE(ctx, spec.hidden_size, moe, names=MOE_NAMES)
        return DecoderLayer(ctx, spec, attend, mlp, names=LAYER_NAMES)

    layers = [layer(index, window) for index, window in enumerate(_windows(fields))]
    return Decoder(ctx, spec, layers, names=DECODER_NAMES)


def _moe_spec(fields: ConfigFields) -> MoeSpec:
    num_experts = fields.integer("num_local_experts", 128)
    top_k = fields.integer("num_experts_per_tok", fields.integer("experts_per_token", 4))
    activation = ClampedSwiglu(fields.number("swiglu_alpha", 1.702), fields.number("swiglu_limit", 7.0))
    return MoeSpec(
        RouterSpec(num_experts, top_k, Scoring.SOFTMAX_OF_CHOSEN, bias=True),
        ExpertsSpec(num_experts, fields.integer("intermediate_size", 2880), activation, bias=True),
    )


def _windows(fields: ConfigFields) -> tuple[int | None, ...]:
    num_layers = fields.integer("num_hidden_layers")
    default = tuple("full_attention" if index % 2 else "sliding_attention" for index in range(num_layers))
    return layer_windows(fields, default, fields.integer("sliding_window", 128))


def _rotary_spec(fields: ConfigFields, head_dim: int) -> RotarySpec:
    """A context of 4096 stretched by 32 where the configuration is silent."""
    default = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}
    given = fields.section("rope_parameters") or fields.section("rope_scaling") or default
    return rotary_spec(fields, head_dim, {"rope_theta": fields.number("rope_theta", 150_000.0), **given})
