# SPDX-License-Identifier: Apache-2.0
"""One decode step of a whole dense model on one device: a token of each row in, logits out, K and V written.

Knows the shapes of pre-norm decoders with grouped-query attention and a gated feed-forward. Knows no model family, no
checkpoint and no sampling.

D hidden size, H query heads, G K/V heads, K head dimension, N = (H + 2 G) K, F feed-forward size, V vocabulary, P
pages, R rows, B table columns. All weights are contiguous and of one dtype, that of activations.

`prepare(model, max_rows) -> DecodeStep | Reason`, `DecodeStep(batch) -> logits_RV`, of R ≤ max_rows rows, each with one
new token:

    x = embed[token] * embed_scale
    of each layer: x += out(attention(rotary(norm(qkv(norm(x))))));  x += down(activation(gate) * up) of norm(x)
        where either branch may end with a norm of its own
    logits = head(norm(x)), a new (R, V) float32

with RMS norms that multiply by weight + weight_offset. K and V of the new token are written to slot
(table[position // block_size], position % block_size) of the layer's pages; it attends positions
max(0, position - window + 1) ... position. Nothing else of the pages is read into the result, so they may hold NaN
elsewhere. The residual stream may be kept in float32 or rounded to the model's dtype, and so may what passes between
two products: results agree with the layers' own up to such roundings.

Matrices may stay in few bits: then the field of a matrix has a shape and a dtype but no memory, and `packed` has, by
the field's name, what the op packed_linear made of it. A solution multiplies by it itself where it knows how it lies.

A padded row has position 0 and a table of zeros: it may write to page 0, and its logits mean nothing. A call of a
solution that is graph-safe launches the same work for the same number of rows, whatever the positions are; a step
uses scratch memory of its own, so calls of one step must follow each other on one stream.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray

from tokenspeed.kernels.registry import Reason

SILU, GELU_TANH = "silu_mul", "gelu_tanh_mul"
"""Activations of the gate, by the names of the ops that compute them."""


class PackedWeight(Protocol):
    """What a step uses of packed_linear.PackedMatrix."""

    cpu_pieces_P3: torch.Tensor | None
    in_planes: bool

    def __call__(
        self, x_TD: torch.Tensor, bias_N: torch.Tensor | None, out_dtype: torch.dtype | None = None
    ) -> torch.Tensor: ...

    def rows(self, row_ids_T: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class DenseLayer:
    """Norms: (D,), None after a branch that ends without one; q_norm and k_norm (K,) over each head, or None. qkv:
    (N, D), q then k then v; out: (D, H K); gate_up: (2 F, D), gate then up; down: (D, F); biases as long as these have
    rows, or None.

    k_pages, v_pages: (P, block_size, G, K), last dimension contiguous, other strides free; of the weights' dtype, or
    bfloat16 beside float32, to which K and V are rounded when they are written, or int8 with a last dimension of K + 4,
    as kv_pages has them. table_PR: as in the op
    rotary, None for a layer without positions. group: which of DecodeBatch.block_tables numbers the pages. window:
    tokens that a token attends, itself included; None for all.
    """

    norm_before_attention: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    out: torch.Tensor
    out_bias: torch.Tensor | None
    norm_before_mlp: torch.Tensor
    gate_up: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor
    down_bias: torch.Tensor | None
    k_pages: torch.Tensor
    v_pages: torch.Tensor
    table_PR: torch.Tensor | None
    interleaved: bool
    group: int
    window: int | None
    norm_after_attention: torch.Tensor | None = None
    norm_after_mlp: torch.Tensor | None = None
    packed: Mapping[str, PackedWeight] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DenseModel:
    """embed, head: (V, D), one matrix where they are tied. scale multiplies q . k. activation: SILU or GELU_TANH."""

    embed: torch.Tensor
    embed_scale: float | None
    layers: tuple[DenseLayer, ...]
    norm: torch.Tensor
    head: torch.Tensor
    eps: float
    weight_offset: float
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    activation: str
    packed: Mapping[str, PackedWeight] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """token_ids_R, positions_R: int64, contiguous. seq_lens_R: int32, contiguous, position + 1. block_tables: of each
    group (R, B) int32, last dimension contiguous.

    A batch may be given again, with other numbers in its memory: then the logits may lie where the last ones did."""

    token_ids_R: torch.Tensor
    positions_R: torch.Tensor
    seq_lens_R: torch.Tensor
    block_tables: tuple[torch.Tensor, ...]


class DecodeStep(Protocol):
    """A model's step, ready to run."""

    def __call__(self, batch: DecodeBatch) -> torch.Tensor: ...


@runtime_checkable
class GreedyStep(DecodeStep, Protocol):
    """One that can also say which token is the most likely, of up to greedy_rows rows, without knowing how likely the
    others are. It is the one that the logits would say, the first of several."""

    greedy_rows: int

    def most_likely(self, batch: DecodeBatch) -> NDArray[np.int64]:
        """(2, R), good until the next step: token ids, and 1 where a row is faulty: a logit is NaN or +inf, or all are
        -inf. Then its token means nothing."""
        ...


class Prepare(Protocol):
    """Signature of the op. Reason: why this solution cannot run the model, in words for a user."""

    def __call__(self, model: DenseModel, max_rows: int) -> DecodeStep | Reason: ...
