# SPDX-License-Identifier: Apache-2.0
"""A launch in Triton for seats to clear and one for blocks to set; none for what there is nothing of."""

from __future__ import annotations

import torch

from tokenspeed.kernels.platform import has_dependent_launch, triton_on_cuda
from tokenspeed.kernels.registry import Band, Kernel, KernelContext, Solution

BLOCKS = 1024
CHANGES = 128


def build(ctx: KernelContext) -> Kernel:
    from tokenspeed.kernels.ops.page_table_update import _triton

    pdl = has_dependent_launch(ctx.device)
    launch = {"launch_pdl": True} if pdl else {}

    def page_table_update(tables_GSB: torch.Tensor, cleared_M: torch.Tensor, delta_N4: torch.Tensor) -> None:
        num_groups, _, num_blocks = tables_GSB.shape
        num_cleared, num_changes = len(cleared_M), len(delta_N4)
        strides = tables_GSB.stride()[:2]
        assert tables_GSB.dtype is cleared_M.dtype is delta_N4.dtype is torch.int32, tables_GSB.dtype
        assert tables_GSB.stride(2) == 1, tables_GSB.stride()
        assert delta_N4.is_contiguous(), delta_N4.stride()
        if num_cleared:
            _triton.clear[(num_cleared, num_groups, -(-num_blocks // BLOCKS))](
                tables_GSB, cleared_M, *strides, num_blocks, BLOCK=BLOCKS, PDL=pdl, **launch
            )
        if num_changes:
            _triton.scatter[(-(-num_changes // CHANGES),)](
                tables_GSB, delta_N4, *strides, num_changes, BLOCK=CHANGES, PDL=pdl, **launch
            )

    return page_table_update


SOLUTION = Solution("triton", Band.PERFORMANT, triton_on_cuda, build, graph_safe=True, batch_invariant=True)
