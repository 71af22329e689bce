# SPDX-License-Identifier: Apache-2.0
"""Gemma 3, text (arXiv:2503.19786): norms before and after each branch, q and k normalised a head, five windowed
layers for each full one with a rotary base of their own, scaled embeddings, norm weights stored around zero.

Knows no other family.
"""

from __future__ import annotations

from tokenspeed.core.errors import UnsupportedModelError
from tokenspeed.layers.activation import GatedMLP
from tokenspeed.layers.attention import AttentionSpec, KvSpec
from tokenspeed.layers.build import BuildContext
from tokenspeed.layers.decoder import (
    Decoder,
    DecoderLayer,
    DecoderSpec,
    LayerNames,
    NormSpec,
    QkNorm,
    SelfAttention,
    SelfAttentionSpec,
)
from tokenspeed.layers.rotary import RotaryEmbedding, RotarySpec
from tokenspeed.models import (
    ATTENTION_NAMES,
    DECODER_NAMES,
    MLP_NAMES,
    CausalLM,
    Config,
    ConfigFields,
    kv_heads_of,
    layer_windows,
    rotary_spec,
)

FULL, SLIDING = "full_attention", "sliding_attention"
NAMES = LayerNames(
    attention=("self_attn",),
    mlp=("mlp",),
    before_attention="input_layernorm",
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)


def build(config: Config, ctx: BuildContext) -> CausalLM:
    """A Gemma 3 whose weights are still to be loaded."""
    fields = ConfigFields(config)
    fields.require("hidden_activation", "gelu_pytorch_tanh", ("gelu_pytorch_tanh",))
    if fields.flag("use_bidirectional_attention", False):
        raise UnsupportedModelError("use_bidirectional_attention is not supported: this model is not a decoder")
    spec = _decoder_spec(fields)
    full, sliding = (RotaryEmbedding(ctx, rope, spec.max_model_len) for rope in _rotary_specs(fields))
    num_heads, bias = fields.integer("num_attention_heads", 8), fields.flag("attention_bias", False)
    scale = fields.number("query_pre_attn_scalar", 256) ** -0.5
    soft_cap, ff_size = fields.optional_number("attn_logit_softcapping"), fields.integer("intermediate_size")

    def layer(index: int, kv: KvSpec) -> DecoderLayer:
        geometry = AttentionSpec(num_heads, kv, scale, soft_cap)
        attention = SelfAttentionSpec(spec.hidden_size, geometry, spec.norm, bias, bias, QkNorm.HEAD)
        rotary = full if kv.window is None else sliding
        attend = SelfAttention(ctx, attention, rotary, index, names=ATTENTION_NAMES)
        mlp = GatedMLP(ctx, spec.hidden_size, ff_size, "gelu_tanh_mul", names=MLP_NAMES)
        return DecoderLayer(ctx, spec, attend, mlp, names=NAMES)

    layers = [layer(index, kv) for index, kv in enumerate(_kv_specs(fields))]
    return Decoder(ctx, spec, layers, names=DECODER_NAMES)


def _decoder_spec(fields: ConfigFields) -> DecoderSpec:
    hidden_size = fields.integer("hidden_size")
    return DecoderSpec(
        vocab_size=fields.integer("vocab_size", 262_208),
        hidden_size=hidden_size,
        max_model_len=fields.integer("max_position_embeddings", 131_072),
        norm=NormSpec(fields.positive("rms_norm_eps", 1e-6), weight_offset=1.0),
        tied=fields.flag("tie_word_embeddings", True),
        embed_scale=hidden_size**0.5,
        logit_soft_cap=fields.optional_number("final_logit_softcapping"),
    )


def _kv_specs(fields: ConfigFields) -> tuple[KvSpec, ...]:
    period = fields.integer("sliding_window_pattern", 6)
    num_layers = fields.integer("num_hidden_layers")
    default = tuple(SLIDING if (index + 1) % period else FULL for index in range(num_layers))
    windows = layer_windows(fields, default, fields.integer("sliding_window", 4096))
    num_kv_heads = kv_heads_of(fields, fields.integer("num_attention_heads", 8), 4)
    head_dim = fields.integer("head_dim", 256)
    return tuple(KvSpec(num_kv_heads, head_dim, window) for window in windows)


def _rotary_specs(fields: ConfigFields) -> tuple[RotarySpec, RotarySpec]:
    """(full, sliding). Newer files nest rope_parameters by layer type; older ones have rope_theta,
    rope_local_base_freq and a rope_scaling that is for full layers only."""
    head_dim, nested = fields.integer("head_dim", 256), ConfigFields(fields.section("rope_parameters"))
    full = {"rope_theta": fields.number("rope_theta", 1_000_000.0), **fields.section("rope_scaling")}
    sliding = {"rope_theta": fields.number("rope_local_base_freq", 10_000.0)}
    return (
        rotary_spec(fields, head_dim, {**full, **nested.section(FULL)}),
        rotary_spec(fields, head_dim, {**sliding, **nested.section(SLIDING)}),
    )
