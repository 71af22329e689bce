# SPDX-License-Identifier: Apache-2.0
"""`triton`, with long rows attended as Hopper wants it: one warpgroup loads, two overlap products and softmax.

The launches are the same for the same shapes: as many programs as there are multiprocessors, which share out what they
find in query_start and seq_lens_R on the device. What its device code does not have (a soft cap, float32, fp8 pages,
other heads and pages) goes the way of `triton`.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from tokenspeed.kernels.ops.paged_attention import FP8_PAGES, SINKS, triton
from tokenspeed.kernels.ops.paged_attention.triton import Call
from tokenspeed.kernels.platform import gluon_on_hopper
from tokenspeed.kernels.registry import Band, Kernel, KernelContext, Solution, Support

HALF_M = 64
"""Packed queries of a warpgroup, of which two share a tile."""
HALF_T = 64
"""Tokens of a load of K or V, of which a step takes two."""
PANEL = 64
"""Dimensions that a load takes of these."""
STAGES = 2
MERGE_M = 16
HEAD_DIMS = (64, 128)
TRITON_VERSION = "3.6"
"""The language of the device code changes from version to version."""


def supports(ctx: KernelContext) -> Support:
    return gluon_on_hopper(ctx, TRITON_VERSION)


def build(ctx: KernelContext) -> Kernel:
    next_item = torch.zeros(1, dtype=torch.int32, device=ctx.device)  # each call leaves it at zero
    return triton.attention(ctx, functools.partial(long_rows, next_item))


def long_rows(next_item: torch.Tensor, call: Call, query_lens: tuple[int, int]) -> bool:
    """Rows of query_lens = (shortest, longest). Whether the next launch may begin before its end."""
    if not suits(call):
        return triton.long_rows(call, query_lens)
    from tokenspeed.kernels.ops.paged_attention._gluon import _triton

    device, head_dim = call.q_THK.device, call.q_THK.shape[2]
    num_programs = triton.num_multiprocessors(device)
    partial_acc = torch.empty((num_programs, 2 * HALF_M, head_dim), dtype=torch.float32, device=device)
    partial_stats = torch.empty((num_programs, 2 * HALF_M, 2), dtype=torch.float32, device=device)
    q_strides, _, table_stride = triton.strides(call)
    keys = ("SINKS", "WINDOW", "HEAD_DIM", "KV_HEADS", "GROUP", "BLOCK_R")
    fixed = {**{name: call.fixed[name] for name in keys}, "HALF_M": HALF_M, "HALF_T": HALF_T}
    _triton.extend[(num_programs,)](
        call.q_THK,
        descriptor(call.k_pages),
        descriptor(call.v_pages),
        call.out_THK,
        partial_acc,
        partial_stats,
        next_item,
        call.query_start,
        call.seq_lens_R,
        call.block_tables_RB,
        call.sinks_H,
        call.num_rows,
        *query_lens,
        q_strides,
        table_stride,
        call.scale,
        **fixed,
        BLOCK_SIZE=call.fixed["BLOCK_SIZE"],
        STAGES=STAGES,
        num_warps=4,
    )
    num_units = call.max_tiles(2 * HALF_M, query_lens[1]) * call.num_kv_heads
    num_cut = min(num_units, num_programs // 2)  # more are not cut into parts
    _triton.merge[(num_cut, 2 * HALF_M // MERGE_M)](
        call.out_THK,
        partial_acc,
        partial_stats,
        next_item,
        call.query_start,
        call.seq_lens_R,
        call.sinks_H,
        call.num_rows,
        num_programs,
        *query_lens,
        **fixed,
        MERGE_M=MERGE_M,
        num_warps=4,
    )
    return False


def suits(call: Call) -> bool:
    """Whether the device code has what the call needs."""
    is_plain = call.k_pages.dtype is call.q_THK.dtype and call.q_THK.itemsize == 2 and not call.fixed["SOFT_CAP"]
    is_aligned = call.q_THK.data_ptr() % 16 == 0 and all(stride % 8 == 0 for stride in call.q_THK.stride()[:2])
    return is_plain and is_aligned and call.q_THK.shape[2] in HEAD_DIMS and triton.has_descriptors(call, HALF_T)


def descriptor(pages: torch.Tensor) -> Any:
    """Of the pool's rows (P * G * block_size, K), HALF_T by PANEL of them a load."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    block = [HALF_T, PANEL]
    dtype = gl.bfloat16 if pages.dtype is torch.bfloat16 else gl.float16
    layout = gl.NVMMASharedLayout.get_default_for(block, dtype)
    return TensorDescriptor.from_tensor(pages.transpose(1, 2).flatten(0, 2), block, layout)


SOLUTION = Solution("gluon", Band.SPECIALISED, supports, build, graph_safe=True, features=frozenset({SINKS, FP8_PAGES}))
