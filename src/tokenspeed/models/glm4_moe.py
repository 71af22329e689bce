# SPDX-License-Identifier: Apache-2.0
"""GLM-4.5 and 4.6 (arXiv:2508.06471): half of each head turns, q and k may be normalised a head, the first layers are
dense, the others choose experts by sigmoid scores and a correction, within groups, beside shared experts.

Knows no other family. The layers that predict further tokens, which checkpoints carry after the last one, are not read.
"""

from __future__ import annotations

import dataclasses

from tokenspeed.layers.activation import GatedMLP
from tokenspeed.layers.build import BuildContext
from tokenspeed.layers.decoder import Decoder, DecoderLayer, QkNorm, SelfAttention, SelfAttentionSpec
from tokenspeed.layers.moe import GroupLimit, MoE, MoeSpec, RouterSpec, Scoring, SharedSpec
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
    rotary_spec,
)

DEFAULTS = {"partial_rotary_factor": 0.5, "num_key_value_heads": 8}


def build(config: Config, ctx: BuildContext) -> CausalLM:
    """A GLM-4 with experts whose weights are still to be loaded."""
    fields = ConfigFields({**DEFAULTS, **config})
    fields.require("hidden_act", "silu", ("silu",))
    head_dim = head_dim_of(fields)
    rope = rotary_spec(fields, head_dim)
    spec = decoder_spec(fields, context_len_of(fields, rope), eps=1e-5)
    rotary = RotaryEmbedding(ctx, rope, spec.max_model_len)
    attention = SelfAttentionSpec(
        spec.hidden_size,
        attention_spec(fields, head_dim),
        spec.norm,
        qkv_bias=fields.flag("attention_bias", False),
        qk_norm=QkNorm.HEAD if fields.flag("use_qk_norm", False) else QkNorm.NONE,
    )
    experts, ff_size = _moe_spec(fields), fields.integer("intermediate_size")
    num_dense, num_layers = fields.count("first_k_dense_replace", 1), fields.integer("num_hidden_layers")

    def layer(index: int) -> DecoderLayer:
        attend = SelfAttention(ctx, attention, rotary, index, names=ATTENTION_NAMES)
        mlp = (
            GatedMLP(ctx, spec.hidden_size, ff_size, "silu_mul", names=MLP_NAMES)
            if index < num_dense
            else MoE(ctx, spec.hidden_size, experts, names=MOE_NAMES)
        )
        return DecoderLayer(ctx, spec, attend, mlp, names=LAYER_NAMES)

    further = range(num_layers, num_layers + fields.count("num_nextn_predict_layers", 1))
    ignored = tuple(f"{DECODER_NAMES.layer.format(index)}.*" for index in further)
    names = dataclasses.replace(DECODER_NAMES, ignored=(*DECODER_NAMES.ignored, *ignored))
    return Decoder(ctx, spec, [layer(index) for index in range(num_layers)], names=names)


def _moe_spec(fields: ConfigFields) -> MoeSpec:
    num_groups = fields.integer("n_group", 1)
    router = RouterSpec(
        fields.integer("n_routed_experts", 128),
        fields.integer("num_experts_per_tok", 8),
        Scoring.SIGMOID,
        renormalise=fields.flag("norm_topk_prob", True),
        scale=fields.positive("routed_scaling_factor", 1.0),
        groups=GroupLimit(num_groups, fields.integer("topk_group", 1), num_best=2) if num_groups > 1 else None,
        correction=True,
    )
    ff_size = fields.integer("moe_intermediate_size")
    return moe_spec(router, ff_size, SharedSpec(ff_size * fields.integer("n_shared_experts", 1)))
