# SPDX-License-Identifier: Apache-2.0
"""What solutions by an optional library share: which calls are for the library, and who attends the rest.

Long rows are the library's where they make enough tiles to fill the device. Rows of few queries are split along K and V
by `triton`, which also zeroes the padding. Calls that the library does not take whole go the way of this folder's best.
Windows are among these: such libraries multiply V outside of a window by zero, which a NaN survives.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass

import torch

from tokenspeed.kernels.ops.paged_attention import PagedAttention, gluon, triton
from tokenspeed.kernels.platform import has_dependent_launch, triton_on_cuda
from tokenspeed.kernels.registry import Kernel, KernelContext, Ok, Reason, Support

TILE_M = 128
"""Packed queries of a tile of these libraries, of which a multiprocessor has one at a time."""


@dataclass(frozen=True, slots=True)
class Rows:
    """A call as the contract names it."""

    q_THK: torch.Tensor
    k_pages: torch.Tensor
    v_pages: torch.Tensor
    query_start: torch.Tensor
    seq_lens_R: torch.Tensor
    block_tables_RB: torch.Tensor
    scale: float
    soft_cap: float | None
    sinks_H: torch.Tensor | None

    @property
    def group(self) -> int:
        return self.q_THK.shape[1] // self.k_pages.shape[2]

    @property
    def few(self) -> int:
        """Queries up to which a row's answers are not the library's to give."""
        return max(1, 16 // self.group)


Attend = Callable[[Rows], torch.Tensor]
"""Answers (T, H, K), new, that may be anything for rows of few queries and for padding."""


def supports(ctx: KernelContext, distribution: str, version: str, extra: str) -> Support:
    """Whether the library runs here. version: how the installed one's must begin."""
    support = triton_on_cuda(ctx)
    if not isinstance(support, Ok):
        return support
    if torch.cuda.get_device_capability(ctx.device)[0] != 9:
        return Reason("is set up for compute capability 9 only")
    if ctx.dtype not in (torch.bfloat16, torch.float16):
        return Reason(f"{ctx.dtype} is not bfloat16 or float16")
    try:
        installed = importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return Reason(f"{distribution} is not installed: pip install 'tokenspeed[{extra}]'")
    return Ok() if installed.startswith(version) else Reason(f"{distribution} is {installed}, not {version}")


def attention(ctx: KernelContext, takes: Callable[[Rows], bool], attend: Attend) -> Kernel:
    """The op, with what attends long rows of calls that the library takes."""
    own: PagedAttention = (gluon if isinstance(gluon.supports(ctx), Ok) else triton).build(ctx)
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
        tables = (query_start, seq_lens_R, block_tables_RB)
        rows = Rows(q_THK, k_pages, v_pages, *tables, scale, soft_cap, sinks_H)
        if window is not None or not has_tiles(rows, max_query_len or q_THK.shape[0]) or not takes(rows):
            return own(
                q_THK,
                k_pages,
                v_pages,
                query_start=query_start,
                seq_lens_R=seq_lens_R,
                block_tables_RB=block_tables_RB,
                scale=scale,
                window=window,
                soft_cap=soft_cap,
                sinks_H=sinks_H,
                max_query_len=max_query_len,
            )
        call = triton.call_of((q_THK, k_pages, v_pages), tables, sinks_H, (scale, window, soft_cap), pdl=pdl)
        call = dataclasses.replace(call, out_THK=attend(rows))
        triton.split(call, triton.split_tile(call, rows.few * rows.group), (1, rows.few), fill=True)
        return call.out_THK

    return paged_attention


def has_tiles(rows: Rows, longest: int) -> bool:
    """Whether 16-bit rows of up to `longest` queries are long, and make a tile for each multiprocessor."""
    num_tokens, num_rows, num_kv_heads = rows.q_THK.shape[0], rows.seq_lens_R.shape[0], rows.k_pages.shape[2]
    is_plain = rows.k_pages.dtype is rows.q_THK.dtype and rows.q_THK.itemsize == 2
    tiles = min(num_tokens * rows.group // TILE_M, num_rows * -(-longest * rows.group // TILE_M))
    is_long = min(num_tokens, longest) * rows.group > triton.FEW
    return is_plain and is_long and tiles * num_kv_heads >= triton.num_multiprocessors(rows.q_THK.device)
