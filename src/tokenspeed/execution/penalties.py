# SPDX-License-Identifier: Apache-2.0
"""What penalties look at: how often each seat's request generated each token, which tokens its prompt has, and how
much that counts. On the device, by seat, so that a step names rows and copies nothing.

Knows no step and no row. Memory: 5 bytes for each seat and each token of the vocabulary; on a CPU the system gives it
when it is written.
"""

from __future__ import annotations

import numpy as np
import torch

from tokenspeed.core.plan import Seating
from tokenspeed.execution.host_copies import uploaded
from tokenspeed.kernels.ops.sampling import Penalties


class PenaltyTables:
    """One seat more than there are is nobody's: it counts the tokens of rows without penalties, and nobody looks."""

    def __init__(self, num_seats: int, vocab_size: int, device: torch.device) -> None:
        self.nobody = num_seats
        self.vocab_size, self._device = vocab_size, device
        self._counts_PV = _zeros((num_seats + 1, vocab_size), np.int32, device)
        self._prompts_PV = _zeros((num_seats + 1, vocab_size), np.bool_, device)
        self._factors_3P = torch.zeros(3, num_seats + 1, dtype=torch.float32, device=device)

    def seat(self, seating: Seating) -> None:
        """A request with penalties takes a seat, with what it has generated so far."""
        seat, sampling = seating.seat, seating.sampling
        prompt_ids, output_ids = np.split(seating.token_ids.astype(np.int64), [seating.prompt_len])
        counts_V, prompt_V = self._counts_PV[seat], self._prompts_PV[seat]
        counts_V.zero_()
        if len(output_ids):
            ids = uploaded(output_ids, self._device)
            counts_V.index_add_(0, ids, torch.ones_like(ids, dtype=torch.int32))
        prompt_V.zero_()
        prompt_V.index_fill_(0, uploaded(prompt_ids, self._device), True)
        for row, factor in enumerate(
            (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty)
        ):
            self._factors_3P[row, seat].fill_(factor)

    def inputs(self, rows_P: torch.Tensor, *, has_prompts: bool) -> Penalties:
        """What the op is given. rows_P: (seats + 1,) int64, the row of each seat, one that is not there for the others.
        has_prompts: a row has a repetition penalty."""
        presence_P, frequency_P, repetition_P = self._factors_3P
        prompts_PV = self._prompts_PV if has_prompts else None
        return Penalties(rows_P, self._counts_PV, prompts_PV, presence_P, frequency_P, repetition_P)

    def count(self, token_ids_S: torch.Tensor, is_faulty_S: torch.Tensor, seats_S: torch.Tensor) -> None:
        """These tokens were generated, but where a row is faulty. seats_S: int64 on the device, nobody's for rows
        without penalties."""
        places_S = torch.add(token_ids_S, seats_S, alpha=self.vocab_size)
        times_S = is_faulty_S.logical_not().to(torch.int32)
        self._counts_PV.view(-1).index_add_(0, places_S, times_S)


def _zeros(extent: tuple[int, int], dtype: type[np.generic], device: torch.device) -> torch.Tensor:
    if device.type == "cpu":
        return torch.from_numpy(np.zeros(extent, dtype))  # torch.zeros would write every page of it
    return torch.zeros(extent, dtype=torch.from_numpy(np.zeros(0, dtype)).dtype, device=device)
