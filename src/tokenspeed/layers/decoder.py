# SPDX-License-Identifier: Apache-2.0
"""The decoder that most families are: embedding, layers of attention and feed-forward, a norm, a head.

Knows how the parts join, as ops of one graph, and which parts a family may leave out. Does not know configurations, and
is told the names of checkpoint tensors as data. Dimensions as in tokenspeed.layers.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from tokenspeed.kernels.ops.decode_step import DenseLayer, DenseModel, PackedWeight
from tokenspeed.layers.activation import GatedMLP
from tokenspeed.layers.attention import Attention, AttentionSpec, HeadNorms, KvSpec, from_heads, heads, kv_heads
from tokenspeed.layers.build import BuildContext
from tokenspeed.layers.embedding import Embedding, LmHead
from tokenspeed.layers.forward_batch import ForwardBatch, KvLayer
from tokenspeed.layers.linear import FusedLinear, Linear
from tokenspeed.layers.matrix import Matrix
from tokenspeed.layers.norm import RMSNorm
from tokenspeed.layers.rotary import RotaryEmbedding
from tokenspeed.layers.weight_map import Names, WeightEntry, WeightMap, fused_slots, linear_slots, slot, under
from tokenspeed.spmd.graph import Graph, Value
from tokenspeed.spmd.mesh import Group
from tokenspeed.spmd.shards import WHOLE, Shards
from tokenspeed.spmd.step import View

TOKEN_IDS = "token_ids"
"""The source of every decoder: (T,) int64."""


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
    """What a layer attends with: a torch module. kv: what a rank keeps in the cache."""

    kv: KvSpec

    def declare(self, graph: Graph, name: str, x: Value) -> Value:
        """The ops from hidden rows to hidden rows; their maths find a ForwardBatch in the step's context."""
        ...

    def weight_slots(self) -> Sequence[WeightEntry]:
        """Names relative to the block."""
        ...


class MlpBlock(Protocol):
    """What follows attention in a layer: a torch module."""

    def declare(self, graph: Graph, name: str, x: Value) -> Value:
        """The ops from hidden rows to hidden rows, each row alone."""
        ...

    def weight_slots(self) -> Sequence[WeightEntry]:
        """Names relative to the block."""
        ...


_Exchanging = Generator[Any, Any, torch.Tensor]


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
        head_dim, q_size, kv_size = spec.attention.kv.head_dim, spec.attention.q_size, spec.attention.kv_size
        dealt = {"q": heads(head_dim), "k": kv_heads(head_dim), "v": kv_heads(head_dim)}
        sizes = {"q": q_size, "k": kv_size, "v": kv_size}
        self.qkv = FusedLinear(ctx, spec.hidden_size, sizes, spec.qkv_bias, dealt)
        self.q_norm, self.k_norm = (_qk_norm(ctx, spec, sizes[part], dealt[part]) for part in "qk")
        self.head_norms: HeadNorms | None = None
        if spec.qk_norm is QkNorm.HEAD and self.q_norm is not None and self.k_norm is not None:
            self.head_norms = HeadNorms(self.q_norm, self.k_norm)
        self.rotary = rotary
        self.attention = Attention(ctx, spec.attention, layer_index)
        self.kv = self.attention.spec.kv
        self.out = Linear(ctx, q_size, spec.hidden_size, spec.out_bias, from_heads(head_dim))
        num_ranks = ctx.size_of(Group.ATTENTION)
        self.norms_over_ranks = spec.qk_norm is QkNorm.WHOLE and num_ranks > 1
        self.ranks_per_kv_head = max(1, num_ranks // spec.attention.kv.num_kv_heads)

    def declare(self, graph: Graph, name: str, x: Value) -> Value:
        run: Callable[..., object] = self._run_over_ranks if self.norms_over_ranks else self._run
        shared = 2 if self.spec.qk_norm is QkNorm.WHOLE else 0
        return graph.attention(name, x, width=self.spec.hidden_size, shared_widths=shared, run=run)

    def weight_slots(self) -> list[WeightEntry]:
        names = self.names
        entries: list[WeightEntry] = [*fused_slots(names.qkv, self.qkv), *linear_slots(names.out, self.out)]
        if self.q_norm is not None and self.k_norm is not None:
            entries.append(slot(f"{names.q_norm}.weight", self.q_norm.weight, self.q_norm.cut))
            entries.append(slot(f"{names.k_norm}.weight", self.k_norm.weight, self.k_norm.cut))
        if self.attention.sinks is not None:
            entries.append(slot(names.sinks, self.attention.sinks, self.attention.sinks_cut))
        return entries

    def _run(self, view: View, x_TD: torch.Tensor) -> torch.Tensor:
        q_THK, k_TGK, v_TGK = self.attention.split(self.qkv(x_TD))
        if self.spec.qk_norm is QkNorm.WHOLE:
            q_THK, k_TGK = _normalised(self.q_norm, q_THK), _normalised(self.k_norm, k_TGK)
        return self._attended(q_THK, k_TGK, v_TGK, view.context)

    def _run_over_ranks(self, view: View, x_TD: torch.Tensor) -> _Exchanging:
        """With q and k normalised over heads of which each rank has some. K/V heads that neighbours share are in the
        sum once for each of them."""
        q_THK, k_TGK, v_TGK = self.attention.split(self.qkv(x_TD))
        assert self.q_norm is not None, "no norm of q to exchange sums for"
        assert self.k_norm is not None, "no norm of k to exchange sums for"
        squares_T2 = torch.stack([x.flatten(1).float().square().sum(dim=1) for x in (q_THK, k_TGK)], dim=1)
        parts = yield view.exchange(0, [squares_T2] * view.size(Group.ATTENTION))
        sums_T2 = torch.stack(parts).sum(dim=0)
        q_TN = self.q_norm.apply_with(q_THK.flatten(1), sums_T2[:, :1])
        k_TN = self.k_norm.apply_with(k_TGK.flatten(1), sums_T2[:, 1:] / self.ranks_per_kv_head)
        return self._attended(q_TN.view(q_THK.shape), k_TN.view(k_TGK.shape), v_TGK, view.context)

    def _attended(
        self, q_THK: torch.Tensor, k_TGK: torch.Tensor, v_TGK: torch.Tensor, batch: ForwardBatch
    ) -> torch.Tensor:
        y_TN = self.attention(q_THK, k_TGK, v_TGK, batch, rotary=self.rotary, norms=self.head_norms)
        return self.out(y_TN)  # type: ignore[no-any-return]


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

    def declare(self, graph: Graph, name: str, x: Value, residual: Value | None) -> tuple[Value, Value]:
        """x: the branch that ended last. residual: the stream before it, None for the first layer."""
        x, residual = _joined(graph, f"{name}.before_attention", self.before_attention, x, residual)
        x = self.attention.declare(graph, f"{name}.attention", x)
        x = _closed(graph, f"{name}.after_attention", self.after_attention, x)
        x, residual = _joined(graph, f"{name}.before_mlp", self.before_mlp, x, residual)
        x = self.mlp.declare(graph, f"{name}.mlp", x)
        return _closed(graph, f"{name}.after_mlp", self.after_mlp, x), residual

    def dense(self, kv_layers: Sequence[KvLayer]) -> DenseLayer | str:
        """As Decoder.dense."""
        attention, mlp = self.attention, self.mlp
        if not isinstance(attention, SelfAttention) or not isinstance(mlp, GatedMLP):
            return "a layer is more than attention of grouped heads and a gated feed-forward"
        if self.before_attention is None or self.before_mlp is None:
            return "its norms stand elsewhere than before attention and feed-forward"
        spec = attention.attention.spec
        if spec.soft_cap is not None or attention.attention.sinks is not None:
            return "its attention has a soft cap or sinks"
        if attention.spec.qk_norm is QkNorm.WHOLE:
            return "its queries and keys are normalised over all heads"
        pages = kv_layers[attention.attention.layer_index]
        if pages.k.dtype not in (attention.qkv.weight.dtype, torch.bfloat16, torch.int8):
            return f"its pages keep {str(pages.k.dtype).removeprefix('torch.')}"
        rotary, q_norm, k_norm = attention.rotary, attention.q_norm, attention.k_norm
        after_attention, after_mlp = self.after_attention, self.after_mlp
        return DenseLayer(
            norm_before_attention=self.before_attention.weight,
            qkv=attention.qkv.weight,
            qkv_bias=attention.qkv.bias,
            q_norm=None if q_norm is None else q_norm.weight,
            k_norm=None if k_norm is None else k_norm.weight,
            out=attention.out.weight,
            out_bias=attention.out.bias,
            norm_before_mlp=self.before_mlp.weight,
            gate_up=mlp.gate_up.weight,
            gate_up_bias=mlp.gate_up.bias,
            down=mlp.down.weight,
            down_bias=mlp.down.bias,
            k_pages=pages.k,
            v_pages=pages.v,
            table_PR=None if rotary is None else rotary.table_PR,
            interleaved=rotary is not None and rotary.interleaved,
            group=pages.group,
            window=spec.kv.window,
            norm_after_attention=None if after_attention is None else after_attention.weight,
            norm_after_mlp=None if after_mlp is None else after_mlp.weight,
            packed=_packed(
                qkv=attention.qkv.matrix, out=attention.out.matrix, gate_up=mlp.gate_up.matrix, down=mlp.down.matrix
            ),
        )

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
        self.head = LmHead(
            ctx, spec.vocab_size, spec.hidden_size, self.embed if spec.tied else None, spec.logit_soft_cap
        )
        self.kv_specs = tuple(layer.attention.kv for layer in layers)

    def declare(self, graph: Graph) -> Value:
        spec = self.spec
        ids = graph.source(TOKEN_IDS)
        x, residual = graph.embed("embed", ids, spec.hidden_size, run=lambda _, ids_T: self.embed(ids_T)), None
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            x, residual = layer.declare(graph, f"layers.{index}", x, residual)
        return graph.add_norm("norm", x, residual, run=_adding(self.norm))[0]

    def declare_head(self, graph: Graph, hidden: Value) -> Value:
        return graph.head("head", hidden, self.spec.vocab_size, run=self.head.run)

    def dense(self, kv_layers: Sequence[KvLayer]) -> DenseModel | str:
        """The model as the op decode_step takes it, on one rank; or why it cannot be said so, in words for a user."""
        if self.spec.logit_soft_cap is not None:
            return "its logits have a soft cap"
        layers = []
        for layer in self.layers:
            assert isinstance(layer, DecoderLayer)
            described = layer.dense(kv_layers)
            if isinstance(described, str):
                return described
            layers.append(described)
        first = self.layers[0]
        assert isinstance(first, DecoderLayer)
        assert isinstance(first.attention, SelfAttention)
        assert isinstance(first.mlp, GatedMLP)
        spec, norm = first.attention.attention.spec, self.spec.norm
        return DenseModel(
            embed=self.embed.weight,
            embed_scale=self.embed.scale,
            layers=tuple(layers),
            norm=self.norm.weight,
            head=self.head.weight,
            eps=norm.eps,
            weight_offset=norm.weight_offset,
            num_heads=spec.num_heads,
            num_kv_heads=spec.kv.num_kv_heads,
            head_dim=spec.kv.head_dim,
            scale=spec.scale,
            activation=first.mlp.activation,
            packed=_packed(embed=self.embed.matrix, head=self.head.matrix),
        )

    def weight_map(self) -> WeightMap:
        names = self.names
        entries: list[WeightEntry] = [
            slot(f"{names.embed}.weight", self.embed.weight, self.embed.cut),
            slot(f"{names.norm}.weight", self.norm.weight),
        ]
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            entries += under(names.layer.format(index), layer.weight_slots())
        head = f"{names.head}.weight"
        if self.spec.tied:
            return WeightMap(tuple(entries), (*names.ignored, head))
        return WeightMap((*entries, slot(head, self.head.weight, self.head.cut)), names.ignored)


def _packed(**matrices: Matrix) -> dict[str, PackedWeight]:
    return {name: matrix.packed for name, matrix in matrices.items() if matrix.packed is not None}


def _qk_norm(ctx: BuildContext, spec: SelfAttentionSpec, size: int, shards: Shards) -> RMSNorm | None:
    if spec.qk_norm is QkNorm.NONE:
        return None
    if spec.qk_norm is QkNorm.HEAD:
        size, shards = spec.attention.kv.head_dim, WHOLE
    return RMSNorm(ctx, size, spec.norm.eps, spec.norm.weight_offset, shards)


def _normalised(norm: RMSNorm | None, x_THK: torch.Tensor) -> torch.Tensor:
    """Over the whole projection."""
    assert norm is not None, "no norm of the projection"
    return norm(x_THK.flatten(1)).view(x_THK.shape)  # type: ignore[no-any-return]


def _norm_named(ctx: BuildContext, spec: DecoderSpec, name: str | None) -> RMSNorm | None:
    return None if name is None else RMSNorm(ctx, spec.hidden_size, spec.norm.eps, spec.norm.weight_offset)


def _joined(graph: Graph, name: str, norm: RMSNorm | None, x: Value, residual: Value | None) -> tuple[Value, Value]:
    """(what the next branch reads, the stream with the last branch added)."""
    if norm is not None:
        return graph.add_norm(name, x, residual, run=_adding(norm))
    if residual is None:
        return x, x
    stream = graph.add(name, residual, x, run=lambda _, residual_TD, x_TD: residual_TD + x_TD)
    return stream, stream


def _adding(norm: RMSNorm) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    def run(view: View, x_TD: torch.Tensor, residual_TD: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        return norm.add(x_TD, residual_TD)

    return run  # type: ignore[return-value]


def _closed(graph: Graph, name: str, norm: RMSNorm | None, x: Value) -> Value:
    return x if norm is None else graph.norm(name, x, run=lambda _, x_TD: norm(x_TD))
