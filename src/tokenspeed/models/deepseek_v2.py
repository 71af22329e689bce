# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V2 (arXiv:2405.04434): latent attention, first layers dense, then experts beside ones that all tokens
share, chosen by softmax within the best groups.

Knows no other family.
"""

from __future__ import annotations

from tokenspeed.core.errors import UnsupportedModelError
from tokenspeed.layers.activation import GatedMLP
from tokenspeed.layers.build import BuildContext
from tokenspeed.layers.decoder import Decoder, DecoderLayer, MlpBlock
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

GREEDY, GROUP_LIMITED = "greedy", "group_limited_greedy"


def build(config: Config, ctx: BuildContext) -> CausalLM:
    """A DeepSeek-V2 whose weights are still to be loaded."""
    fields = ConfigFields(config)
    _refuse_what_is_missing(fields)
    rope = latent_rotary_spec(fields)
    spec = decoder_spec(fields, context_len_of(fields, rope))
    rotary = RotaryEmbedding(ctx, rope, spec.max_model_len)
    geometry, moe = mla_spec(fields, rope), _moe_spec(fields)
    num_dense, ff_size = fields.count("first_k_dense_replace", 0), fields.integer("intermediate_size", 11_008)

    def layer(index: int) -> DecoderLayer:
        attend = Mla(ctx, spec.hidden_size, geometry, rotary, index, names=MLA_NAMES)
        mlp: MlpBlock = (
            GatedMLP(ctx, spec.hidden_size, ff_size, "silu_mul", names=MLP_NAMES)
            if index < num_dense
            else MoE(ctx, spec.hidden_size, moe, names=MOE_NAMES)
        )
        return DecoderLayer(ctx, spec, attend, mlp, names=LAYER_NAMES)

    return Decoder(ctx, spec, [layer(i) for i in range(fields.integer("num_hidden_layers"))], names=DECODER_NAMES)


def _moe_spec(fields: ConfigFields) -> MoeSpec:
    num_experts, num_shared = fields.integer("n_routed_experts", 64), fields.count("n_shared_experts", 2)
    ff_size = fields.integer("moe_intermediate_size", 1407)
    groups = None
    if fields.require("topk_method", GREEDY, (GREEDY, GROUP_LIMITED)) == GROUP_LIMITED:
        groups = GroupLimit(fields.integer("n_group"), fields.integer("topk_group"), num_best=1)
    router = RouterSpec(
        num_experts,
        fields.integer("num_experts_per_tok"),
        Scoring.SOFTMAX,
        scale=fields.positive("routed_scaling_factor", 1.0),
        groups=groups,
    )
    shared = SharedSpec(ff_size * num_shared) if num_shared else None
    return moe_spec(router, ff_size, shared)


def _refuse_what_is_missing(fields: ConfigFields) -> None:
    fields.require("hidden_act", "silu", ("silu",))
    fields.require("scoring_func", "softmax", ("softmax",))
    for name in ("norm_topk_prob", "mlp_bias"):
        if fields.flag(name, False):
            raise UnsupportedModelError(f"{name} is not supported for this family")
    if fields.integer("moe_layer_freq", 1) != 1:
        raise UnsupportedModelError("moe_layer_freq other than 1 is not supported")
