# SPDX-License-Identifier: Apache-2.0
"""SmolLM3: pre-norm decoder in which some layers have no rotary positions (NoPE, arXiv:2305.19466), tied head.

Knows no other family.
"""

from __future__ import annotations

from tokenspeed.core.errors import CheckpointError
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
    layer_windows,
    rotary_spec,
)

DEFAULTS = {"rope_theta": 2_000_000.0, "tie_word_embeddings": True, "num_key_value_heads": 4}


def build(config: Config, ctx: BuildContext) -> CausalLM:
    """A SmolLM3 whose weights are still to be loaded."""
    fields = ConfigFields({**DEFAULTS, **config})
    fields.require("hidden_act", "silu", ("silu",))
    head_dim = head_dim_of(fields)
    rope = rotary_spec(fields, head_dim)
    spec = decoder_spec(fields, context_len_of(fields, rope))
    rotary = RotaryEmbedding(ctx, rope, spec.max_model_len)
    bias, mlp_bias = fields.flag("attention_bias", False), fields.flag("mlp_bias", False)
    ff_size = fields.integer("intermediate_size")

    def layer(index: int, turns: bool, window: int | None) -> DecoderLayer:
        attention = SelfAttentionSpec(
            spec.hidden_size, attention_spec(fields, head_dim, window), spec.norm, qkv_bias=bias, out_bias=bias
        )
        attend = SelfAttention(ctx, attention, rotary if turns else None, index, names=ATTENTION_NAMES)
        mlp = GatedMLP(ctx, spec.hidden_size, ff_size, "silu_mul", mlp_bias, names=MLP_NAMES)
        return DecoderLayer(ctx, spec, attend, mlp, names=LAYER_NAMES)

    turning = _turning_layers(fields)
    layers = [layer(index, *kind) for index, kind in enumerate(zip(turning, _windows(fields, turning), strict=True))]
    return Decoder(ctx, spec, layers, names=DECODER_NAMES)


def _turning_layers(fields: ConfigFields) -> tuple[bool, ...]:
    """Which layers have rotary positions: those marked 1 in no_rope_layers, or all but one in every interval."""
    num_layers, interval = fields.integer("num_hidden_layers"), fields.integer("no_rope_layer_interval", 4)
    marks = fields.integers("no_rope_layers")
    if marks is None:
        return tuple((index + 1) % interval != 0 for index in range(num_layers))
    if len(marks) < num_layers:
        raise CheckpointError(f"config.json: no_rope_layers has {len(marks)} entries for {num_layers} layers")
    return tuple(mark != 0 for mark in marks[:num_layers])


def _windows(fields: ConfigFields, turning: tuple[bool, ...]) -> tuple[int | None, ...]:
    window = fields.optional_integer("sliding_window") if fields.flag("use_sliding_window", False) else None
    default = tuple("full_attention" if turns or window is None else "sliding_attention" for turns in turning)
    return layer_windows(fields, default, window)
