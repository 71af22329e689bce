# SPDX-License-Identifier: Apache-2.0
"""Tokens of rows of which some are drawn and none is edited, on a host: one call of the op sampling a step.

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
    """has_filters: a row has one."""

    def __init__(self, sample: SampleFn, columns: DrawColumns, *, has_filters: bool) -> None:
        self._sample = sample
        self._position_S: Int64Array = np.zeros(len(columns.seed_S), dtype=np.int64)
        filters = Filters(
            torch.from_numpy(columns.top_k_S), torch.from_numpy(columns.top_p_S), torch.from_numpy(columns.min_p_S)
        )
        draws = Draws(
            torch.from_numpy(columns.temperature_S),
            torch.from_numpy(columns.seed_S),
            torch.from_numpy(self._position_S),
            filters if has_filters else None,
        )
        self._inputs = SamplingInputs(draws)
        self._sampled = Sampled.empty(len(columns.seed_S), torch.device("cpu"))
        self._token_ids_S: Int64Array = self._sampled.token_ids_S.numpy()
        self._is_faulty_S: NDArray[np.bool_] = self._sampled.is_faulty_S.numpy()

    def told(self, logits_SV: torch.Tensor, position_S: Int64Array) -> Int64Array:
        """(2, S) tokens and faults. position_S: the index that each token takes in its sequence."""
        self._position_S[:] = position_S
        self._sample(logits_SV, self._inputs, self._sampled)
        told_2S = np.empty((2, len(position_S)), dtype=np.int64)
        told_2S[0], told_2S[1] = self._token_ids_S, self._is_faulty_S
        return told_2S
