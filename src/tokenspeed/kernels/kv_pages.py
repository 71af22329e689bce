# SPDX-License-Identifier: Apache-2.0
"""How pages keep the K or V of a head: its numbers as they are, or, where pages are of int8, as codes and a scale.

A head x of K numbers is K codes, round(x * 127 / max |x|), of two that are as near the even one, and behind them four
bytes: the float32 max |x| / 127, which a code is multiplied by. Computed in float32. Where max |x| is below 1e-36 the
codes are 0; where a number is not finite they are 0 and the scale is NaN, so that no result of it passes for one.

Knows no ops and no devices.
"""

from __future__ import annotations

import torch

INT8_PAGES = "int8_pages"
"""The feature that a solution of an op that reads or writes pages needs where these are of int8."""

SCALE_BYTES = 4
_CODE_MAX = 127.0
_LEAST_HEAD = 1e-36


def page_dim(head_dim: int, dtype: torch.dtype) -> int:
    """The last dimension of pages of this dtype that keep heads of head_dim numbers."""
    return head_dim + SCALE_BYTES if dtype is torch.int8 else head_dim


def to_codes(x_K: torch.Tensor) -> torch.Tensor:
    """(..., K) of floating point as (..., K + 4) int8."""
    x_K = x_K.float()
    largest_1 = x_K.abs().amax(dim=-1, keepdim=True)
    is_finite_1 = largest_1.isfinite()  # NaN is the largest of all
    scale_1 = torch.where(is_finite_1, largest_1 / _CODE_MAX, float("nan"))
    has_codes_1 = is_finite_1 & (largest_1 >= _LEAST_HEAD)
    codes_K = torch.where(has_codes_1, (x_K * (_CODE_MAX / largest_1)).round(), 0.0)
    return torch.cat((codes_K.to(torch.int8), scale_1.view(torch.int8)), dim=-1)


def from_codes(pages: torch.Tensor) -> torch.Tensor:
    """The reverse: (..., K + 4) int8 as (..., K) float32."""
    scale_1 = pages[..., -SCALE_BYTES:].contiguous().view(torch.float32)
    return pages[..., :-SCALE_BYTES].float() * scale_1
