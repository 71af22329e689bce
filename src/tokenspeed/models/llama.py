# SPDX-License-Identifier: Apache-2.0
"""Llama (arXiv:2302.13971 and later): pre-norm decoder, grouped-query attention, rotary positions, SwiGLU.

Dimensions as in tokenspeed.layers. Knows no other family.
"""

from __future__ import annotations

import torch
from torch import nn

from tokenspeed.layers.activation import GatedMLP
from tokenspeed.layers.attention import Attention, AttentionSpec, KvSpec
from tokenspeed.layers.build import BuildContext
from tokenspeed.layers.embedding import Embedding, LmHead
from tokenspeed.layers.forward_batch import ForwardBatch
from tokenspeed.layers.linear import FusedLinear, Linear
from tokenspeed.layers.norm import RMSNorm
from tokenspeed.layers.rotary import RotaryEmbedding
from tokenspeed.models import (
    CausalLM,
    Config,
    ConfigFields,
    WeightMap,
    WeightSlot,
    context_len_of,
    head_dim_of,
    linear_slots,
    part_slots,
    rotary_spec,
    slot,
)


class LlamaLayer(nn.Module):
    """One decoder layer. The residual stream travels beside the branch so that additions fuse into norms."""

    def __init__(self, ctx: BuildContext, fields: ConfigFields, rotary: RotaryEmbedding, index: int) -> None:
        super().__init__()
        hidden_size, eps = fields.integer("hidden_size"), fields.number("rms_norm_eps", 1e-6)
        bias, head_dim = fields.flag("attention_bias", False), head_dim_of(fields)
        num_heads = fields.integer("num_attention_heads")
        kv = KvSpec(fields.integer("num_key_value_heads", num_heads), head_dim)
        spec = AttentionSpec(num_heads, kv, scale=head_dim**-0.5)
        self.input_norm = RMSNorm(ctx, hidden_size, eps)
        self.qkv = FusedLinear(ctx, hidden_size, {"q": spec.q_size, "k": spec.kv_size, "v": spec.kv_size}, bias)
        self.rotary = rotary
        self.attention = Attention(ctx, spec, index)
        self.out = Linear(ctx, spec.q_size, hidden_size, bias)
        self.post_norm = RMSNorm(ctx, hidden_size, eps)
        ff_size, mlp_bias = fields.integer("intermediate_size"), fields.flag("mlp_bias", False)
        self.mlp = GatedMLP(ctx, hidden_size, ff_size, "silu_mul", mlp_bias)

    def forward(
        self, x_TD: torch.Tensor, residual_TD: torch.Tensor | None, batch: ForwardBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x_TD, residual_TD = self.input_norm.add(x_TD, residual_TD)
        q_THK, k_TGK, v_TGK = self.attention.split(self.qkv(x_TD))
        self.rotary(q_THK, k_TGK, batch)
        x_TD = self.out(self.attention(q_THK, k_TGK, v_TGK, batch))
        x_TD, residual_TD = self.post_norm.add(x_TD, residual_TD)
        return self.mlp(x_TD), residual_TD

    def weight_slots(self, prefix: str) -> list[WeightSlot]:
        slots = [
            slot(f"{prefix}.input_layernorm.weight", self.input_norm.weight),
            slot(f"{prefix}.post_attention_layernorm.weight", self.post_norm.weight),
        ]
        for part in ("q", "k", "v"):
            slots += part_slots(f"{prefix}.self_attn.{part}_proj", self.qkv, part)
        slots += linear_slots(f"{prefix}.self_attn.o_proj", self.out)
        for part in ("gate", "up"):
            slots += part_slots(f"{prefix}.mlp.{part}_proj", self.mlp.gate_up, part)
        return slots + linear_slots(f"{prefix}.mlp.down_proj", self.mlp.down)


class Llama(nn.Module):
    """See models.CausalLM."""

    def __init__(self, config: Config, ctx: BuildContext) -> None:
        super().__init__()
        fields = ConfigFields(config)
        fields.require("hidden_act", "silu", ("silu",))
        hidden_size, self.vocab_size = fields.integer("hidden_size"), fields.integer("vocab_size")
        rope = rotary_spec(fields, head_dim_of(fields))
        self.max_model_len = context_len_of(fields, rope)
        self.tied = fields.flag("tie_word_embeddings", False)
        self.embed = Embedding(ctx, self.vocab_size, hidden_size)
        rotary = RotaryEmbedding(ctx, rope, self.max_model_len)
        num_layers = fields.integer("num_hidden_layers")
        layers = [LlamaLayer(ctx, fields, rotary, index) for index in range(num_layers)]
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(ctx, hidden_size, fields.number("rms_norm_eps", 1e-6))
        self.head = LmHead(ctx, self.vocab_size, hidden_size, self.embed if self.tied else None)
        self.kv_specs = tuple(layer.attention.spec.kv for layer in layers)

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        x_TD, residual_TD = self.embed(batch.token_ids_T), None
        for layer in self.layers:
            x_TD, residual_TD = layer(x_TD, residual_TD, batch)
        return self.norm.add(x_TD, residual_TD)[0]

    def compute_logits(self, hidden_SD: torch.Tensor) -> torch.Tensor:
        logits_SV: torch.Tensor = self.head(hidden_SD)
        return logits_SV

    def weight_map(self) -> WeightMap:
        slots = [slot("model.embed_tokens.weight", self.embed.weight), slot("model.norm.weight", self.norm.weight)]
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, LlamaLayer)
            slots += layer.weight_slots(f"model.layers.{index}")
        ignored = ["*.rotary_emb.inv_freq"]
        if self.tied:
            ignored.append("lm_head.weight")
        else:
            slots.append(slot("lm_head.weight", self.head.weight))
        return WeightMap(tuple(slots), tuple(ignored))


def build(config: Config, ctx: BuildContext) -> CausalLM:
    """A Llama whose weights are still to be loaded."""
    return Llama(config, ctx)
