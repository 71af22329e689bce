# SPDX-License-Identifier: Apache-2.0
"""How the tokens of a step are drawn, and what is done to its logits before: penalties, values added to single logits,
masks.

As the host knows it, and the buffers in which a captured graph finds the edits. Knows neither requests nor grammars.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from tokenspeed.core.plan import Int32Array
from tokenspeed.execution.host_copies import uploaded
from tokenspeed.execution.penalties import PenaltyTables
from tokenspeed.execution.staged_arrays import Section, StagedArrays
from tokenspeed.kernels.ops.sampling import Edits, Masks, Sampled, SamplingInputs

Int64Array = NDArray[np.int64]

NO_ROW = 1 << 30
"""Beyond the rows of every step."""
VALUES_MAX = 256
"""Values added to single logits that a captured step has room for; more are added op by op."""


@dataclass(frozen=True, slots=True)
class DrawColumns:
    """How each sampled row is drawn, on the host."""

    temperature_S: NDArray[np.float32]
    seed_S: NDArray[np.int64]
    top_k_S: NDArray[np.int64]
    top_p_S: NDArray[np.float32]
    min_p_S: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class StepEdits:
    """One step of S rows. penalty_rows_P: the row of each seat that has penalties, NO_ROW for the others; None where no
    row has any. counted_seats_S: the seat of each row that has penalties, else nobody's. has_prompts: a row has a
    repetition penalty. values_N are added to the logits of token_ids_N in rows_N. mask_rows_G, and a mask for each, of
    ceil(V / 32) words."""

    penalty_rows_P: Int64Array | None
    counted_seats_S: Int64Array
    has_prompts: bool
    rows_N: Int64Array
    token_ids_N: Int64Array
    values_N: NDArray[np.float32]
    mask_rows_G: Int64Array
    masks: tuple[Int32Array, ...]

    def inputs(self, tables: PenaltyTables, device: torch.device) -> SamplingInputs:
        """What the op is given where it is called on its own: no part that no row needs."""
        penalties = edits = masks = None
        if self.penalty_rows_P is not None:
            penalties = tables.inputs(uploaded(self.penalty_rows_P, device), has_prompts=self.has_prompts)
        if len(self.rows_N):
            edits = Edits(*(uploaded(part, device) for part in (self.rows_N, self.token_ids_N, self.values_N)))
        if self.masks:
            masks = Masks(uploaded(self.mask_rows_G, device), uploaded(np.stack(self.masks), device))
        return SamplingInputs(None, penalties, edits, masks)


SampleStep = Callable[[StepEdits | None], torch.Tensor | None]
"""Tokens and faults of a step, (2, S or more) int64 on the device, good until the next one. Seats have their tokens
then, and penalties have counted them. None, and nothing done, where it has no room for the edits."""


class EditBuffers:
    """Where captured graphs find the edits of a step: one set for all sizes of step, as steps run in order. Always all
    parts, in which what is not there names no row."""

    def __init__(self, tables: PenaltyTables, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self._tables = tables
        self._arrays = StagedArrays(_table(tables.nobody, max_rows), device)
        self._arrays.fill(None)
        self._bits_GW = torch.zeros(max_rows, -(-vocab_size // 32), dtype=torch.int32, device=device)

    def fill(self, edits: StepEdits) -> bool:
        """Whether there is room for them; then they are on their way."""
        if len(edits.rows_N) > VALUES_MAX:
            return False
        self._arrays.fill(edits)
        if edits.masks:
            staged = torch.empty(
                len(edits.masks), self._bits_GW.shape[1], dtype=torch.int32, pin_memory=self._bits_GW.is_cuda
            )
            np.stack(edits.masks, out=staged.numpy())
            self._bits_GW[: len(edits.masks)].copy_(staged, non_blocking=True)
        return True

    def inputs(self) -> SamplingInputs:
        """All parts but draws."""
        arrays = self._arrays
        return SamplingInputs(
            None,
            self._tables.inputs(arrays["penalty_rows_P"], has_prompts=True),
            Edits(arrays["rows_N"], arrays["token_ids_N"], arrays["values_N"]),
            Masks(arrays["mask_rows_G"], self._bits_GW),
        )

    def count(self, sampled: Sampled) -> None:
        """The tokens of rows with penalties, as PenaltyTables.count."""
        seats_S = self._arrays["counted_seats_S"][: len(sampled.token_ids_S)]
        self._tables.count(sampled.token_ids_S, sampled.is_faulty_S, seats_S)


def _table(nobody: int, max_rows: int) -> tuple[Section, ...]:
    nothing = np.zeros(0, np.int64)

    def penalty_rows_P(edits: StepEdits) -> Int64Array:
        return nothing if edits.penalty_rows_P is None else edits.penalty_rows_P

    return (
        Section("penalty_rows_P", nobody + 1, np.int64, penalty_rows_P, NO_ROW),
        Section("counted_seats_S", max_rows, np.int64, lambda edits: edits.counted_seats_S, nobody),
        Section("rows_N", VALUES_MAX, np.int64, lambda edits: edits.rows_N, NO_ROW),
        Section("token_ids_N", VALUES_MAX, np.int64, lambda edits: edits.token_ids_N),
        Section("values_N", VALUES_MAX, np.float32, lambda edits: edits.values_N),
        Section("mask_rows_G", max_rows, np.int64, lambda edits: edits.mask_rows_G, NO_ROW),
    )
