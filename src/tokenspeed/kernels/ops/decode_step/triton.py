# SPDX-License-Identifier: Apache-2.0
"""A decode step as a chain of Triton kernels, five a layer: each starts loading its weights while the one before it
still runs. One row goes by matrix-vector products, up to 16 by products whose short side is the rows.

Knows launches, scratch memory and which models it can run. Device code is in _triton, sizes of tiles in _tiles.
"""

from __future__ import annotations

import math
from types import ModuleType

import torch

from tokenspeed.kernels import platform
from tokenspeed.kernels.ops.decode_step import GELU_TANH, SILU, DecodeBatch, DecodeStep, DenseLayer, DenseModel, Prepare
from tokenspeed.kernels.ops.decode_step._tiles import (
    PROGRAMS_MAX,
    ROWS,
    SPLITS_MAX,
    AttendTile,
    GemmTile,
    GemvTile,
    StepSizes,
    StepTiles,
    power_of_2,
    tiles_for,
)
from tokenspeed.kernels.registry import Band, KernelContext, Reason, Solution

_NO_WINDOW = 1 << 30


class TritonStep:
    """A DecodeStep. tiles: by number of rows, filled in at the first call with that many."""

    def __init__(self, model: DenseModel, max_rows: int, kernels: ModuleType) -> None:
        self.tiles: dict[int, StepTiles] = {}
        self._model, self._max_rows, self._kernels = model, max_rows, kernels
        self._sizes = sizes = sizes_of(model)
        self._on_cuda = model.embed.is_cuda
        self._pdl = self._on_cuda and torch.cuda.get_device_capability(model.embed.device)[0] >= 9
        self._exact = not self._on_cuda or model.embed.dtype is torch.float32
        self._launch = {"launch_pdl": True} if self._pdl else {}
        device, dtype, hidden_size = model.embed.device, model.embed.dtype, model.embed.shape[1]
        group = model.num_heads // model.num_kv_heads

        def scratch(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self._x, self._h = scratch(ROWS, hidden_size), scratch(ROWS, hidden_size, dtype=dtype)
        self._squares = scratch(hidden_size, ROWS)
        self._qkv = scratch(ROWS, sizes.qkv[0])
        self._attended = scratch(ROWS, sizes.out[1], dtype=dtype)
        self._gated = scratch(ROWS, sizes.gate_up[0], dtype=dtype)
        self._attention_parts = scratch(PROGRAMS_MAX, group * model.head_dim)
        self._attention_stats = scratch(PROGRAMS_MAX, 2 * group)
        self._product_parts = scratch(SPLITS_MAX * max(sizes.qkv[0], hidden_size), ROWS)
        arrived = max(sizes.qkv[0], hidden_size, PROGRAMS_MAX)
        self._arrived = scratch(arrived, dtype=torch.int32)  # every launch leaves it at zero

    def __call__(self, batch: DecodeBatch) -> torch.Tensor:
        num_rows, model = len(batch.token_ids_R), self._model
        assert num_rows <= self._max_rows, (num_rows, self._max_rows)
        logits_RV = torch.empty(num_rows, len(model.head), dtype=torch.float32, device=model.head.device)
        if num_rows == 0:
            return logits_RV
        if num_rows not in self.tiles:
            self.tiles[num_rows] = tiles_for(num_rows, self._sizes)
        tiles = self.tiles[num_rows]
        self._embed(batch, num_rows)
        gains = [layer.norm_before_attention for layer in model.layers[1:]] + [model.norm]
        num_sums = 1
        for layer, next_gain in zip(model.layers, gains, strict=True):
            self._product(
                tiles.qkv, num_rows, self._h, layer.qkv, bias=layer.qkv_bias, outputs=self._qkv, num_sums=num_sums
            )
            self._attend(tiles.attend, num_rows, layer, batch)
            self._product(
                tiles.out, num_rows, self._attended, layer.out,
                bias=layer.out_bias, outputs=self._x, gain=layer.norm_before_mlp,
            )  # fmt: skip
            self._product(
                tiles.gate_up, num_rows, self._h, layer.gate_up,
                bias=layer.gate_up_bias, outputs=self._gated, num_sums=len(layer.out) // tiles.out.rows,
            )  # fmt: skip
            self._product(
                tiles.down, num_rows, self._gated, layer.down, bias=layer.down_bias, outputs=self._x, gain=next_gain
            )
            num_sums = len(layer.down) // tiles.down.rows
        self._product(tiles.head, num_rows, self._h, model.head, bias=None, outputs=logits_RV, num_sums=num_sums)
        return logits_RV

    def _embed(self, batch: DecodeBatch, num_rows: int) -> None:
        model, hidden_size = self._model, self._x.shape[1]
        scale = 1.0 if model.embed_scale is None else model.embed_scale
        gain = model.layers[0].norm_before_attention
        self._kernels.embed_rows[(num_rows,)](
            batch.token_ids_R, model.embed, gain, self._x, self._h, self._squares, scale, model.weight_offset,
            hidden_size, power_of_2(hidden_size), self._pdl, num_warps=8, **self._launch,
        )  # fmt: skip

    def _product(
        self,
        tile: GemvTile | GemmTile,
        num_rows: int,
        inputs: torch.Tensor,
        weight: torch.Tensor,
        *,
        bias: torch.Tensor | None,
        outputs: torch.Tensor,
        num_sums: int = 0,
        gain: torch.Tensor | None = None,
    ) -> None:
        """outputs = weight @ inputs. num_sums: rows of squares of the norm before it, 0 for none; gain: of the norm
        after it, where outputs are the residual stream to add to. Gated where weight has twice as many rows."""
        model, is_glu = self._model, outputs is self._gated
        num_outputs, num_inputs = len(weight) // (2 if is_glu else 1), weight.shape[1]
        norm, residual, has_bias, is_gelu = (
            num_sums > 0,
            gain is not None,
            bias is not None,
            model.activation == GELU_TANH,
        )
        bias, gain = weight if bias is None else bias, weight if gain is None else gain
        pointers = (inputs, self._squares, weight, bias, outputs, gain, self._h, self._squares)
        sums = (num_sums, power_of_2(max(num_sums, 1)))
        if isinstance(tile, GemvTile):
            self._kernels.gemv[(num_outputs // tile.rows,)](
                *pointers, model.eps, model.weight_offset, num_outputs, num_inputs, tile.rows, tile.columns,
                tile.preload, *sums, norm, is_glu, residual, has_bias, is_gelu, tile.evict, tile.early, self._pdl,
                num_warps=tile.warps, **self._launch,
            )  # fmt: skip
        else:
            self._kernels.gemm[(num_outputs // tile.rows, tile.splits)](
                *pointers, self._product_parts, self._arrived, num_rows, model.eps, model.weight_offset, num_outputs,
                num_inputs, ROWS, tile.rows, tile.columns, tile.splits, tile.stages, tile.prefetch * self._pdl, *sums,
                norm, is_glu, residual, has_bias, is_gelu, tile.evict, self._exact, 32 * tile.warps, self._pdl,
                num_warps=tile.warps, num_stages=tile.stages, **self._launch,
            )  # fmt: skip

    def _attend(self, tile: AttendTile, num_rows: int, layer: DenseLayer, batch: DecodeBatch) -> None:
        model, table_RB = self._model, batch.block_tables[layer.group]
        has_norm = layer.q_norm is not None and layer.k_norm is not None
        q_norm, k_norm = (layer.q_norm, layer.k_norm) if has_norm else (layer.qkv, layer.qkv)
        rotary = self._x if layer.table_PR is None else layer.table_PR
        rotary_dim = 0 if layer.table_PR is None else layer.table_PR.shape[1]
        page_stride, token_stride, head_stride, _ = layer.k_pages.stride()
        self._kernels.attend[(num_rows * model.num_kv_heads, tile.splits)](
            self._qkv, q_norm, k_norm, rotary, layer.k_pages, layer.v_pages, table_RB, batch.positions_R,
            self._attended, self._attention_parts, self._attention_stats, self._arrived,
            model.scale * math.log2(math.e), model.eps, model.weight_offset, layer.window or _NO_WINDOW,
            table_RB.stride(0), page_stride, token_stride, head_stride, model.num_heads, model.num_kv_heads,
            model.head_dim, rotary_dim, layer.interleaved, has_norm, layer.k_pages.shape[1], tile.tokens, tile.splits,
            power_of_2(tile.splits), tile.min_tiles, tile.stages * self._on_cuda, tile.first, self._exact, self._pdl,
            num_warps=tile.warps, num_stages=tile.stages, **self._launch,
        )  # fmt: skip


def sizes_of(model: DenseModel) -> StepSizes:
    """What tiles depend on."""
    layer, device = model.layers[0], model.embed.device
    num_processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
    return StepSizes(
        qkv=(layer.qkv.shape[0], layer.qkv.shape[1]),
        out=(layer.out.shape[0], layer.out.shape[1]),
        gate_up=(layer.gate_up.shape[0] // 2, layer.gate_up.shape[1]),
        down=(layer.down.shape[0], layer.down.shape[1]),
        head=(model.head.shape[0], model.head.shape[1]),
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        block_size=layer.k_pages.shape[1],
        itemsize=model.embed.itemsize,
        num_processors=num_processors,
    )


def refusal(model: DenseModel, max_rows: int) -> str | None:
    """Why the chain cannot run a model, None where it can."""
    if max_rows > ROWS:
        return f"steps of {max_rows} rows, where {ROWS} are the most"
    if not model.layers:
        return "a model without layers"
    if model.activation not in (SILU, GELU_TANH):
        return f"the activation {model.activation}"
    if model.head_dim not in (16, 32, 64, 128, 256):
        return f"heads of {model.head_dim} numbers, which is not 16, 32, 64, 128 or 256"
    if model.num_heads % model.num_kv_heads or model.num_heads // model.num_kv_heads > 16:
        return f"{model.num_heads} heads on {model.num_kv_heads} K/V heads"
    if model.packed or any(layer.packed for layer in model.layers):
        return "weights that stay packed"
    for layer in model.layers:
        if layer.norm_after_attention is not None or layer.norm_after_mlp is not None:
            return "norms after attention and feed-forward"
        if layer.k_pages.dtype is not model.embed.dtype or layer.v_pages.dtype is not model.embed.dtype:
            return "pages of another dtype than the weights"
        if layer.k_pages.stride() != layer.v_pages.stride() or layer.k_pages.stride(3) != 1:
            return "pages of K and V that lie differently"
        for weight in (layer.qkv, layer.out, layer.gate_up, layer.down, model.head, model.embed):
            if weight.dtype is not model.embed.dtype or not weight.is_contiguous():
                return "weights of several dtypes, or not contiguous"
            if weight.shape[1] % 16 or (max_rows > 1 and weight.shape[0] % 16):
                return f"a matrix of {weight.shape[0]} x {weight.shape[1]}, which are not multiples of 16"
    return None


def _build(_ctx: KernelContext) -> Prepare:
    from tokenspeed.kernels.ops.decode_step import _triton

    def prepare(model: DenseModel, max_rows: int) -> DecodeStep | Reason:
        why_not = refusal(model, max_rows)
        return TritonStep(model, max_rows, _triton) if why_not is None else Reason(f"has no {why_not}")

    return prepare


SOLUTION = Solution("triton", Band.PERFORMANT, platform.triton_on_cuda, _build, graph_safe=True)
