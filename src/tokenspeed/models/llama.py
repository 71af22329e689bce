# SPDX-License-Identifier: Apache-2.0
"""Llama (arXiv:2302.13971 and later): pre-norm decoder, grouped-query attention, rotary positions, SwiGLU.

Knows no other family.
"""

from __future__ import annotations

from tokenspeed.layers.activation import GatedMLP
from tokenspeed.layers.build import BuildContext
from tokenspeed.layers.decoder import Decoder, DecoderLayer, SelfAttention, SelfAttentionSpec
from tokenspeed.layers.rotary import RotaryEmbedding
from tokenspeed.models import (
    ATTENTION_NAMES,
    DECODER_NAMES,
    LAYER_NAMES,
    MLP_NAMES,
    CausalLM,
    Config,
    ConfigFields,
    attention_spec,
    context_len_of,
    decoder_spec,
    head_dim_of,
    rotary_spec,
)


def build(config: Config, ctx: BuildContext) -> CausalLM:
    """A Llama whose weights are still to be loaded."""
    fields = ConfigFields(config)
    fields.require("hidden_act", "silu", ("silu",))
    rope = rotary_spec(fields, head_dim_of(fields))
    spec = decoder_spec(fields, context_len_of(fields, rope))
    rotary = RotaryEmbedding(ctx, rope, spec.max_model_len)
    bias, mlp_bias = fields.flag("attention_bias", False), fields.flag("mlp_bias", False)
    ff_size = fields.integer("intermediate_size")
    attention = SelfAttentionSpec(
        spec.hidden_size, attention_spec(fields, head_dim_of(fields)), spec.norm, qkv_bias=bias, out_bias=bias
    )

    def layer(index: int) -> DecoderLayer:
        attend = SelfAttention(ctx, attention, rotary, index, names=ATTENTION_NAMES)
        mlp = GatedMLP(ctx, spec.hidden_size, ff_size, "silu_mul", mlp_bias, names=MLP_NAMES)
        return DecoderLayer(ctx, spec, attend, mlp, names=LAYER_NAMES)

    layers = [layer(index) for index in range(fields.integer("num_hidden_layers"))]
    return Decoder(ctx, spec, layers, names=DECODER_NAMES)
