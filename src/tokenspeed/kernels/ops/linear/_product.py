# SPDX-License-Identifier: Apache-2.0
"""torch's product as this op wants it, which on a CUDA device is cuBLAS's. Knows no rule for when to use it."""

from __future__ import annotations

import functools

import torch


def product(
    x_TD: torch.Tensor, weight_ND: torch.Tensor, bias_N: torch.Tensor | None, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """The op itself. float32 of shorter inputs is what was accumulated, where torch gives that out."""
    if out_dtype is None or out_dtype is x_TD.dtype:
        return torch.nn.functional.linear(x_TD, weight_ND, bias_N)
    if out_dtype is not torch.float32 or not widens(x_TD.device, x_TD.dtype):
        return torch.nn.functional.linear(x_TD, weight_ND, bias_N).to(out_dtype)
    y_TN = torch.mm(x_TD, weight_ND.t(), out_dtype=torch.float32)
    return y_TN if bias_N is None else y_TN.add_(bias_N)


@functools.cache
def widens(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a product of this dtype can come out in float32 there. Asked once, before any graph is captured."""
    if device.type != "cuda" or dtype is torch.float32:
        return False
    x = torch.zeros(16, 16, dtype=dtype, device=device)
    try:
        torch.mm(x, x, out_dtype=torch.float32)
    except (TypeError, RuntimeError):
        return False
    return True
