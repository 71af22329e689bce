# SPDX-License-Identifier: Apache-2.0
"""Paged attention of one layer: normalise and turn heads, write this step's K and V, then attend. Ranks share out the
heads. Knows no projections."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import nn

from tokenspeed.kernels.kv_pages import page_dim
from tokenspeed.kernels.ops import paged_attention, rotary_kv_write
from tokenspeed.kernels.ops.paged_attention import SINKS, PagedAttention
from tokenspeed.kernels.ops.rotary_kv_write import RotaryKvWrite
from tokenspeed.layers.build import BuildContext
from tokenspeed.layers.forward_batch import ForwardBatch
from tokenspeed.layers.norm import RMSNorm
from tokenspeed.layers.rotary import RotaryEmbedding
from tokenspeed.spmd import shards
from tokenspeed.spmd.mesh import Group
from tokenspeed.spmd.shards import Shards


@dataclass(frozen=True, slots=True)
class KvSpec:
    """What one attention layer keeps per token. window: tokens it looks back on, the current one included;
    None looks back on all. value_dim: None where each head keeps a key and a value of head_dim numbers; else it keeps
    head_dim numbers of which the first value_dim are the value too, as a latent does."""

    num_kv_heads: int
    head_dim: int
    window: int | None = None
    value_dim: int | None = None

    def token_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of a token in pages of this dtype."""
        head_bytes = page_dim(self.head_dim, dtype) * dtype.itemsize
        return self.num_kv_heads * head_bytes * (2 if self.value_dim is None else 1)

    def of_one(self, num_ranks: int) -> KvSpec:
        """What one of so many ranks keeps: a share of the heads, or the head that it shares with neighbours."""
        return dataclasses.replace(self, num_kv_heads=max(1, self.num_kv_heads // num_ranks))


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Geometry of one attention layer. scale multiplies q . k; soft_cap bounds the scores smoothly. has_sinks: each
    head has a learnt score that every token attends beside the others', and that has no value."""

    num_heads: int
    kv: KvSpec
    scale: float
    soft_cap: float | None = None
    has_sinks: bool = False

    @property
    def q_size(self) -> int:
        return self.num_heads * self.kv.head_dim

    @property
    def kv_size(self) -> int:
        return self.kv.num_kv_heads * self.kv.head_dim

    def of_one(self, num_ranks: int) -> AttentionSpec:
        """The geometry on one of so many ranks."""
        return dataclasses.replace(self, num_heads=self.num_heads // num_ranks, kv=self.kv.of_one(num_ranks))


def heads(unit: int = 1) -> Shards:
    """How what query heads have is dealt, `unit` elements each."""
    return shards.rows(Group.ATTENTION, unit, what="attention heads")


def kv_heads(unit: int = 1) -> Shards:
    """How what K/V heads have is dealt; with more ranks than heads, neighbours have the same one."""
    return shards.rows(Group.ATTENTION, unit, shared=True, what="K/V heads")


def from_heads(unit: int) -> Shards:
    """How the projection that reads all heads is dealt."""
    return shards.columns(Group.ATTENTION, unit, what="attention heads")


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """Norms of each head of q and of k, alike but for their weights."""

    q: RMSNorm
    k: RMSNorm


_PAGES_FEATURES = {
    torch.float8_e4m3fn: ((rotary_kv_write.FP8_PAGES,), (paged_attention.FP8_PAGES,)),
    torch.bfloat16: ((rotary_kv_write.BF16_PAGES,), (paged_attention.BF16_PAGES,)),
    torch.int8: ((rotary_kv_write.INT8_PAGES,), (paged_attention.INT8_PAGES,)),
}
"""What ops that write and that read pages need, where those keep another dtype than the model's."""


class Attention(nn.Module):
    """layer_index: which entry of ForwardBatch.kv_layers is this layer's. spec: over all ranks."""

    def __init__(self, ctx: BuildContext, spec: AttentionSpec, layer_index: int) -> None:
        super().__init__()
        self.spec = spec.of_one(ctx.size_of(Group.ATTENTION))
        self.layer_index = layer_index
        writes, reads = ((), ()) if ctx.kv_dtype is ctx.dtype else _PAGES_FEATURES[ctx.kv_dtype]
        self._rotary_kv_write: RotaryKvWrite = ctx.bind("rotary_kv_write", *writes)
        self.sinks_cut = ctx.cut("sinks", (spec.num_heads,), heads()) if spec.has_sinks else None
        self.sinks = None
        if self.sinks_cut is not None:
            self.sinks = ctx.empty(*self.sinks_cut.local_shape, dtype=torch.float32)
        self._paged_attention: PagedAttention = ctx.bind(
            "paged_attention", *reads, *((SINKS,) if spec.has_sinks else ())
        )

    def split(self, qkv_TN: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Views q (T, H, K), k (T, G, K), v (T, G, K) of a fused projection's output."""
        num_heads, num_kv_heads, head_dim = self.spec.num_heads, self.spec.kv.num_kv_heads, self.spec.kv.head_dim
        heads = qkv_TN.view(qkv_TN.shape[0], num_heads + 2 * num_kv_heads, head_dim)
        q_THK, k_TGK, v_TGK = heads.split_with_sizes((num_heads, num_kv_heads, num_kv_heads), dim=1)
        return q_THK, k_TGK, v_TGK

    def forward(
        self,
        q_THK: torch.Tensor,
        k_TGK: torch.Tensor,
        v_TGK: torch.Tensor,
        batch: ForwardBatch,
        *,
        rotary: RotaryEmbedding | None,
        norms: HeadNorms | None = None,
    ) -> torch.Tensor:
        """(T, H * K). rotary: by which q and k turn, None for a layer without positions. norms: of their heads before
        that. q and k may be changed in place."""
        pages = batch.kv_layers[self.layer_index]
        tables = batch.groups[pages.group]
        q_THK = self._rotary_kv_write(
            q_THK,
            k_TGK,
            v_TGK,
            pages.k,
            pages.v,
            slots_T=tables.slot_mapping_T,
            positions_T=batch.positions_T,
            table_PR=None if rotary is None else rotary.table_PR,
            interleaved=rotary is not None and rotary.interleaved,
            q_norm_K=None if norms is None else norms.q.weight,
            k_norm_K=None if norms is None else norms.k.weight,
            eps=0.0 if norms is None else norms.q.eps,
            weight_offset=0.0 if norms is None else norms.q.weight_offset,
        )
        out_THK = self._paged_attention(
            q_THK,
            pages.k,
            pages.v,
            query_start=batch.query_start,
            seq_lens_R=batch.seq_lens_R,
            block_tables_RB=tables.block_tables_RB,
            scale=self.spec.scale,
            window=self.spec.kv.window,
            soft_cap=self.spec.soft_cap,
            sinks_H=self.sinks,
            max_query_len=batch.max_query_len,
        )
        return out_THK.view(q_THK.shape[0], self.spec.q_size)
