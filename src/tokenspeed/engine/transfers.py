# SPDX-License-Identifier: Apache-2.0
"""Transfers that every rank makes a part of: each has ended once all ranks have said so. Knows leases only."""

from __future__ import annotations

import threading
from collections.abc import Iterable


class TransferLedger:
    """Which ranks have told the end of which lease. Any thread."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._lock = threading.Lock()
        self._told: dict[int, dict[int, bool]] = {}
        self._ended: list[tuple[int, bool]] = []

    def note(self, rank: int, transfers: Iterable[tuple[int, bool]]) -> None:
        """A rank says of leases whether its part of the pages has arrived."""
        with self._lock:
            for lease, ok in transfers:
                told = self._told.setdefault(lease, {})
                assert rank not in told, f"rank {rank} tells the end of lease {lease} twice"
                told[rank] = ok
                if len(told) == self._num_ranks:
                    self._ended.append((lease, all(self._told.pop(lease).values())))

    def take(self) -> tuple[tuple[int, bool], ...]:
        """(lease, ok) of those that have ended on all ranks, each once; ok only where all were."""
        with self._lock:
            ended, self._ended = tuple(self._ended), []
            return ended
