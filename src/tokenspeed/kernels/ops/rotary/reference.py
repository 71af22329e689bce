# SPDX-License-Identifier: Apache-2.0
"""The oracle, in torch."""

from __future__ import annotations

import torch

from tokenspeed.kernels.registry import Band, Ok, Solution


def rotary(q_THK: torch.Tensor, k_TGK: torch.Tensor, positions_T: torch.Tensor, table_PR: torch.Tensor) -> None:
    cos, sin = table_PR[positions_T].unsqueeze(1).chunk(2, dim=-1)
    for x in (q_THK, k_TGK):
        first, second = x[..., : table_PR.shape[1]].float().chunk(2, dim=-1)
        x[..., : table_PR.shape[1]] = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


SOLUTION = Solution("reference", Band.REFERENCE, lambda _ctx: Ok(), lambda _ctx: rotary, batch_invariant=True)
