# SPDX-License-Identifier: Apache-2.0
"""The oracle, in torch."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from tokenspeed.kernels.registry import Band, Ok, Solution

Int32Array = NDArray[np.int32]


def page_table_update(tables_GSB: torch.Tensor, cleared_M: torch.Tensor, delta_N4: torch.Tensor) -> None:
    if tables_GSB.device.type == "cpu":
        _update(tables_GSB.numpy(), cleared_M.numpy(), delta_N4.numpy())
        return
    tables_GSB[:, cleared_M.long()] = 0
    seats, groups, blocks, pages = delta_N4.unbind(1)
    tables_GSB[groups.long(), seats.long(), blocks.long()] = pages


def _update(tables_GSB: Int32Array, cleared_M: Int32Array, delta_N4: Int32Array) -> None:
    """On a host, where numpy has done it before torch has looked at the indices."""
    tables_GSB[:, cleared_M] = 0
    seats, groups, blocks, pages = delta_N4.T
    tables_GSB[groups, seats, blocks] = pages


SOLUTION = Solution(
    "reference", Band.REFERENCE, lambda _ctx: Ok(), lambda _ctx: page_table_update, batch_invariant=True
)
