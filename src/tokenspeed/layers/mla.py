# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention (arXiv:2405.04434): a token keeps one latent and one turned key that all heads share.

Every rank has the projections to latents and the pages of latents whole; ranks share out the heads. Knows neither the
family nor what a checkpoint calls anything.
Dimensions beside those of tokenspeed.layers: C latent, N and E of a head that meet the latent and the turned key.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import nn

from tokenspeed.core.errors import ConfigError
from tokenspeed.kernels.ops.kv_write import KvWrite
from tokenspeed.kernels.ops.mla_attention import MlaAttention
from tokenspeed.layers.attention import KvSpec, from_heads, heads
from tokenspeed.layers.build import BuildContext
from tokenspeed.layers.forward_batch import ForwardBatch
from tokenspeed.layers.linear import Linear
from tokenspeed.layers.norm import RMSNorm
from tokenspeed.layers.rotary import RotaryEmbedding
from tokenspeed.layers.weight_map import WeightEntry, linear_slots, slot
from tokenspeed.spmd.graph import Graph, Value
from tokenspeed.spmd.mesh import Group
from tokenspeed.spmd.step import View


@dataclass(frozen=True, slots=True)
class MlaSpec:
    """Geometry of one layer. q_rank: of the queries' own latent, None where they are projected at once. bias: of the
    projections to latents and of the last one. eps: of the norms of latents."""

    num_heads: int
    latent_dim: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    scale: float
    q_rank: int | None = None
    bias: bool = False
    eps: float = 1e-6

    @property
    def kv(self) -> KvSpec:
        return KvSpec(1, self.latent_dim + self.rope_dim, value_dim=self.latent_dim)

    @property
    def head_dim(self) -> int:
        return self.nope_dim + self.rope_dim

    def of_one(self, num_ranks: int) -> MlaSpec:
        """The geometry on one of so many ranks."""
        return dataclasses.replace(self, num_heads=self.num_heads // num_ranks)


@dataclass(frozen=True, slots=True)
class MlaNames:
    """Module names within the layer. q: of the queries' projection where they have no latent of their own; q_a, q_norm
    and q_b else."""

    q: str
    q_a: str
    q_norm: str
    q_b: str
    kv_a: str
    kv_norm: str
    kv_b: str
    out: str


class LatentAttention(nn.Module):
    """Write this step's latents, then attend. Owns what makes keys and values of a latent: (H * (N + V), C), a head's
    keys before its values. layer_index: which entry of ForwardBatch.kv_layers is this layer's."""

    def __init__(self, ctx: BuildContext, spec: MlaSpec, layer_index: int) -> None:
        super().__init__()
        self.spec = spec.of_one(ctx.size_of(Group.ATTENTION))
        self.layer_index = layer_index
        unit = spec.nope_dim + spec.value_dim
        self.cut = ctx.cut("latents", (spec.num_heads * unit, spec.latent_dim), heads(unit))
        self.weight = ctx.empty(*self.cut.local_shape)
        if ctx.kv_dtype is not ctx.dtype:
            raise ConfigError("latents are kept in the numbers of the model alone: leave --kv-cache-dtype at auto")
        self._kv_write: KvWrite = ctx.bind("kv_write")
        self._mla_attention: MlaAttention = ctx.bind("mla_attention")

    def forward(
        self, q_THK: torch.Tensor, latent_TC: torch.Tensor, turned_T1E: torch.Tensor, batch: ForwardBatch
    ) -> torch.Tensor:
        """(T, H * V). q_THK: (T, H, N + E), turned in the last E."""
        spec, pages = self.spec, batch.kv_layers[self.layer_index]
        tables, latent_dim, nope_dim = batch.groups[pages.group], spec.latent_dim, spec.nope_dim
        latent_pages, turned_pages = pages.k[..., :latent_dim], pages.k[..., latent_dim:]
        self._kv_write(latent_TC.unsqueeze(1), turned_T1E, latent_pages, turned_pages, tables.slot_mapping_T)
        weight_HXC = self.weight.view(spec.num_heads, nope_dim + spec.value_dim, latent_dim)
        out_THV = self._mla_attention(
            q_THK[..., :nope_dim],
            q_THK[..., nope_dim:],
            pages.k,
            weight_HXC[:, :nope_dim],
            weight_HXC[:, nope_dim:],
            query_start=batch.query_start,
            seq_lens_R=batch.seq_lens_R,
            block_tables_RB=tables.block_tables_RB,
            scale=spec.scale,
        )
        return out_THV.view(q_THK.shape[0], spec.num_heads * spec.value_dim)


class Mla(nn.Module):
    """A decoder.AttentionBlock: projections down to latents, which know no heads, up to heads, attention, and back."""

    def __init__(
        self,
        ctx: BuildContext,
        hidden_size: int,
        spec: MlaSpec,
        rotary: RotaryEmbedding,
        layer_index: int,
        *,
        names: MlaNames,
    ) -> None:
        super().__init__()
        self.spec, self.names = spec, names
        self.kv = spec.kv
        self.q_a: Linear | None = None
        self.q_norm: RMSNorm | None = None
        if spec.q_rank is not None:
            self.q_a = Linear(ctx, hidden_size, spec.q_rank, spec.bias)
            self.q_norm = RMSNorm(ctx, spec.q_rank, spec.eps)
        q_size = spec.num_heads * spec.head_dim
        self.q = Linear(ctx, spec.q_rank or hidden_size, q_size, shards=heads(spec.head_dim))
        self.kv_a = Linear(ctx, hidden_size, spec.latent_dim + spec.rope_dim, spec.bias)
        self.kv_norm = RMSNorm(ctx, spec.latent_dim, spec.eps)
        self.rotary = rotary
        self.attention = LatentAttention(ctx, spec, layer_index)
        value_size = spec.num_heads * spec.value_dim
        self.out = Linear(ctx, value_size, hidden_size, spec.bias, from_heads(spec.value_dim))

    def declare(self, graph: Graph, name: str, x: Value) -> Value:
        spec = self.spec
        kept = (spec.latent_dim, spec.rope_dim)
        if self.q_a is None:
            latent, turned = graph.latents(f"{name}.latents", x, kept, run=lambda _, x_TD: self._kept(x_TD))
            q_from = x
        else:
            q_from, latent, turned = graph.latents(
                f"{name}.latents", x, (self.q_a.whole.cut.shape[0], *kept), run=lambda _, x_TD: self._latents(x_TD)
            )
        return graph.attention(name, q_from, latent, turned, width=x.width, run=self._attend)

    def _latents(self, x_TD: torch.Tensor) -> tuple[torch.Tensor, ...]:
        assert self.q_a is not None, "queries have no latent"
        assert self.q_norm is not None, "the latent of queries has no norm"
        return self.q_norm(self.q_a(x_TD)), *self._kept(x_TD)

    def _kept(self, x_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        kv_TX = self.kv_a(x_TD)
        return self.kv_norm(kv_TX[:, : self.spec.latent_dim]), kv_TX[:, self.spec.latent_dim :]

    def _attend(
        self, view: View, q_from_TD: torch.Tensor, latent_TC: torch.Tensor, turned_TE: torch.Tensor
    ) -> torch.Tensor:
        spec, batch = self.attention.spec, view.context
        q_THK = self.q(q_from_TD).view(len(q_from_TD), spec.num_heads, spec.head_dim)
        turned_T1E = turned_TE.unsqueeze(1)
        self.rotary(q_THK[..., spec.nope_dim :], turned_T1E, batch)
        return self.out(self.attention(q_THK, latent_TC, turned_T1E, batch))  # type: ignore[no-any-return]

    def weight_slots(self) -> list[WeightEntry]:
        """Names relative to the block."""
        names = self.names
        entries: list[WeightEntry] = []
        if self.q_a is not None and self.q_norm is not None:
            entries += [*linear_slots(names.q_a, self.q_a), slot(f"{names.q_norm}.weight", self.q_norm.weight)]
        entries += linear_slots(names.q if self.q_a is None else names.q_b, self.q)
        entries += linear_slots(names.kv_a, self.kv_a)
        entries.append(slot(f"{names.kv_norm}.weight", self.kv_norm.weight))
        entries.append(slot(f"{names.kv_b}.weight", self.attention.weight, self.attention.cut))
        return entries + linear_slots(names.out, self.out)
