# SPDX-License-Identifier: Apache-2.0
"""Tokens of rows of which none is edited, on a host: one call of the op sampling a step.

What rows are drawn with stays where it is while they are the rows of the step before; only positions change. Knows
neither seats nor requests.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from tokenspeed.execution.edits import DrawColumns
from tokenspeed.kernels.ops.sampling import Draws, Filters, Sampled, SampleFn, SamplingInputs

Int64Array = NDArray[np.int64]


class HostDraws:
    """columns: how rows are drawn, None where all are greedy. has_filters: a row has one."""

    def __init__(self, sample: SampleFn, num_rows: int, columns: DrawColumns | None, *, has_filters: bool) -> None:
        self._sample = sample
        self._position_S: Int64Array = np.zeros(num_rows, dtype=np.int64)
        self._inputs = SamplingInputs(None if columns is None else self._draws(columns, has_filters=has_filters))
        self._told_2S: Int64Array = np.zeros((2, num_rows), dtype=np.int64)
        self._sampled = Sampled(torch.from_numpy(self._told_2S[0]), torch.zeros(num_rows, dtype=torch.bool))
        self._is_faulty_S: NDArray[np.bool_] = self._sampled.is_faulty_S.numpy()

    def told(self, logits_SV: torch.Tensor, position_S: Int64Array) -> Int64Array:
        """(2, S) tokens and faults. position_S: the index that each token takes in its sequence."""
        if self._inputs.draws is not None:
            self._position_S[:] = position_S
        self._sample(logits_SV, self._inputs, self._sampled)
        self._told_2S[1] = self._is_faulty_S
        return self._told_2S.copy()

    def _draws(self, columns: DrawColumns, *, has_filters: bool) -> Draws:
        filters = Filters(
            torch.from_numpy(columns.top_k_S), torch.from_numpy(columns.top_p_S), torch.from_numpy(columns.min_p_S)
        )
        return Draws(
            torch.from_numpy(columns.temperature_S),
            torch.from_numpy(columns.seed_S),
            torch.from_numpy(self._position_S),
            filters if has_filters else None,
        )
