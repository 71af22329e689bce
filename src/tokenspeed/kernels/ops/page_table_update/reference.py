# SPDX-License-Identifier: Apache-2.0
"""The oracle, in torch."""

from __future__ import annotations

import torch

from tokenspeed.kernels.registry import Band, Ok, Solution


def page_table_update(tables_GSB: torch.Tensor, cleared_M: torch.Tensor, delta_N4: torch.Tensor) -> None:
    tables_GSB[:, cleared_M.long()] = 0
    seats, groups, blocks, pages = delta_N4.unbind(1)
    tables_GSB[groups.long(), seats.long(), blocks.long()] = pages


SOLUTION = Solution(
    "reference", Band.REFERENCE, lambda _ctx: Ok(), lambda _ctx: page_table_update, batch_invariant=True
)
