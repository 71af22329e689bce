# SPDX-License-Identifier: Apache-2.0
"""Device code of page_table_update. Knows no launch shapes."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit(do_not_specialize=["num_blocks"])
def clear(tables, cleared, group_stride, seat_stride, num_blocks, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """BLOCK blocks of one seat in one group a program."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    seat = tl.load(cleared + tl.program_id(0)).to(tl.int64)
    group = tl.program_id(1).to(tl.int64)
    blocks_B = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    zeros_B = tl.zeros([BLOCK], tl.int32)
    tl.store(tables + group * group_stride + seat * seat_stride + blocks_B, zeros_B, mask=blocks_B < num_blocks)


@triton.jit(do_not_specialize=["num_changes"])
def scatter(tables, delta, group_stride, seat_stride, num_changes, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """BLOCK changes a program, after what was cleared."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    changes_N = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask_N = changes_N < num_changes
    row_N = delta + changes_N * 4
    seats_N = tl.load(row_N, mask=mask_N, other=0).to(tl.int64)
    groups_N = tl.load(row_N + 1, mask=mask_N, other=0).to(tl.int64)
    blocks_N = tl.load(row_N + 2, mask=mask_N, other=0)
    pages_N = tl.load(row_N + 3, mask=mask_N, other=0)
    tl.store(tables + groups_N * group_stride + seats_N * seat_stride + blocks_N, pages_N, mask=mask_N)
