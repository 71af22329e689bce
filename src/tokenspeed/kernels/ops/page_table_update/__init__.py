# SPDX-License-Identifier: Apache-2.0
"""Bring page tables on the device up to date with a plan: clear seats, then set single blocks.

tables_GSB: (groups, seats, blocks) int32, blocks contiguous, other strides free, mutated. cleared_M: (M,) int32, seats
whose blocks of all groups become 0; a seat may be named twice. delta_N4: (N, 4) int32, contiguous, rows (seat, group,
block, page), applied after all seats are cleared. Rows that name one block twice name one page for it: a caller who
needs a fixed N repeats a row, or sets a seat that is nobody's to page 0. Numbers are in range; nobody checks them here.
M = 0 and N = 0 do nothing.
"""

from __future__ import annotations

from typing import Protocol

import torch


class PageTableUpdate(Protocol):
    """Signature of the op."""

    def __call__(self, tables_GSB: torch.Tensor, cleared_M: torch.Tensor, delta_N4: torch.Tensor) -> None: ...
