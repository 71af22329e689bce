# SPDX-License-Identifier: Apache-2.0
"""How pages keep the K or V of a head: its numbers as they are, or, where pages are of int8, as codes and a scale.

A head x of K numbers becomes y = H x, the Walsh-Hadamard transform of each run of n numbers of it, n the largest power
of two that divides K. It spreads a channel that is many times the others over all of them; and since H H = n, products
of two heads are those of their transforms but for n (arXiv:2404.00456). y is K codes, round(y * 127 / max |y|), halves
to the even one, and behind them four bytes: the float32 s = max |y| / (127 n). So x is about s H codes, and the product
of a query q and x about s (H q) . codes. All in float32. Codes are 0 where max |y| is below 1e-30; where a number is
not finite they are 0 and the scale is NaN, so that no result of it passes for one.

Knows no ops and no devices.
"""

from __future__ import annotations

import torch

INT8_PAGES = "int8_pages"
"""The feature that a solution of an op that reads or writes pages needs where these are of int8."""

SCALE_BYTES = 4
_CODE_MAX = 127.0
_LEAST_HEAD = 1e-30


def page_dim(head_dim: int, dtype: torch.dtype) -> int:
    """The last dimension of pages of this dtype that keep heads of head_dim numbers."""
    return head_dim + SCALE_BYTES if dtype is torch.int8 else head_dim


def to_codes(x_K: torch.Tensor) -> torch.Tensor:
    """(..., K) of floating point as (..., K + 4) int8."""
    y_K = _transformed(x_K.float())
    largest_1 = y_K.abs().amax(dim=-1, keepdim=True)
    is_finite_1 = largest_1.isfinite()  # NaN is the largest of all
    scale_1 = torch.where(is_finite_1, largest_1 / _CODE_MAX / _run(x_K.shape[-1]), float("nan"))
    has_codes_1 = is_finite_1 & (largest_1 >= _LEAST_HEAD)
    codes_K = torch.where(has_codes_1, (y_K * (_CODE_MAX / largest_1)).round(), 0.0)
    return torch.cat((codes_K.to(torch.int8), scale_1.view(torch.int8)), dim=-1)


def from_codes(pages: torch.Tensor) -> torch.Tensor:
    """The reverse: (..., K + 4) int8 as (..., K) float32."""
    scale_1 = pages[..., -SCALE_BYTES:].contiguous().view(torch.float32)
    return _transformed(pages[..., :-SCALE_BYTES].float()) * scale_1


def _run(head_dim: int) -> int:
    return head_dim & -head_dim


def _transformed(x_K: torch.Tensor) -> torch.Tensor:
    """H x: sums and differences of numbers half a run apart, then a quarter, and so on."""
    y_K, distance = x_K, _run(x_K.shape[-1]) // 2
    while distance:
        pairs = y_K.reshape(*x_K.shape[:-1], x_K.shape[-1] // (2 * distance), 2, distance)
        first, second = pairs.unbind(-2)
        y_K = torch.stack((first + second, first - second), dim=-2).reshape(x_K.shape)
        distance //= 2
    return y_K
