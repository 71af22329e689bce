# SPDX-License-Identifier: Apache-2.0
"""A device kernel that only reads: the nearest thing to the bandwidth of a GPU's memory. Knows nothing else."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenspeed.bench.clock import clock_of

_PROGRAMS = ((2048, 4, 8, 8), (4096, 4, 4, 8), (4096, 2, 8, 8), (1024, 8, 16, 4), (2048, 8, 4, 8), (8192, 2, 2, 16))
"""(elements of a block, blocks a turn, programs a processor, warps); which is best depends on the GPU."""


@triton.jit  # type: ignore[untyped-decorator]
def _sum(x_N, sums_PB, size, BLOCK: tl.constexpr, UNROLL: tl.constexpr):  # type: ignore[no-untyped-def]
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    sum_B = tl.zeros((BLOCK,), tl.int32)
    for start in range(program * BLOCK * UNROLL, size, num_programs * BLOCK * UNROLL):
        for turn in tl.static_range(UNROLL):
            sum_B += tl.load(x_N + start + turn * BLOCK + tl.arange(0, BLOCK))
    tl.store(sums_PB + program * BLOCK + tl.arange(0, BLOCK), sum_B)


def read_seconds(x_N: torch.Tensor, num_processors: int, num_reads: int) -> float:
    """The shortest of several ways' medians to read all of x_N: int32, contiguous, a multiple of 16384 elements."""
    assert x_N.dtype is torch.int32
    assert x_N.numel() % (1 << 14) == 0
    best_s, clock = float("inf"), clock_of("cuda")
    for block, unroll, occupancy, warps in _PROGRAMS:
        sums_PB = torch.empty(num_processors * occupancy * block, dtype=torch.int32, device=x_N.device)
        grid = (num_processors * occupancy,)

        def read(block: int = block, unroll: int = unroll, warps: int = warps) -> None:
            _sum[grid](x_N, sums_PB, x_N.numel(), block, unroll, num_warps=warps)  # noqa: B023 - called in this turn

        times_s = [clock(read) for _ in range(num_reads + 2)]
        best_s = min(best_s, sorted(times_s[2:])[num_reads // 2])
    return best_s
