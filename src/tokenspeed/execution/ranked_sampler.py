# SPDX-License-Identifier: Apache-2.0
"""Sampling among ranks: the first one samples and tells the others, so that no rounding can let them part.

Knows neither logits nor what tokens mean.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from tokenspeed.core.ipc import Vocabulary
from tokenspeed.core.plan import Seating
from tokenspeed.execution.drawn import Drawn
from tokenspeed.execution.edits import DrawColumns, SampleStep
from tokenspeed.execution.sampler import Sampler
from tokenspeed.kernels.ops.collective import Communicator

Int64Array = NDArray[np.int64]


class RankedSampler:
    """The sampler of the first rank; elsewhere what it said. communicator: None where there is one rank."""

    def __init__(self, sampler: Sampler, communicator: Communicator | None, device: torch.device) -> None:
        self._sampler, self.penalties = sampler, sampler.penalties
        self._device = device
        self._is_first = communicator is None or communicator.rank == 0
        self._ranks = None if communicator is None else communicator.group([range(communicator.world_size)])

    def know(self, vocabulary: Vocabulary) -> None:
        """Before the first seat that has a grammar; the first rank's alone. Any thread."""
        self._sampler.know(vocabulary)

    def close(self) -> None:
        """End what follows grammars."""
        self._sampler.close()

    def seat(self, seating: Seating) -> None:
        """A request takes a seat."""
        if self._is_first:
            self._sampler.seat(seating)

    def draw_columns(self, seats_S: Int64Array) -> DrawColumns:
        """As Sampler.draw_columns, on the first rank."""
        return self._sampler.draw_columns(seats_S)

    def is_greedy(self, seats_S: Int64Array) -> bool:
        """As Sampler.is_greedy, where one rank is all."""
        return self._ranks is None and self._sampler.is_greedy(seats_S)

    def sample(
        self, logits_SV: torch.Tensor, seats_S: Int64Array, position_S: Int64Array, prepared: SampleStep | None = None
    ) -> Drawn:
        """As Sampler.sample; log-probabilities are the first rank's alone. prepared: where one rank is all."""
        assert prepared is None or self._ranks is None, "several ranks sample op by op"
        drawn = self._sampler.sample(logits_SV, seats_S, position_S, prepared) if self._is_first else None
        if self._ranks is None or len(seats_S) == 0:
            return drawn or Drawn(torch.zeros(2, 0, dtype=torch.int64, device=self._device), 0)
        told_2S = torch.zeros(2, len(seats_S), dtype=torch.int64, device=self._device)
        if drawn is not None:
            told_2S.copy_(torch.as_tensor(drawn.told_2S))
        self._ranks.broadcast(told_2S)
        return drawn or Drawn(told_2S, len(seats_S))
