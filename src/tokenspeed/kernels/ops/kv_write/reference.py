# SPDX-License-Identifier: Apache-2.0
"""The oracle, in torch."""

from __future__ import annotations

import torch

from tokenspeed.kernels.kv_pages import to_codes
from tokenspeed.kernels.ops.kv_write import BF16_PAGES, FP8_PAGES, INT8_PAGES
from tokenspeed.kernels.registry import Band, Ok, Solution

FP8_MAX = torch.finfo(torch.float8_e4m3fn).max


def kv_write(
    k_TGK: torch.Tensor, v_TGK: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, slots_T: torch.Tensor
) -> None:
    block_size = k_pages.shape[1]
    pages_T, offsets_T = slots_T // block_size, slots_T % block_size
    for pages, x_TGK in ((k_pages, k_TGK), (v_pages, v_TGK)):
        if pages.dtype is torch.float8_e4m3fn:
            pages.view(torch.uint8)[pages_T, offsets_T] = _as_fp8(x_TGK).view(torch.uint8)
        else:
            kept = to_codes(x_TGK) if pages.dtype is torch.int8 else x_TGK.to(pages.dtype)
            pages[pages_T, offsets_T] = kept


def _as_fp8(x_TGK: torch.Tensor) -> torch.Tensor:
    return x_TGK.float().clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)


SOLUTION = Solution(
    "reference",
    Band.REFERENCE,
    lambda _ctx: Ok(),
    lambda _ctx: kv_write,
    batch_invariant=True,
    features=frozenset({BF16_PAGES, FP8_PAGES, INT8_PAGES}),
)
