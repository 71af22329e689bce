# SPDX-License-Identifier: Apache-2.0
"""Steps of one new token a row on a CPU, each one call of what the op decode_step has prepared.

What a step reads is filled in place, in arrays of the host that stay where they are, as those of a captured graph do.
Knows neither plans nor sampling.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from tokenspeed.core.plan import Int32Array
from tokenspeed.execution.input_buffers import InputBuffers, StepInputs
from tokenspeed.kernels.ops.decode_step import DecodeBatch, DecodeStep, GreedyStep

Int64Array = NDArray[np.int64]


class HostStep:
    """step: of as many rows as there are seats. One rank is all there is."""

    def __init__(self, step: DecodeStep, buffers: InputBuffers) -> None:
        self._step, self._buffers = step, buffers
        self._greedy = step if isinstance(step, GreedyStep) else None
        num_rows, tables = buffers.seats.each, buffers.tables.on_host
        self._token_ids = np.zeros(num_rows, dtype=np.int64)
        self._positions = np.zeros(num_rows, dtype=np.int64)
        self._seq_lens = np.zeros(num_rows, dtype=np.int32)
        self._tables: Int32Array = np.zeros((len(tables), num_rows, tables.shape[2]), dtype=np.int32)
        self._batch, self._num_rows = self._batch_of(0), 0
        self._last_token = buffers.last_token.numpy()
        self._copied: tuple[Int64Array | None, int] = None, 0

    def takes(self, inputs: StepInputs) -> bool:
        """Whether each row computes one token and samples one."""
        return inputs.only_decodes or len(inputs.seats_R) == len(inputs.sources_T) == len(inputs.sampled_rows_S)

    def finds_most_likely(self, num_rows: int) -> bool:
        """Whether `most_likely` takes so many rows."""
        return self._greedy is not None and num_rows <= self._greedy.greedy_rows

    def logits(self, inputs: StepInputs) -> torch.Tensor:
        """(R, V) float32, good until the next step."""
        return self._step(self._filled(inputs))

    def most_likely(self, inputs: StepInputs) -> Int64Array:
        """(2, R): the token of each row whose logit is highest, and whether the row is faulty."""
        assert self._greedy is not None, "see finds_most_likely"
        return self._greedy.most_likely(self._filled(inputs)).copy()

    def _filled(self, inputs: StepInputs) -> DecodeBatch:
        buffers, own, num_rows = self._buffers, inputs.own, len(inputs.seats_R)
        if num_rows != self._num_rows:
            self._batch, self._num_rows = self._batch_of(num_rows), num_rows
        if inputs.only_decodes:
            self._token_ids[:num_rows] = self._last_token[inputs.seats_R]
        else:
            self._token_ids[:num_rows] = buffers.token_ids(torch.from_numpy(inputs.sources_T)).numpy()
        self._positions[:num_rows] = own.positions_T
        self._seq_lens[:num_rows] = own.seq_lens_R
        self._copy_tables(own.places_R)
        return self._batch

    def _copy_tables(self, places_R: Int64Array) -> None:
        """Where they are not there already: most steps decode the rows of the step before, in the same blocks."""
        tables = self._buffers.tables
        copied_R, version = self._copied
        if copied_R is not places_R or version != tables.version:
            self._tables[:, : len(places_R)] = tables.on_host[:, places_R]
            self._copied = places_R, tables.version

    def _batch_of(self, num_rows: int) -> DecodeBatch:
        token_ids, positions, seq_lens = (
            torch.from_numpy(array[:num_rows]) for array in (self._token_ids, self._positions, self._seq_lens)
        )
        return DecodeBatch(token_ids, positions, seq_lens, tuple(torch.from_numpy(self._tables[:, :num_rows])))
