# SPDX-License-Identifier: Apache-2.0
"""Gemma 3, text (arXiv:2503.19786): norms before and after each branch, q and k normalised a head, five windowed
layers for each full one with a rotary base of their own, scaled embeddings, norm weights stored around zero.

Dimensions as in tokenspeed.layers. Knows no other family.
"""

from __future__ import annotations

import torch
from torch import nn

from tokenspeed.core.errors import UnsupportedModelError
from tokenspeed.layers.activation import GatedMLP
from tokenspeed.layers.attention import Attention, AttentionSpec, KvSpec
from tokenspeed.layers.build import BuildContext
from tokenspeed.layers.embedding import Embedding, LmHead
from tokenspeed.layers.forward_batch import ForwardBatch
from tokenspeed.layers.linear import FusedLinear, Linear
from tokenspeed.layers.norm import RMSNorm
from tokenspeed.layers.rotary import RotaryEmbedding, RotarySpec
from tokenspeed.models import (
    CausalLM,
    Config,
    ConfigFields,
    WeightMap,
    WeightSlot,
    layer_windows,
    linear_slots,
    part_slots,
    rotary_spec,
    slot,
)

FULL, SLIDING = "full_attention", "sliding_attention"


class Gemma3TextLayer(nn.Module):
    """One decoder layer. The sandwich norms close each branch before it joins the residual stream."""

    def __init__(
        self, ctx: BuildContext, fields: ConfigFields, rotary: RotaryEmbedding, kv: tuple[int, KvSpec]
    ) -> None:
        super().__init__()
        hidden_size, eps = fields.integer("hidden_size"), fields.number("rms_norm_eps", 1e-6)
        bias = fields.flag("attention_bias", False)
        index, kv_spec = kv
        scale = fields.number("query_pre_attn_scalar", 256) ** -0.5
        soft_cap = fields.optional_number("attn_logit_softcapping")
        spec = AttentionSpec(fields.integer("num_attention_heads", 8), kv_spec, scale, soft_cap)
        self.input_norm = RMSNorm(ctx, hidden_size, eps, weight_offset=1.0)
        self.qkv = FusedLinear(ctx, hidden_size, {"q": spec.q_size, "k": spec.kv_size, "v": spec.kv_size}, bias)
        self.q_norm = RMSNorm(ctx, kv_spec.head_dim, eps, weight_offset=1.0)
        self.k_norm = RMSNorm(ctx, kv_spec.head_dim, eps, weight_offset=1.0)
        self.rotary = rotary
        self.attention = Attention(ctx, spec, index)
        self.out = Linear(ctx, spec.q_size, hidden_size, bias)
        self.post_attention_norm = RMSNorm(ctx, hidden_size, eps, weight_offset=1.0)
        self.pre_mlp_norm = RMSNorm(ctx, hidden_size, eps, weight_offset=1.0)
        self.mlp = GatedMLP(ctx, hidden_size, fields.integer("intermediate_size"), "gelu_tanh_mul")
        self.post_mlp_norm = RMSNorm(ctx, hidden_size, eps, weight_offset=1.0)

    def forward(
        self, x_TD: torch.Tensor, residual_TD: torch.Tensor | None, batch: ForwardBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x_TD, residual_TD = self.input_norm.add(x_TD, residual_TD)
        q_THK, k_TGK, v_TGK = self.attention.split(self.qkv(x_TD))
        q_THK, k_TGK = self.q_norm(q_THK), self.k_norm(k_TGK)
        self.rotary(q_THK, k_TGK, batch)
        x_TD = self.post_attention_norm(self.out(self.attention(q_THK, k_TGK, v_TGK, batch)))
        x_TD, residual_TD = self.pre_mlp_norm.add(x_TD, residual_TD)
        return self.post_mlp_norm(self.mlp(x_TD)), residual_TD

    def weight_slots(self, prefix: str) -> list[WeightSlot]:
        slots = [
            slot(f"{prefix}.input_layernorm.weight", self.input_norm.weight),
            slot(f"{prefix}.self_attn.q_norm.weight", self.q_norm.weight),
            slot(f"{prefix}.self_attn.k_norm.weight", self.k_norm.weight),
            slot(f"{prefix}.post_attention_layernorm.weight", self.post_attention_norm.weight),
            slot(f"{prefix}.pre_feedforward_layernorm.weight", self.pre_mlp_norm.weight),
            slot(f"{prefix}.post_feedforward_layernorm.weight", self.post_mlp_norm.weight),
        ]
        for part in ("q", "k", "v"):
            slots += part_slots(f"{prefix}.self_attn.{part}_proj", self.qkv, part)
        slots += linear_slots(f"{prefix}.self_attn.o_proj", self.out)
        for part in ("gate", "up"):
            slots += part_slots(f"{prefix}.mlp.{part}_proj", self.mlp.gate_up, part)
        return slots + linear_slots(f"{prefix}.mlp.down_proj", self.mlp.down)


class Gemma3Text(nn.Module):
    """See models.CausalLM."""

    def __init__(self, config: Config, ctx: BuildContext) -> None:
        super().__init__()
        fields = ConfigFields(config)
        fields.require("hidden_activation", "gelu_pytorch_tanh", ("gelu_pytorch_tanh",))
        if fields.flag("use_bidirectional_attention", False):
            raise UnsupportedModelError("use_bidirectional_attention is not supported: this model is not a decoder")
        hidden_size, self.vocab_size = fields.integer("hidden_size"), fields.integer("vocab_size", 262_208)
        self.max_model_len = fields.integer("max_position_embeddings", 131_072)
        self.tied = fields.flag("tie_word_embeddings", True)
        self.soft_cap = fields.optional_number("final_logit_softcapping")
        self.embed = Embedding(ctx, self.vocab_size, hidden_size, scale=hidden_size**0.5)
        self.kv_specs = _kv_specs(fields)
        full, sliding = (RotaryEmbedding(ctx, spec, self.max_model_len) for spec in _rotary_specs(fields))
        layers = [
            Gemma3TextLayer(ctx, fields, full if kv.window is None else sliding, (index, kv))
            for index, kv in enumerate(self.kv_specs)
        ]
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(ctx, hidden_size, fields.number("rms_norm_eps", 1e-6), weight_offset=1.0)
        self.head = LmHead(ctx, self.vocab_size, hidden_size, self.embed if self.tied else None)

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        x_TD, residual_TD = self.embed(batch.token_ids_T), None
        for layer in self.layers:
            x_TD, residual_TD = layer(x_TD, residual_TD, batch)
        return self.norm.add(x_TD, residual_TD)[0]

    def compute_logits(self, hidden_SD: torch.Tensor) -> torch.Tensor:
        logits_SV: torch.Tensor = self.head(hidden_SD)
        return logits_SV if self.soft_cap is None else self.soft_cap * torch.tanh(logits_SV / self.soft_cap)

    def weight_map(self) -> WeightMap:
        slots = [slot("model.embed_tokens.weight", self.embed.weight), slot("model.norm.weight", self.norm.weight)]
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, Gemma3TextLayer)
            slots += layer.weight_slots(f"model.layers.{index}")
        if self.tied:
            return WeightMap(tuple(slots), ("lm_head.weight",))
        return WeightMap((*slots, slot("lm_head.weight", self.head.weight)), ())


def build(config: Config, ctx: BuildContext) -> CausalLM:
    """A Gemma 3 whose weights are still to be loaded."""
    return Gemma3Text(config, ctx)


def _kv_specs(fields: ConfigFields) -> tuple[KvSpec, ...]:
    period = fields.integer("sliding_window_pattern", 6)
    num_layers = fields.integer("num_hidden_layers")
    default = tuple(SLIDING if (index + 1) % period else FULL for index in range(num_layers))
    windows = layer_windows(fields, default, fields.integer("sliding_window", 4096))
    num_kv_heads, head_dim = fields.integer("num_key_value_heads", 4), fields.integer("head_dim", 256)
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
