# SPDX-License-Identifier: Apache-2.0
"""MiniMax-M2: q and k normalised over the whole projection, part of each head turns, experts in every layer chosen by
sigmoid scores and a correction, with weights that sum to one.

Knows no other family.
"""

from __future__ import annotations

import dataclasses

from tokenspeed.layers.build import BuildContext
from tokenspeed.layers.decoder import Decoder, DecoderLayer, QkNorm, SelfAttention, SelfAttentionSpec
from tokenspeed.layers.moe import MoE, RouterSpec, Scoring
from tokenspeed.layers.rotary import RotaryEmbedding
from tokenspeed.models import (
    ATTENTION_NAMES,
    DECODER_NAMES,
    LAYER_NAMES,
    MOE_NAMES,
    CausalLM,
    Config,
    ConfigFields,
    attention_spec,
    context_len_of,
    decoder_spec,
    moe_spec,
    num_experts_of,
    rotary_spec,
)

DEFAULTS = {"rope_theta": 5_000_000.0, "num_key_value_heads": 8, "head_dim": 128}
LAYER = dataclasses.replace(LAYER_NAMES, mlp=("block_sparse_moe", "mlp"))
EXPERTS = dataclasses.replace(
    MOE_NAMES,
    each=("experts.{}.w1", "experts.{}.w3", "experts.{}.w2"),
    correction=("e_score_correction_bias",),
)


def build(config: Config, ctx: BuildContext) -> CausalLM:
    """A MiniMax-M2 whose weights are still to be loaded."""
    fields = ConfigFields({**DEFAULTS, **config})
    fields.require("hidden_act", "silu", ("silu",))
    fields.require("scoring_func", "sigmoid", ("sigmoid",))
    fields.require("qk_norm_type", "per_layer", ("per_layer",))
    head_dim = fields.integer("head_dim")
    rotary_dim = fields.optional_integer("rotary_dim")
    if rotary_dim is not None:
        fields = ConfigFields({"partial_rotary_factor": rotary_dim / head_dim, **DEFAULTS, **config})
    rope = rotary_spec(fields, head_dim)
    spec = decoder_spec(fields, context_len_of(fields, rope))
    rotary = RotaryEmbedding(ctx, rope, spec.max_model_len)
    geometry = attention_spec(fields, head_dim)
    attention = SelfAttentionSpec(spec.hidden_size, geometry, spec.norm, qk_norm=QkNorm.WHOLE)
    top_k = fields.integer("num_experts_per_tok", 8)
    router = RouterSpec(num_experts_of(fields), top_k, Scoring.SIGMOID, renormalise=True, correction=True)
    experts = moe_spec(router, fields.integer("intermediate_size"))

    def layer(index: int) -> DecoderLayer:
        attend = SelfAttention(ctx, attention, rotary, index, names=ATTENTION_NAMES)
        moe = MoE(ctx, spec.hidden_size, experts, names=EXPERTS)
        return DecoderLayer(ctx, spec, attend, moe, names=LAYER)

    layers = [layer(index) for index in range(fields.integer("num_hidden_layers"))]
    return Decoder(ctx, spec, layers, names=DECODER_NAMES)
