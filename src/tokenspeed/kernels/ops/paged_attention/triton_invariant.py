# SPDX-License-Identifier: Apache-2.0
"""Attention in Triton whose answer for a token does not depend on the batch, on chunking or on splits.

Tiles have one size, lie at fixed positions of a row, and are summed in one order. Slower than `triton`.
"""

from __future__ import annotations

import torch

from tokenspeed.kernels.ops.paged_attention import FP8_PAGES, SINKS
from tokenspeed.kernels.ops.paged_attention.triton import (
    Call,
    Tile,
    call_of,
    has_descriptors,
    launch_tiles,
    num_multiprocessors,
    power,
)
from tokenspeed.kernels.platform import has_dependent_launch, triton_on_cuda
from tokenspeed.kernels.registry import Band, Kernel, KernelContext, Solution

CHUNK = 2048
"""Positions that are summed on their own before they are folded into what came before."""
TILE_M = 64


def build(ctx: KernelContext) -> Kernel:
    pdl = has_dependent_launch(ctx.device)

    def paged_attention(
        q_THK: torch.Tensor,
        k_pages: torch.Tensor,
        v_pages: torch.Tensor,
        *,
        query_start: torch.Tensor,
        seq_lens_R: torch.Tensor,
        block_tables_RB: torch.Tensor,
        scale: float,
        window: int | None,
        soft_cap: float | None,
        sinks_H: torch.Tensor | None = None,
        max_query_len: int | None = None,
    ) -> torch.Tensor:
        num_tokens, num_rows = q_THK.shape[0], seq_lens_R.shape[0]
        if num_tokens == 0 or num_rows == 0:
            return torch.zeros(q_THK.shape, dtype=q_THK.dtype, device=q_THK.device)
        tables = (query_start, seq_lens_R, block_tables_RB)
        call = call_of((q_THK, k_pages, v_pages), tables, sinks_H, (scale, window, soft_cap), pdl=pdl)
        attend(call, min(num_tokens, max_query_len or num_tokens))
        return call.out_THK

    return paged_attention


def attend(call: Call, longest: int) -> None:
    """Rows of up to `longest` queries."""
    from tokenspeed.kernels.ops.paged_attention import _triton

    device, tile, block_k = call.q_THK.device, tile_of(call), call.fixed["BLOCK_K"]
    units = call.max_tiles(tile.m, longest) * call.num_kv_heads
    is_split = units < 2 * num_multiprocessors(device)
    num_chunks = -(-call.block_tables_RB.shape[1] * call.k_pages.shape[1] // CHUNK)
    kept_m = min(tile.m, power(longest * call.group))
    parts = (units, num_chunks, kept_m) if is_split else (0, 0, 0)
    partial_acc = torch.empty((*parts, block_k), dtype=torch.float32, device=device)
    partial_stats = torch.empty((*parts, 2), dtype=torch.float32, device=device)
    sizes = {"CHUNK": CHUNK, "KEPT_M": kept_m}
    grid = (units, num_chunks if is_split else 1)
    limits, flags = (1, longest, num_chunks), {"SPLIT": is_split, "FILL": True}
    launch_tiles(call, tile, grid, (partial_acc, partial_stats), limits=limits, sizes={**sizes, **flags})
    if is_split:
        merge_m = kept_m if device.type == "cpu" else min(kept_m, 4)
        keys = ("SINKS", "WINDOW", "HEAD_DIM", "KV_HEADS", "GROUP", "BLOCK_R", "BLOCK_K", "PDL")
        _triton.fold[(units, kept_m // merge_m)](
            call.out_THK,
            partial_acc,
            partial_stats,
            call.query_start,
            call.seq_lens_R,
            call.sinks_H,
            call.num_rows,
            longest,
            num_chunks,
            **{name: call.fixed[name] for name in keys},
            **sizes,
            BLOCK_M=tile.m,
            MERGE_M=merge_m,
            num_warps=2,
            **call.launch,
        )


def tile_of(call: Call) -> Tile:
    """By what all calls of a model share: a head's size and a page's, never lengths or numbers of rows."""
    t = 32 if call.fixed["BLOCK_K"] > 128 else 64
    return Tile(TILE_M, t, num_warps=4, stages=2, tma=has_descriptors(call, t))


SOLUTION = Solution(
    "triton_invariant",
    Band.PORTABLE,
    triton_on_cuda,
    build,
    graph_safe=True,
    batch_invariant=True,
    features=frozenset({SINKS, FP8_PAGES}),
)
