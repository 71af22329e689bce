# SPDX-License-Identifier: Apache-2.0
"""Phi-3 (arXiv:2404.14219) and Phi-4: pre-norm decoder whose checkpoints store q, k and v as one tensor and gate and up
as another, one window for all layers or none, part of a head may turn.

Knows no other family. Does not have the two sets of frequencies (longrope) with which some of these are stretched.
"""

from __future__ import annotations

import dataclasses

from tokenspeed.layers.activation import GatedMLP
from tokenspeed.layers.build import BuildContext
from tokenspeed.layers.decoder import Decoder, DecoderLayer, SelfAttention, SelfAttentionSpec
from tokenspeed.layers.rotary import RotaryEmbedding
from tokenspeed.models import (
    ATTENTION_NAMES,
    DECODER_NAMES,
    LAYER_NAMES,
    CausalLM,
    Config,
    ConfigFields,
    attention_spec,
    decoder_spec,
    head_dim_of,
    rotary_spec,
)

ATTENTION = dataclasses.replace(ATTENTION_NAMES, qkv=("qkv_proj",))
MLP = ("gate_up_proj", "down_proj")


def build(config: Config, ctx: BuildContext) -> CausalLM:
    """A Phi-3 whose weights are still to be loaded."""
    fields = ConfigFields(config)
    fields.require("hidden_act", "silu", ("silu",))
    # Older files call longrope "su" or "yarn": only what is not stretched can be told apart.
    rope = ConfigFields(fields.section("rope_parameters") or fields.section("rope_scaling"))
    rope.require("rope_type", rope.text("type", "default"), ("default",))
    spec = decoder_spec(fields, fields.integer("max_position_embeddings", 4096), eps=1e-5)
    rotary = RotaryEmbedding(ctx, rotary_spec(fields, head_dim_of(fields)), spec.max_model_len)
    geometry = attention_spec(fields, head_dim_of(fields), fields.optional_integer("sliding_window"))
    attention = SelfAttentionSpec(spec.hidden_size, geometry, spec.norm)
    ff_size = fields.integer("intermediate_size")

    def layer(index: int) -> DecoderLayer:
        attend = SelfAttention(ctx, attention, rotary, index, names=ATTENTION)
        mlp = GatedMLP(ctx, spec.hidden_size, ff_size, "silu_mul", names=MLP)
        return DecoderLayer(ctx, spec, attend, mlp, names=LAYER_NAMES)

    layers = [layer(index) for index in range(fields.integer("num_hidden_layers"))]
    return Decoder(ctx, spec, layers, names=DECODER_NAMES)
