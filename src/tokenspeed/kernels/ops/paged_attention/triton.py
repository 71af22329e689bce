# SPDX-License-Identifier: Apache-2.0
"""Attention in Triton. Rows of few queries are split along K and V and merged; long ones take a program a tile.

Which launches there are, and their grids, follow from shapes and max_query_len. What each program does follows from
query_start and seq_lens_R on the device, so a captured launch stays good while contexts grow.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tokenspeed.kernels.ops.paged_attention import FP8_PAGES, SINKS
from tokenspeed.kernels.platform import has_dependent_launch, triton_on_cuda
from tokenspeed.kernels.registry import Band, Kernel, KernelContext, Solution

LOG2E = 1.4426950408889634
FEW = 64
"""Queries x heads of a K/V head up to which one launch serves rows of every query length."""
EXTEND_M = 64
"""Queries x heads of a tile of long rows."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Sizes of a program. m: packed queries, t: cached tokens. programs: of a split, per multiprocessor."""

    m: int
    t: int
    num_warps: int
    stages: int
    tma: bool = False
    programs: int = 0


@dataclass(frozen=True, slots=True)
class Call:
    """One call's tensors, and what all its launches share. fixed: constants of the device code."""

    q_THK: torch.Tensor
    k_pages: torch.Tensor
    v_pages: torch.Tensor
    query_start: torch.Tensor
    seq_lens_R: torch.Tensor
    block_tables_RB: torch.Tensor
    sinks_H: torch.Tensor | None
    out_THK: torch.Tensor
    scale: float
    inner_scale: float
    fixed: dict[str, Any]
    launch: dict[str, Any]

    @property
    def num_rows(self) -> int:
        return self.seq_lens_R.shape[0]

    @property
    def num_heads(self) -> int:
        return self.q_THK.shape[1]

    @property
    def num_kv_heads(self) -> int:
        return self.k_pages.shape[2]

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads

    def max_tiles(self, m: int, longest: int) -> int:
        """Tiles of queries that rows of up to `longest` make at most."""
        num_tokens = self.q_THK.shape[0]
        tiles = min(self.num_rows + num_tokens * self.group // m, self.num_rows * -(-longest * self.group // m))
        return min(tiles, num_tokens) if self.group <= m else tiles


LongRows = Callable[[Call, tuple[int, int]], bool]
"""What attends rows of (shortest, longest) queries; whether the next launch may begin before its end."""


def build(ctx: KernelContext) -> Kernel:
    return attention(ctx, long_rows)


def attention(ctx: KernelContext, long_rows: LongRows) -> Kernel:
    """The op, with what attends rows of more than a few queries."""
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
        attend(call, min(num_tokens, max_query_len or num_tokens), long_rows)
        return call.out_THK

    return paged_attention


def attend(call: Call, longest: int, long_rows: LongRows) -> None:
    """Rows of up to `longest` queries."""
    if longest == 1 or longest * call.group <= FEW:
        split(call, split_tile(call, longest * call.group), (1, longest), fill=True)
        return
    few = max(1, 16 // call.group)
    is_early = long_rows(call, (few + 1, longest))
    split(call, split_tile(call, few * call.group), (1, few), fill=True, after_tiles=is_early)


def long_rows(call: Call, query_lens: tuple[int, int]) -> bool:
    """Rows of query_lens = (shortest, longest): a program a tile where there are enough of these."""
    if call.max_tiles(EXTEND_M, query_lens[1]) * call.num_kv_heads < 2 * num_multiprocessors(call.q_THK.device):
        split(call, wide_split_tile(call), query_lens, fill=False)
        return False
    extend(call, query_lens)
    return True


def call_of(
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    tables: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    sinks_H: torch.Tensor | None,
    score: tuple[float, int | None, float | None],
    *,
    pdl: bool,
) -> Call:
    """tensors: q_THK, k_pages, v_pages. tables: query_start, seq_lens_R, block_tables_RB. score: scale, window,
    soft_cap.

    Scores on the device are in units of log2. Without a GPU the interpreter runs the device code, whose matrix products
    know no 16-bit numbers.
    """
    (q_THK, k_pages, v_pages), (scale, window, soft_cap) = tensors, score
    assert q_THK.shape[1] % k_pages.shape[2] == 0, (q_THK.shape, k_pages.shape)
    assert k_pages.shape == v_pages.shape, (k_pages.shape, v_pages.shape)
    assert k_pages.dtype is v_pages.dtype, (k_pages.dtype, v_pages.dtype)
    assert k_pages.dtype in (q_THK.dtype, torch.float8_e4m3fn), (q_THK.dtype, k_pages.dtype)
    assert q_THK.shape[2] == 1 or q_THK.stride(2) == k_pages.stride(3) == v_pages.stride(3) == 1, q_THK.stride()
    assert scale > 0.0, scale
    assert sinks_H is None or sinks_H.dtype is torch.float32, sinks_H
    inner, outer = (0.0, scale * LOG2E) if soft_cap is None else (2 * LOG2E * scale / soft_cap, soft_cap * LOG2E)
    head_dim, num_kv_heads = k_pages.shape[3], k_pages.shape[2]
    fixed = {
        "SOFT_CAP": soft_cap is not None,
        "SINKS": sinks_H is not None,
        "WINDOW": window or 0,
        "HEAD_DIM": head_dim,
        "KV_HEADS": num_kv_heads,
        "GROUP": q_THK.shape[1] // num_kv_heads,
        "BLOCK_SIZE": k_pages.shape[1],
        "BLOCK_R": max(2, power(tables[1].shape[0])),
        "BLOCK_K": max(16, power(head_dim)),
        "WIDE": q_THK.device.type == "cpu",
        "PDL": pdl,
    }
    out_THK = torch.empty(q_THK.shape, dtype=q_THK.dtype, device=q_THK.device)
    return Call(*tensors, *tables, sinks_H, out_THK, outer, inner, fixed, {"launch_pdl": True} if pdl else {})


def split(call: Call, tile: Tile, query_lens: tuple[int, int], *, fill: bool, after_tiles: bool = False) -> None:
    """Rows of query_lens = (shortest, longest): the split and its merge."""
    from tokenspeed.kernels.ops.paged_attention import _triton

    device, block_k = call.q_THK.device, call.fixed["BLOCK_K"]
    num_programs = tile.programs * num_multiprocessors(device)
    partial_acc = torch.empty((num_programs, 2, tile.m, block_k), dtype=torch.float32, device=device)
    partial_stats = torch.empty((num_programs, 2, tile.m, 2), dtype=torch.float32, device=device)
    keys = ("SINKS", "WINDOW", "HEAD_DIM", "KV_HEADS", "GROUP", "BLOCK_R", "BLOCK_K", "PDL")
    _triton.split[(num_programs,)](
        call.q_THK,
        *pools(call, tile),
        call.out_THK,
        partial_acc,
        partial_stats,
        call.query_start,
        call.seq_lens_R,
        call.block_tables_RB,
        call.sinks_H,
        call.num_rows,
        call.q_THK.shape[0],
        *query_lens,
        *strides(call),
        call.scale,
        call.inner_scale,
        **call.fixed,
        BLOCK_M=tile.m,
        BLOCK_T=tile.t,
        BLOCK_OUT=power(call.num_heads * call.q_THK.shape[2]),
        TMA=tile.tma,
        STAGES=tile.stages,
        FILL=fill,
        AFTER_TILES=after_tiles,
        num_warps=tile.num_warps,
        **call.launch,
    )
    merge_m = tile.m if device.type == "cpu" else 1 if tile.m <= 16 else 8
    merged = min(tile.m, query_lens[1] * call.group)
    _triton.merge[(call.max_tiles(tile.m, query_lens[1]), call.num_kv_heads, -(-merged // merge_m))](
        call.out_THK,
        partial_acc,
        partial_stats,
        call.query_start,
        call.seq_lens_R,
        call.sinks_H,
        call.num_rows,
        num_programs,
        *query_lens,
        **{name: call.fixed[name] for name in keys},
        BLOCK_M=tile.m,
        BLOCK_T=tile.t,
        MERGE_M=merge_m,
        MERGE_S=max(2, 16 // merge_m),
        num_warps=2 if merge_m == 1 else 4,
        **call.launch,
    )


def extend(call: Call, query_lens: tuple[int, int]) -> None:
    """Rows of query_lens = (shortest, longest), a program a tile."""
    tile = extend_tile(call)
    none = torch.empty(0, dtype=torch.float32, device=call.q_THK.device)
    grid = (call.max_tiles(tile.m, query_lens[1]) * call.num_kv_heads,)
    sizes = {"CHUNK": 0, "KEPT_M": tile.m, "SPLIT": False, "FILL": False}
    launch_tiles(call, tile, grid, (none, none), limits=(*query_lens, 1), sizes=sizes)


def launch_tiles(
    call: Call,
    tile: Tile,
    grid: tuple[int, ...],
    partial: tuple[torch.Tensor, torch.Tensor],
    *,
    limits: tuple[int, int, int],
    sizes: dict[str, int],
) -> None:
    """limits: shortest and longest query_len, number of chunks."""
    from tokenspeed.kernels.ops.paged_attention import _triton

    _triton.tiles[grid](
        call.q_THK,
        *pools(call, tile),
        call.out_THK,
        *partial,
        call.query_start,
        call.seq_lens_R,
        call.block_tables_RB,
        call.sinks_H,
        call.num_rows,
        call.q_THK.shape[0],
        *limits,
        *strides(call),
        call.scale,
        call.inner_scale,
        **call.fixed,
        **sizes,
        BLOCK_M=tile.m,
        BLOCK_T=tile.t,
        BLOCK_OUT=power(call.num_heads * call.q_THK.shape[2]),
        TMA=tile.tma,
        STAGES=tile.stages,
        num_warps=tile.num_warps,
        **call.launch,
    )


def strides(call: Call) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Of queries, of K's and V's pages, and of the block tables."""
    kv_strides = (*call.k_pages.stride()[:3], *call.v_pages.stride()[:3])
    return call.q_THK.stride()[:2], kv_strides, call.block_tables_RB.stride(0)


def pools(call: Call, tile: Tile) -> tuple[Any, Any]:
    """K and V as the device code takes them: descriptors of rows (P * G * block_size, K), or the tensors."""
    if not tile.tma:
        return call.k_pages, call.v_pages
    from triton.tools.tensor_descriptor import TensorDescriptor

    block = [tile.t, call.fixed["BLOCK_K"]]
    rows_of = (pages.transpose(1, 2).flatten(0, 2) for pages in (call.k_pages, call.v_pages))
    k_rows, v_rows = (TensorDescriptor.from_tensor(rows, block) for rows in rows_of)
    return k_rows, v_rows


def takes_descriptor(pages: torch.Tensor, t: int) -> bool:
    """Whether the pages of a head are runs of memory that lie end to end and that hold whole tiles."""
    is_aligned = pages.data_ptr() % 16 == 0 and pages.shape[3] * pages.itemsize % 16 == 0
    return pages.is_cuda and is_aligned and pages.shape[1] % t == 0 and pages.transpose(1, 2).is_contiguous()


def split_tile(call: Call, packed: int) -> Tile:
    """For rows of up to so many queries x heads."""
    return _split_tile(call, max(16, power(packed)))


def wide_split_tile(call: Call) -> Tile:
    """For long query lengths of which there are too few tiles to fill the device."""
    return _split_tile(call, 64)


def _split_tile(call: Call, m: int) -> Tile:
    if call.q_THK.device.type == "cpu":
        return Tile(m, 64, num_warps=4, stages=1, programs=1)
    if call.fixed["BLOCK_K"] > 128:
        return Tile(m, 32, num_warps=4 if m <= 64 else 8, stages=2, tma=has_descriptors(call, 32), programs=2)
    if has_descriptors(call, 64):
        return Tile(m, 64, num_warps=4 if m <= 64 else 8, stages=2, tma=True, programs=3 if m <= 32 else 2)
    return Tile(m, 64, num_warps=4 if m <= 64 else 8, stages=3 if m <= 32 else 2, programs=2)


def extend_tile(call: Call) -> Tile:
    """Where a program has all that its tile sees."""
    if call.q_THK.device.type == "cpu":
        return Tile(EXTEND_M, 64, num_warps=4, stages=1)
    if call.fixed["BLOCK_K"] > 128:
        return Tile(EXTEND_M, 32, num_warps=4, stages=2, tma=has_descriptors(call, 32))
    return Tile(EXTEND_M, 64, num_warps=4, stages=2, tma=has_descriptors(call, 64))


def has_descriptors(call: Call, t: int) -> bool:
    """Whether tiles of t tokens of K and V can be loaded by descriptor."""
    return takes_descriptor(call.k_pages, t) and takes_descriptor(call.v_pages, t)


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    """2 on the CPU, where programs run one after the other."""
    return 2 if device.type == "cpu" else torch.cuda.get_device_properties(device).multi_processor_count


def power(number: int) -> int:
    """The power of two that is not below it."""
    return 1 << (number - 1).bit_length()


SOLUTION = Solution(
    "triton", Band.PERFORMANT, triton_on_cuda, build, graph_safe=True, features=frozenset({SINKS, FP8_PAGES})
)
