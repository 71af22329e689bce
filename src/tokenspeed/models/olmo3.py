# SPDX-License-Identifier: Apache-2.0
"""Olmo 3: branches read the stream as it is and are normalised before they join it, q and k are
normalised over the whole projection, three windowed layers for each full one, which alone is stretched.

Knows no other family.
"""

from __future__ import annotations

from tokenspeed.layers.activation import GatedMLP
from tokenspeed.layers.build import BuildContext
from tokenspeed.layers.decoder import Decoder, DecoderLayer, LayerNames, QkNorm, SelfAttention, SelfAttentionSpec
from tokenspeed.layers.rotary import RotaryEmbedding, RotarySpec
from tokenspeed.models import (
    ATTENTION_NAMES,
    DECODER_NAMES,
    MLP_NAMES,
    CausalLM,
    Config,
    ConfigFields,
    attention_spec,
    context_len_of,
    decoder_spec,
    head_dim_of,
    layer_windows,
    rotary_spec,
)

FULL, SLIDING = "full_attention", "sliding_attention"
LAYER = LayerNames(
    attention=("self_attn",),
    mlp=("mlp",),
    before_attention=None,
    before_mlp=None,
    after_attention="post_attention_layernorm",
    after_mlp="post_feedforward_layernorm",
)


def build(config: Config, ctx: BuildContext) -> CausalLM:
    """An Olmo 3 whose weights are still to be loaded."""
    fields = ConfigFields({"rope_theta": 500_000.0, "sliding_window": 4096, **config})
    fields.require("hidden_act", "silu", ("silu",))
    head_dim, bias = head_dim_of(fields), fields.flag("attention_bias", False)
    full_rope, sliding_rope = _rotary_specs(fields, head_dim)
    spec = decoder_spec(fields, context_len_of(fields, full_rope), eps=1e-5)
    full, sliding = (RotaryEmbedding(ctx, rope, spec.max_model_len) for rope in (full_rope, sliding_rope))
    ff_size = fields.integer("intermediate_size")

    def layer(index: int, window: int | None) -> DecoderLayer:
        geometry = attention_spec(fields, head_dim, window)
        attention = SelfAttentionSpec(spec.hidden_size, geometry, spec.norm, bias, bias, QkNorm.WHOLE)
        rotary = full if window is None else sliding
        attend = SelfAttention(ctx, attention, rotary, index, names=ATTENTION_NAMES)
        mlp = GatedMLP(ctx, spec.hidden_size, ff_size, "silu_mul", names=MLP_NAMES)
        return DecoderLayer(ctx, spec, attend, mlp, names=LAYER)

    layers = [layer(index, window) for index, window in enumerate(_windows(fields))]
    return Decoder(ctx, spec, layers, names=DECODER_NAMES)


def _windows(fields: ConfigFields) -> tuple[int | None, ...]:
    num_layers = fields.integer("num_hidden_layers")
    default = tuple(SLIDING if (index + 1) % 4 else FULL for index in range(num_layers))
    return layer_windows(fields, default, fields.integer("sliding_window"))


def _rotary_specs(fields: ConfigFields, head_dim: int) -> tuple[RotarySpec, RotarySpec]:
    """(full, sliding). Newer files nest rope_parameters by layer type; of older ones rope_scaling is for full layers
    only."""
    nested, base = ConfigFields(fields.section("rope_parameters")), {"rope_theta": fields.number("rope_theta")}
    return (
        rotary_spec(fields, head_dim, {**base, **fields.section("rope_scaling"), **nested.section(FULL)}),
        rotary_spec(fields, head_dim, {**base, **nested.section(SLIDING)}),
    )
