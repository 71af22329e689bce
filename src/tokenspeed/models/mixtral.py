# SPDX-License-Identifier: Apache-2.0
"""Mixtral (arXiv:2401.04088): pre-norm decoder whose feed-forward is experts, the best of a softmax over all of them
with weights that sum to one.

Knows no other family.
"""

from __future__ import annotations

import dataclasses

from tokenspeed.layers.build import BuildContext
from tokenspeed.layers.decoder import Decoder, DecoderLayer, SelfAttention, SelfAttentionSpec
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
    head_dim_of,
    moe_spec,
    num_experts_of,
    rotary_spec,
)

DEFAULTS = {"rope_theta": 1_000_000.0, "num_key_value_heads": 8, "num_local_experts": 8}
LAYER = dataclasses.replace(LAYER_NAMES, mlp=("block_sparse_moe", "mlp"))
EXPERTS = dataclasses.replace(MOE_NAMES, each=("experts.{}.w1", "experts.{}.w3", "experts.{}.w2"))


def build(config: Config, ctx: BuildContext) -> CausalLM:
    """A Mixtral whose weights are still to be loaded."""
    fields = ConfigFields({**DEFAULTS, **config})
    fields.require("hidden_act", "silu", ("silu",))
    head_dim = head_dim_of(fields)
    rope = rotary_spec(fields, head_dim)
    spec = decoder_spec(fields, context_len_of(fields, rope), eps=1e-5)
    rotary = RotaryEmbedding(ctx, rope, spec.max_model_len)
    geometry = attention_spec(fields, head_dim, fields.optional_integer("sliding_window"))
    attention = SelfAttentionSpec(spec.hidden_size, geometry, spec.norm)
    top_k = fields.integer("num_experts_per_tok", 2)
    router = RouterSpec(num_experts_of(fields), top_k, Scoring.SOFTMAX, renormalise=True)
    experts = moe_spec(router, fields.integer("intermediate_size"))

    def layer(index: int) -> DecoderLayer:
        attend = SelfAttention(ctx, attention, rotary, index, names=ATTENTION_NAMES)
        moe = MoE(ctx, spec.hidden_size, experts, names=EXPERTS)
        return DecoderLayer(ctx, spec, attend, moe, names=LAYER)

    layers = [layer(index) for index in range(fields.integer("num_hidden_layers"))]
    return Decoder(ctx, spec, layers, names=DECODER_NAMES)
