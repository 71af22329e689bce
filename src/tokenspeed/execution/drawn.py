# SPDX-License-Identifier: Apache-2.0
"""What was sampled for a step: on the device at once, where the next step finds it, and later on the host.

Knows neither seats nor how tokens are chosen.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from tokenspeed.core.plan import Int32Array
from tokenspeed.core.request import TokenLogprobs
from tokenspeed.execution.host_copies import Download
from tokenspeed.execution.logprobs import ScoredTokens

BoolArray = NDArray[np.bool_]
Int64Array = NDArray[np.int64]


class SamplerOutput(msgspec.Struct, frozen=True):
    """token_ids_S: 0 where the row is faulty. logprobs: an entry a row, None where not asked for."""

    token_ids_S: Int32Array
    is_faulty_S: BoolArray
    logprobs: tuple[TokenLogprobs | None, ...] | None


class Drawn:
    """The tokens of a step. told_2S: int64, token ids and whether rows are faulty; the first num_rows count. On the
    device, or an array where that is the host: calls of torch cost much of a short step. lost_S: rows that are faulty
    for reasons of the host. scored: some rows, and their log-probabilities. on_read: called once, with what has come,
    before anybody sees it. is_known: the next step finds the tokens already.
    """

    def __init__(
        self,
        told_2S: torch.Tensor | Int64Array,
        num_rows: int,
        lost_S: BoolArray | None = None,
        scored: tuple[Sequence[int], ScoredTokens] | None = None,
        on_read: Callable[[SamplerOutput], None] | None = None,
        *,
        is_known: bool = False,
    ) -> None:
        self.is_known = is_known
        self.told_2S = told_2S
        self._told: Int64Array | Download = told_2S if isinstance(told_2S, np.ndarray) else Download(told_2S)
        self._num_rows = num_rows
        self._lost_S = lost_S
        self._scored = scored
        self._on_read = on_read
        self._lock = threading.Lock()
        self._output: SamplerOutput | None = None

    @property
    def token_ids_S(self) -> torch.Tensor | Int64Array:
        """(S,) int64 on the device."""
        return self.told_2S[0, : self._num_rows]

    def read(self) -> SamplerOutput:
        """The tokens on the host; waits for them. Any thread, any number of times. Raises what the device raises."""
        with self._lock:
            if self._output is None:
                self._output = self._read()
                if self._on_read is not None:
                    self._on_read(self._output)
            return self._output

    def _read(self) -> SamplerOutput:
        told_2S = self._told.wait()[0] if isinstance(self._told, Download) else self._told
        told = told_2S[:, : self._num_rows]
        is_faulty_S = told[1].astype(np.bool_)
        if self._lost_S is not None:
            is_faulty_S |= self._lost_S
        logprobs = None
        if self._scored is not None:
            rows, scored = self._scored
            by_row: list[TokenLogprobs | None] = [None] * len(is_faulty_S)
            for row, entry in zip(rows, scored.entries(), strict=True):
                by_row[row] = entry
            logprobs = tuple(by_row)
        return SamplerOutput(told[0].astype(np.int32), is_faulty_S, logprobs)
