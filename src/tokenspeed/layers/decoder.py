# SPDX-License-Identifier: Apache-2.0
"""The decoder that most families are: embedding, layers of attention and feed-forward, a norm, a head.

Knows how the parts join and which parts a family may leave out. Does not know configurations, and is told the names of
checkpoint tensors as data. Dimensions as in tokenspeed.layers.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from tokenspeed.layers.attention import Attention, AttentionSpec, KvSpec
from tokenspeed.layers.build import BuildContext
from tokenspeed.layers.embedding import Embedding, LmHead
from tokenspeed.layers.forward_batch import ForwardBatch
from tokenspeed.layers.linear import FusedLinear, Linear
from tokenspeed.layers.norm import RMSNorm
from tokenspeed.layers.rotary import RotaryEmbedding
from tokenspeed.layers.weight_map import Names, WeightEntry, WeightMap, linear_slots, part_slots, slot, under


class QkNorm(enum.Enum):
    """Over what q and k are normalised before they turn."""

    NONE = "nothing"
    HEAD = "each head"
    WHOLE = "the whole projection"


@dataclass(frozen=True, slots=True)
class NormSpec:
    """eps and weight_offset of every norm of a model, see layers.norm."""

    eps: float
    weight_offset: float = 0.0


@dataclass(frozen=True, slots=True)
class SelfAttentionSpec:
    """Attention between its two projections. norm: of q and k, where qk_norm asks for one."""

    hidden_size: int
    attention: AttentionSpec
    norm: NormSpec
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: QkNorm = QkNorm.NONE


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """What the layers have in common, and what stands around them. tied: the head shares the embedding's matrix.
    embed_scale multiplies embeddings; logit_soft_cap bounds logits smoothly."""

    vocab_size: int
    hidden_size: int
    max_model_len: int
    norm: NormSpec
    tied: bool
    embed_scale: float | None = None
    logit_soft_cap: float | None = None


@dataclass(frozen=True, slots=True)
class AttentionNames:
    """Module names within attention, and the tensor name of its sinks. qkv: of q, k and v, or of the three as one."""

    qkv: Names
    out: str
    q_norm: str
    k_norm: str
    sinks: str


@dataclass(frozen=True, slots=True)
class LayerNames:
    """Module names within a layer; attention and mlp: any of these. A norm without a name does not exist: those before
    a branch read the residual stream, those after close the branch before it joins the stream."""

    attention: Names
    mlp: Names
    before_attention: str | None
    before_mlp: str | None
    after_attention: str | None = None
    after_mlp: str | None = None


@dataclass(frozen=True, slots=True)
class DecoderNames:
    """Module names around the layers; layer has {} for its number. ignored: as in WeightMap."""

    embed: str
    layer: str
    norm: str
    head: str
    ignored: Names = ()


class AttentionBlock(Protocol):
    """What a layer attends with: a torch module from (T, D) to (T, D). kv: what it keeps in the cache."""

    kv: KvSpec

    def __call__(self, x_TD: torch.Tensor, batch: ForwardBatch) -> torch.Tensor: ...

    def weight_slots(self) -> Sequence[WeightEntry]:
        """Names relative to the block."""
        ...


class MlpBlock(Protocol):
    """What follows attention in a layer: a torch module from (T, D) to (T, D), each token alone."""

    def __call__(self, x_TD: torch.Tensor) -> torch.Tensor: ...

    def weight_slots(self) -> Sequence[WeightEntry]:
        """Names relative to the block."""
        ...


class SelfAttention(nn.Module):
    """An AttentionBlock: projections of grouped heads, rotary positions (None for a layer without), attention."""

    def __init__(
        self,
        ctx: BuildContext,
        spec: SelfAttentionSpec,
        rotary: RotaryEmbedding | None,
        layer_index: int,
        *,
        names: AttentionNames,
    ) -> None:
        super().__init__()
        self.spec, self.names = spec, names
        self.kv = spec.attention.kv
        q_size, kv_size = spec.attention.q_size, spec.attention.kv_size
        self.qkv = FusedLinear(ctx, spec.hidden_size, {"q": q_size, "k": kv_size, "v": kv_size}, spec.qkv_bias)
        self.q_norm, self.k_norm = (_qk_norm(ctx, spec, size) for size in (q_size, kv_size))
        self.rotary = rotary
        self.attention = Attention(ctx, spec.attention, layer_index)
        self.out = Linear(ctx, q_size, spec.hidden_size, spec.out_bias)

    def forward(self, x_TD: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        q_THK, k_TGK, v_TGK = self.attention.split(self.qkv(x_TD))
        q_THK, k_TGK = self._normalised(self.q_norm, q_THK), self._normalised(self.k_norm, k_TGK)
        if self.rotary is not None:
            self.rotary(q_THK, k_TGK, batch)
        return self.out(self.attention(q_THK, k_TGK, v_TGK, batch))  # type: ignore[no-any-return]

    def weight_slots(self) -> list[WeightEntry]:
        names = self.names
        entries: list[WeightEntry] = []
        if len(names.qkv) == 1:
            entries += linear_slots(names.qkv[0], self.qkv)
        else:
            for name, part in zip(names.qkv, ("q", "k", "v"), strict=True):
                entries += part_slots(name, self.qkv, part)
        entries += linear_slots(names.out, self.out)
        if self.q_norm is not None and self.k_norm is not None:
            entries.append(slot(f"{names.q_norm}.weight", self.q_norm.weight))
            entries.append(slot(f"{names.k_norm}.weight", self.k_norm.weight))
        if self.attention.sinks is not None:
            entries.append(slot(names.sinks, self.attention.sinks))
        return entries

    def _normalised(self, norm: RMSNorm | None, x_THK: torch.Tensor) -> torch.Tensor:
        if norm is None:
            return x_THK
        if self.spec.qk_norm is QkNorm.WHOLE:
            return norm(x_THK.flatten(1)).view(x_THK.shape)  # type: ignore[no-any-return]
        return norm(x_THK)  # type: ignore[no-any-return]


class DecoderLayer(nn.Module):
    """Attention, then feed-forward. The residual stream travels beside the branch: additions fuse into norms."""

    def __init__(
        self, ctx: BuildContext, spec: DecoderSpec, attention: AttentionBlock, mlp: MlpBlock, *, names: LayerNames
    ) -> None:
        super().__init__()
        self.names = names
        self.before_attention = _norm_named(ctx, spec, names.before_attention)
        self.attention = attention
        self.after_attention = _norm_named(ctx, spec, names.after_attention)
        self.before_mlp = _norm_named(ctx, spec, names.before_mlp)
        self.mlp = mlp
        self.after_mlp = _norm_named(ctx, spec, names.after_mlp)

    def forward(
        self, x_TD: torch.Tensor, residual_TD: torch.Tensor | None, batch: ForwardBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x_TD is the branch that ended last and residual_TD the stream before it, None for the first layer."""
        x_TD, residual_TD = _joined(self.before_attention, x_TD, residual_TD)
        x_TD = _closed(self.after_attention, self.attention(x_TD, batch))
        x_TD, residual_TD = _joined(self.before_mlp, x_TD, residual_TD)
        return _closed(self.after_mlp, self.mlp(x_TD)), residual_TD

    def weight_slots(self) -> list[WeightEntry]:
        """Names relative to the layer."""
        names = self.names
        norms = (
            (names.before_attention, self.before_attention),
            (names.after_attention, self.after_attention),
            (names.before_mlp, self.before_mlp),
            (names.after_mlp, self.after_mlp),
        )
        entries: list[WeightEntry] = [slot(f"{name}.weight", norm.weight) for name, norm in norms if norm is not None]
        entries += under(names.attention, self.attention.weight_slots())
        return entries + under(names.mlp, self.mlp.weight_slots())


class Decoder(nn.Module):
    """A whole model, see models.CausalLM."""

    def __init__(
        self, ctx: BuildContext, spec: DecoderSpec, layers: Sequence[DecoderLayer], *, names: DecoderNames
    ) -> None:
        super().__init__()
        self.spec, self.names = spec, names
        self.vocab_size, self.max_model_len = spec.vocab_size, spec.max_model_len
        self.embed = Embedding(ctx, spec.vocab_size, spec.hidden_size, spec.embed_scale)
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(ctx, spec.hidden_size, spec.norm.eps, spec.norm.weight_offset)
        self.head = LmHead(ctx, spec.vocab_size, spec.hidden_size, self.embed if spec.tied else None)
        self.kv_specs = tuple(layer.attention.kv for layer in layers)

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        x_TD, residual_TD = self.embed(batch.token_ids_T), None
        for layer in self.layers:
            x_TD, residual_TD = layer(x_TD, residual_TD, batch)
        return self.norm.add(x_TD, residual_TD)[0]

    def compute_logits(self, hidden_SD: torch.Tensor) -> torch.Tensor:
        logits_SV: torch.Tensor = self.head(hidden_SD)
        soft_cap = self.spec.logit_soft_cap
        return logits_SV if soft_cap is None else soft_cap * torch.tanh(logits_SV / soft_cap)

    def weight_map(self) -> WeightMap:
        names = self.names
        entries: list[WeightEntry] = [
            slot(f"{names.embed}.weight", self.embed.weight),
            slot(f"{names.norm}.weight", self.norm.weight),
        ]
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            entries += under(names.layer.format(index), layer.weight_slots())
        head = f"{names.head}.weight"
        if self.spec.tied:
            return WeightMap(tuple(entries), (*names.ignored, head))
        return WeightMap((*entries, slot(head, self.head.weight)), names.ignored)


def _qk_norm(ctx: BuildContext, spec: SelfAttentionSpec, size: int) -> RMSNorm | None:
    if spec.qk_norm is QkNorm.NONE:
        return None
    size = size if spec.qk_norm is QkNorm.WHOLE else spec.attention.kv.head_dim
    return RMSNorm(ctx, size, spec.norm.eps, spec.norm.weight_offset)


def _norm_named(ctx: BuildContext, spec: DecoderSpec, name: str | None) -> RMSNorm | None:
    return None if name is None else RMSNorm(ctx, spec.hidden_size, spec.norm.eps, spec.norm.weight_offset)


def _joined(
    norm: RMSNorm | None, x_TD: torch.Tensor, residual_TD: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(what the next branch reads, the stream with the last branch added)."""
    if norm is not None:
        return norm.add(x_TD, residual_TD)
    stream_TD = x_TD if residual_TD is None else residual_TD + x_TD
    return stream_TD, stream_TD


def _closed(norm: RMSNorm | None, x_TD: torch.Tensor) -> torch.Tensor:
    return x_TD if norm is None else norm(x_TD)
