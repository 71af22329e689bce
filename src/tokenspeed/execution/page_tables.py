# SPDX-License-Identifier: Apache-2.0
"""Page tables of the seats of a rank, in each cache group: as the host knows them, and on the device.

The host's are up to date at once. The device's follow when the next step is launched: by a launch of their own, or as
part of a captured step that takes the changes along. Knows neither plans nor what a page holds.
"""

from __future__ import annotations

import numpy as np
import torch

from tokenspeed.core.plan import Int32Array
from tokenspeed.execution.host_copies import uploaded
from tokenspeed.kernels.ops.page_table_update import PageTableUpdate

_NOTHING = np.zeros((0, 4), dtype=np.int32)


class PageTables:
    """extent: groups, seats, blocks of a seat. on_host and on_device: int32 of that extent. version: another one after
    each change."""

    def __init__(self, extent: tuple[int, int, int], device: torch.device, update: PageTableUpdate) -> None:
        self.on_host: Int32Array = np.zeros(extent, dtype=np.int32)
        self.on_device = torch.zeros(extent, dtype=torch.int32, device=device)
        self.update = update
        self.version = 0
        self._cleared = np.zeros(0, dtype=np.int32)
        self._delta_N4: Int32Array = _NOTHING

    def change(self, cleared: Int32Array, delta_N4: Int32Array) -> None:
        """Clear seats, then set blocks: rows (seat, group, block, page), none of which names a block that another one
        does."""
        self.flush()
        self.version += 1
        self.on_host[:, cleared] = 0
        seats, groups, blocks, pages = delta_N4.T
        self.on_host[groups, seats, blocks] = pages
        self._cleared, self._delta_N4 = cleared, delta_N4

    def flush(self) -> None:
        """The device's are up to date for what is launched from now on."""
        if len(self._cleared) or len(self._delta_N4):
            self.update(self.on_device, self._uploaded(self._cleared), self._uploaded(self._delta_N4))
            self._forget()

    def take(self, most: int) -> Int32Array:
        """(N, 4), N <= most: what the step that is launched next has to set itself, with `update`. All else is
        flushed."""
        if len(self._cleared) or len(self._delta_N4) > most:
            self.flush()
        taken = self._delta_N4
        self._forget()
        return taken

    def _uploaded(self, array: Int32Array) -> torch.Tensor:
        """Nothing is copied where there is nothing."""
        if len(array):
            return uploaded(array, self.on_device.device)
        return self.on_device.new_empty(array.shape)

    def _forget(self) -> None:
        self._cleared, self._delta_N4 = self._cleared[:0], _NOTHING
