# SPDX-License-Identifier: Apache-2.0
"""What was sampled for a step: on the device at once, where the next step finds it, and later on the host.

Knows neither seats nor how tokens are chosen.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from tokenspeed.core.plan import Int32Array
from tokenspeed.core.request import TokenLogprobs
from tokenspeed.execution.host_copies import Download
from tokenspeed.execution.logprobs import ScoredTokens

BoolArray = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """token_ids_S: 0 where the row is faulty. logprobs: an entry a row, None where not asked for."""

    token_ids_S: Int32Array
    is_faulty_S: BoolArray
    logprobs: tuple[TokenLogprobs | None, ...] | None


class Drawn:
    """The tokens of a step. token_ids_S: int64 on the device; told_2S: these and whether rows are faulty. lost_S: rows
    that are faulty for reasons of the host. scored: some rows, and their log-probabilities. on_read: called once, with
    what has come, before anybody sees it."""

    def __init__(
        self,
        token_ids_S: torch.Tensor,
        is_faulty_S: torch.Tensor,
        lost_S: BoolArray | None = None,
        scored: tuple[Sequence[int], ScoredTokens] | None = None,
        on_read: Callable[[SamplerOutput], None] | None = None,
    ) -> None:
        self.token_ids_S = token_ids_S
        self.told_2S = torch.stack([token_ids_S, is_faulty_S.to(torch.int64)])
        self._told = Download(self.told_2S)
        self._lost_S = lost_S
        self._scored = scored
        self._on_read = on_read
        self._lock = threading.Lock()
        self._output: SamplerOutput | None = None

    @classmethod
    def nothing(cls, device: torch.device) -> Drawn:
        """Of a step that samples no row."""
        none_S = torch.zeros(0, dtype=torch.int64, device=device)
        return cls(none_S, none_S.bool())

    def read(self) -> SamplerOutput:
        """The tokens on the host; waits for them. Any thread, any number of times. Raises what the device raises."""
        with self._lock:
            if self._output is None:
                self._output = self._read()
                if self._on_read is not None:
                    self._on_read(self._output)
            return self._output

    def _read(self) -> SamplerOutput:
        (told,) = self._told.wait()
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
