# SPDX-License-Identifier: Apache-2.0
"""The oracle, in torch. Rounds to x's dtype before out_dtype, as torch's product does."""

from __future__ import annotations

import torch

from tokenspeed.kernels.registry import Band, Ok, Solution


def linear(
    x_TD: torch.Tensor, weight_ND: torch.Tensor, bias_N: torch.Tensor | None, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    y_TN = torch.nn.functional.linear(x_TD, weight_ND, bias_N)
    return y_TN if out_dtype is None else y_TN.to(out_dtype)


SOLUTION = Solution("reference", Band.REFERENCE, lambda _ctx: Ok(), lambda _ctx: linear)
