# SPDX-License-Identifier: Apache-2.0
"""Device code of silu_mul. Knows no launch shapes. F: the numbers of a program, all of one row."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit(do_not_specialize=["num_blocks"])
def gated(x, out, num_blocks, x_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """silu(gate) * up, BLOCK numbers a program; consecutive programs go along a row of num_blocks."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = (tl.program_id(0) // num_blocks).to(tl.int64)
    places_F = tl.program_id(0) % num_blocks * BLOCK + tl.arange(0, BLOCK)
    mask_F = places_F < SIZE
    gate_F = tl.load(x + row * x_stride + places_F, mask=mask_F, other=0.0).to(tl.float32)
    up_F = tl.load(x + row * x_stride + SIZE + places_F, mask=mask_F, other=0.0).to(tl.float32)
    activated_F = gate_F / (1.0 + tl.exp(-gate_F))
    tl.store(out + row * SIZE + places_F, activated_F * up_F, mask=mask_F)
