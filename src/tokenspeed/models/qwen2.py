# SPDX-License-Identifier: Apache-2.0
"""Qwen2 (arXiv:2407.10671) and Qwen2.5: pre-norm decoder, biases on q, k and v only, optional windows on upper layers.

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
    window_layers,
)


def build(config: Config, ctx: BuildContext) -> CausalLM:
    """A Qwen2 whose weights are still to be loaded."""
    fields = ConfigFields(config)
    fields.require("hidden_act", "silu", ("silu",))
    head_dim = head_dim_of(fields)
    rope = rotary_spec(fields, head_dim)
    spec = decoder_spec(fields, context_len_of(fields, rope))
    rotary = RotaryEmbedding(ctx, rope, spec.max_model_len)
    ff_size = fields.integer("intermediate_size")

    def layer(index: int, window: int | None) -> DecoderLayer:
        geometry = attention_spec(fields, head_dim, window)
        attention = SelfAttentionSpec(spec.hidden_size, geometry, spec.norm, qkv_bias=True)
        attend = SelfAttention(ctx, attention, rotary, index, names=ATTENTION_NAMES)
        mlp = GatedMLP(ctx, spec.hidden_size, ff_size, "silu_mul", names=MLP_NAMES)
        return DecoderLayer(ctx, spec, attend, mlp, names=LAYER_NAMES)

    layers = [layer(index, window) for index, window in enumerate(window_layers(fields))]
    return Decoder(ctx, spec, layers, names=DECODER_NAMES)
