# SPDX-License-Identifier: Apache-2.0
"""Mistral (arXiv:2310.06825): pre-norm decoder, grouped-query attention, one window for all layers or none, SwiGLU.

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

# A configuration that says null has no window; one that says nothing has this.
DEFAULTS = {"sliding_window": 4096, "num_key_value_heads": 8}


def build(config: Config, ctx: BuildContext) -> CausalLM:
    """A Mistral whose weights are still to be loaded."""
    fields = ConfigFields({**DEFAULTS, **config})
    fields.require("hidden_act", "silu", ("silu",))
    head_dim = head_dim_of(fields)
    rope = rotary_spec(fields, head_dim)
    spec = decoder_spec(fields, context_len_of(fields, rope))
    rotary = RotaryEmbedding(ctx, rope, spec.max_model_len)
    ff_size = fields.integer("intermediate_size")
    geometry = attention_spec(fields, head_dim, fields.optional_integer("sliding_window"))
    attention = SelfAttentionSpec(spec.hidden_size, geometry, spec.norm)

    def layer(index: int) -> DecoderLayer:
        attend = SelfAttention(ctx, attention, rotary, index, names=ATTENTION_NAMES)
        mlp = GatedMLP(ctx, spec.hidden_size, ff_size, "silu_mul", names=MLP_NAMES)
        return DecoderLayer(ctx, spec, attend, mlp, names=LAYER_NAMES)

    layers = [layer(index) for index in range(fields.integer("num_hidden_layers"))]
    return Decoder(ctx, spec, layers, names=DECODER_NAMES)
