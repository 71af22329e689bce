# SPDX-License-Identifier: Apache-2.0
"""The oracle, in torch."""

from __future__ import annotations

import torch

from tokenspeed.kernels.registry import Band, Ok, Solution


def rotary(
    q_THK: torch.Tensor,
    k_TGK: torch.Tensor,
    positions_T: torch.Tensor,
    table_PR: torch.Tensor,
    interleaved: bool = False,
) -> None:
    cos, sin = table_PR[positions_T].unsqueeze(1).chunk(2, dim=-1)
    rotary_dim = table_PR.shape[1]
    half = rotary_dim // 2
    firsts, seconds = (
        (slice(0, rotary_dim, 2), slice(1, rotary_dim, 2)) if interleaved else (slice(0, half), slice(half, rotary_dim))
    )
    for x in (q_THK, k_TGK):
        first, second = x[..., firsts].float(), x[..., seconds].float()
        x[..., firsts], x[..., seconds] = first * cos - second * sin, second * cos + first * sin


SOLUTION = Solution("reference", Band.REFERENCE, lambda _ctx: Ok(), lambda _ctx: rotary, batch_invariant=True)
