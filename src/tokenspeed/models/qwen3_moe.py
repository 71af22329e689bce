# SPDX-License-Identifier: Apache-2.0
"""Qwen3 with experts (arXiv:2505.09388), Qwen3-Coder among them: q and k normalised a head, experts without a shared
block, dense layers among the sparse ones where a configuration says so.

Knows no other family.
"""

from __future__ import annotations

from tokenspeed.layers.activation import GatedMLP
from tokenspeed.layers.build import BuildContext
from tokenspeed.layers.decoder import Decoder, DecoderLayer, QkNorm, SelfAttention, SelfAttentionSpec
from tokenspeed.layers.moe import MoE, RouterSpec, Scoring
from tokenspeed.layers.rotary import RotaryEmbedding
from tokenspeed.models import (
    ATTENTION_NAMES,
    DECODER_NAMES,
    LAYER_NAMES,
    MLP_NAMES,
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
    sparse_layers,
)


def build(config: Config, ctx: BuildContext) -> CausalLM:
    """A Qwen3 with experts whose weights are still to be loaded."""
    fields = ConfigFields(config)
    fields.require("hidden_act", "silu", ("silu",))
    head_dim, bias = head_dim_of(fields), fields.flag("attention_bias", False)
    window = fields.optional_integer("sliding_window") if fields.flag("use_sliding_window", False) else None
    rope = rotary_spec(fields, head_dim)
    spec = decoder_spec(fields, context_len_of(fields, rope))
    rotary = RotaryEmbedding(ctx, rope, spec.max_model_len)
    geometry = attention_spec(fields, head_dim, window)
    attention = SelfAttentionSpec(spec.hidden_size, geometry, spec.norm, bias, bias, QkNorm.HEAD)
    top_k, renormalise = fields.integer("num_experts_per_tok", 8), fields.flag("norm_topk_prob", False)
    router = RouterSpec(num_experts_of(fields), top_k, Scoring.SOFTMAX, renormalise)
    experts, ff_size = moe_spec(router, fields.integer("moe_intermediate_size")), fields.integer("intermediate_size")

    def layer(index: int, sparse: bool) -> DecoderLayer:
        attend = SelfAttention(ctx, attention, rotary, index, names=ATTENTION_NAMES)
        mlp = (
            MoE(ctx, spec.hidden_size, experts, names=MOE_NAMES)
            if sparse
            else GatedMLP(ctx, spec.hidden_size, ff_size, "silu_mul", names=MLP_NAMES)
        )
        return DecoderLayer(ctx, spec, attend, mlp, names=LAYER_NAMES)

    layers = [layer(index, sparse) for index, sparse in enumerate(sparse_layers(fields))]
    return Decoder(ctx, spec, layers, names=DECODER_NAMES)
