# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V3 (arXiv:2412.19437), and Kimi K2 (arXiv:2507.20534), which is one of other sizes: latent attention, first
layers dense, then experts beside one that all tokens share, chosen by sigmoid scores and a correction within the best
groups. The layers that predict further tokens are not read.

Knows no other family.
"""

from __future__ import annotations

import dataclasses

from tokenspeed.core.errors import UnsupportedModelError
from tokenspeed.layers.activation import GatedMLP
from tokenspeed.layers.build import BuildContext
from tokenspeed.layers.decoder import Decoder, DecoderLayer, DecoderNames, MlpBlock
from tokenspeed.layers.mla import Mla
from tokenspeed.layers.moe import GroupLimit, MoE, MoeSpec, RouterSpec, Scoring, SharedSpec
from tokenspeed.layers.rotary import RotaryEmbedding
from tokenspeed.models import (
    DECODER_NAMES,
    LAYER_NAMES,
    MLA_NAMES,
    MLP_NAMES,
    MOE_NAMES,
    CausalLM,
    Config,
    ConfigFields,
    context_len_of,
    decoder_spec,
    latent_rotary_spec,
    mla_spec,
    moe_spec,
)


def build(config: Config, ctx: BuildContext) -> CausalLM:
    """A DeepSeek-V3 whose weights are still to be loaded."""
    fields = ConfigFields(config)
    _refuse_what_is_missing(fields)
    rope = latent_rotary_spec(fields)
    spec = decoder_spec(fields, context_len_of(fields, rope))
    rotary = RotaryEmbedding(ctx, rope, spec.max_model_len)
    geometry, moe = mla_spec(fields, rope), _moe_spec(fields)
    num_dense, ff_size = fields.count("first_k_dense_replace", 3), fields.integer("intermediate_size", 18_432)

    def layer(index: int) -> DecoderLayer:
        attend = Mla(ctx, spec.hidden_size, geometry, rotary, index, names=MLA_NAMES)
        mlp: MlpBlock = (
            GatedMLP(ctx, spec.hidden_size, ff_size, "silu_mul", names=MLP_NAMES)
            if index < num_dense
            else MoE(ctx, spec.hidden_size, moe, names=MOE_NAMES)
        )
        return DecoderLayer(ctx, spec, attend, mlp, names=LAYER_NAMES)

    num_layers = fields.integer("num_hidden_layers")
    return Decoder(ctx, spec, [layer(index) for index in range(num_layers)], names=_names(fields, num_layers))


def _moe_spec(fields: ConfigFields) -> MoeSpec:
    num_experts, num_shared = fields.integer("n_routed_experts", 256), fields.count("n_shared_experts", 1)
    ff_size = fields.integer("moe_intermediate_size", 2048)
    num_groups = fields.integer("n_group", 8)
    router = RouterSpec(
        num_experts,
        fields.integer("num_experts_per_tok", 8),
        Scoring.SIGMOID,
        renormalise=fields.flag("norm_topk_prob", True),
        scale=fields.positive("routed_scaling_factor", 2.5),
        groups=GroupLimit(num_groups, fields.integer("topk_group", 4), num_best=2) if num_groups > 1 else None,
        correction=True,
    )
    shared = SharedSpec(ff_size * num_shared) if num_shared else None
    return moe_spec(router, ff_size, shared)


def _names(fields: ConfigFields, num_layers: int) -> DecoderNames:
    """A checkpoint counts the layers that predict further tokens on after the last one."""
    num_further = fields.count("num_nextn_predict_layers", fields.count("num_mtp_layers", 1))
    further = tuple(f"model.layers.{num_layers + index}.*" for index in range(num_further))
    return dataclasses.replace(DECODER_NAMES, ignored=(*DECODER_NAMES.ignored, *further))


def _refuse_what_is_missing(fields: ConfigFields) -> None:
    fields.require("hidden_act", "silu", ("silu",))
    fields.require("scoring_func", "sigmoid", ("sigmoid",))
    fields.require("topk_method", "noaux_tc", ("noaux_tc",))
    if fields.integer("moe_layer_freq", 1) != 1:
        raise UnsupportedModelError("moe_layer_freq other than 1 is not supported")
