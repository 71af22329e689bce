# SPDX-License-Identifier: Apache-2.0
"""The oracle, in torch."""

from __future__ import annotations

import torch

from tokenspeed.kernels.registry import Band, Ok, Solution


def kv_write(
    k_TGK: torch.Tensor, v_TGK: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, slots_T: torch.Tensor
) -> None:
    block_size = k_pages.shape[1]
    pages_T, offsets_T = slots_T // block_size, slots_T % block_size
    k_pages[pages_T, offsets_T] = k_TGK.to(k_pages.dtype)
    v_pages[pages_T, offsets_T] = v_TGK.to(v_pages.dtype)


SOLUTION = Solution("reference", Band.REFERENCE, lambda _ctx: Ok(), lambda _ctx: kv_write, batch_invariant=True)
