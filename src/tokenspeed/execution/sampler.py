# SPDX-License-Identifier: Apache-2.0
"""Per-seat sampling state, and the inputs of the sampling op made from it.

A sampled token is on the device before anybody on the host knows it; what only a host can do with it (to follow a
grammar) is done when it has come, at the latest when the same seat is sampled again. Knows how a seat is sampled, not
what its request is or when it ends. The maths is the op's.
"""

from __future__ import annotations

import dataclasses
import logging
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from tokenspeed.core.plan import Int32Array, Seating
from tokenspeed.execution.constraints import Constraints, is_constrained
from tokenspeed.execution.drawn import Drawn, SamplerOutput
from tokenspeed.execution.edits import NO_ROW, DrawColumns, SampleStep, StepEdits
from tokenspeed.execution.host_copies import uploaded
from tokenspeed.execution.host_draws import HostDraws
from tokenspeed.execution.logprobs import ScoredTokens
from tokenspeed.execution.penalties import PenaltyTables
from tokenspeed.grammar import GrammarError, Vocabulary
from tokenspeed.kernels.ops.logprobs import LogprobsFn
from tokenspeed.kernels.ops.sampling import GREEDY_BELOW, Draws, Filters, SampleFn, SamplingInputs

_log = logging.getLogger("tokenspeed.execution")

Int64Array = NDArray[np.int64]
BoolArray = NDArray[np.bool_]
_NOTHING_LOST = np.zeros(0, dtype=np.bool_)
_NO_IDS, _NO_VALUES = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.float32)


class Need:
    """What a seat needs beyond the most likely token: bits, as plain integers, which are looked at in every step."""

    DRAW = 1
    FILTER = 2
    PENALTY = 4
    BIAS = 8
    MIN_TOKENS = 16
    LOGPROBS = 32
    FORCED = 64
    CONSTRAINT = 128
    EDITED = PENALTY | BIAS | MIN_TOKENS | CONSTRAINT
    BEYOND_DRAWS = EDITED | FORCED


@dataclass(frozen=True, slots=True)
class _Seat:
    """The parts of a seat's state that most seats do without. repeats: it has a repetition penalty."""

    repeats: bool
    end_ids: Int64Array
    bias_ids: Int64Array
    bias_values: NDArray[np.float32]
    forced_ids: Int32Array | None


@dataclass(frozen=True, slots=True)
class SamplingOps:
    sample: SampleFn
    logprobs: LogprobsFn


class Sampler:
    """Samples rows by seat."""

    def __init__(self, ops: SamplingOps, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
        self.penalties = PenaltyTables(max_num_seqs, vocab_size, device)
        self._sample, self._logprobs = ops.sample, ops.logprobs
        self._vocab_size = vocab_size
        self._device = device
        self._needs = np.zeros(max_num_seqs, dtype=np.int32)
        self._temperature = np.zeros(max_num_seqs, dtype=np.float32)
        self._top_k = np.zeros(max_num_seqs, dtype=np.int64)
        self._top_p = np.ones(max_num_seqs, dtype=np.float32)
        self._min_p = np.zeros(max_num_seqs, dtype=np.float32)
        self._seed = np.zeros(max_num_seqs, dtype=np.int64)
        self._prompt_len = np.zeros(max_num_seqs, dtype=np.int64)
        self._min_len = np.zeros(max_num_seqs, dtype=np.int64)
        self._num_top = np.zeros(max_num_seqs, dtype=np.int64)
        self._ignores_end = np.zeros(max_num_seqs, dtype=np.bool_)
        self._seats: list[_Seat | None] = [None] * max_num_seqs
        self._constraints = Constraints(max_num_seqs, vocab_size)
        self._unread: list[Drawn] = []
        self._known_needs = _NO_IDS, np.zeros(0, dtype=np.int32), 0
        self._host_draws: HostDraws | None = None

    def know(self, vocabulary: Vocabulary) -> None:
        """Before the first seat that has a grammar. Any thread."""
        self._constraints.know(vocabulary)

    def close(self) -> None:
        """End the thread that follows grammars."""
        self._constraints.close()

    def seat(self, seating: Seating) -> None:
        """A request takes a seat; nothing of the one before it stays."""
        seat, sampling = seating.seat, seating.sampling
        self._temperature[seat] = sampling.temperature
        self._top_k[seat] = max(0, sampling.top_k)
        self._top_p[seat] = sampling.top_p
        self._min_p[seat] = sampling.min_p
        self._seed[seat] = _to_int64(_seed_of(seating))
        self._prompt_len[seat] = seating.prompt_len
        self._min_len[seat] = seating.prompt_len + sampling.min_tokens
        self._num_top[seat] = sampling.logprobs or 0
        self._ignores_end[seat] = sampling.ignore_eos
        self._needs[seat] = _needs_of(seating)
        self._known_needs = _NO_IDS, self._needs[:0], 0
        self._seats[seat] = self._rare_state(seating)
        self._constraints.seat(seating)

    def is_greedy(self, seats_S: Int64Array) -> bool:
        """Whether all that these rows need is the most likely token."""
        return self._needs_of_rows(seats_S)[1] == 0

    def sample(
        self, logits_SV: torch.Tensor, seats_S: Int64Array, position_S: Int64Array, prepared: SampleStep | None = None
    ) -> Drawn:
        """One token a row. seats_S: nobody changes it. position_S: the index that the token takes in its sequence.
        prepared: what samples these logits by draw_columns(seats_S), where it can."""
        needs_S, needs = self._needs_of_rows(seats_S)
        lost_S = _NOTHING_LOST
        if needs & Need.CONSTRAINT:
            lost_S = np.zeros(len(seats_S), dtype=np.bool_)
            self._settle()
        edits = self._edits(needs_S, seats_S, position_S, lost_S) if needs & Need.EDITED else None
        prepared_2S = None if prepared is None or needs & Need.FORCED else prepared(edits)
        is_known = prepared_2S is not None
        told_2S: torch.Tensor | Int64Array
        if prepared_2S is not None:
            told_2S = prepared_2S if prepared_2S.is_cuda else prepared_2S.numpy().copy()  # the next step writes there
        elif self._device.type == "cpu" and not needs & Need.BEYOND_DRAWS:
            told_2S = self._told_on_host(logits_SV, needs, seats_S, position_S)
        else:
            told_2S = self._sampled(logits_SV, edits, needs_S, seats_S, position_S)
        scored = self._scored(logits_SV, told_2S, needs_S, seats_S) if needs & Need.LOGPROBS else None
        if not needs & Need.CONSTRAINT:
            return Drawn(told_2S, len(seats_S), None, scored, is_known=is_known)
        rows = np.flatnonzero(needs_S & Need.CONSTRAINT)
        follow = self._follows(rows, seats_S)
        drawn = Drawn(told_2S, len(seats_S), lost_S, scored, on_read=follow, is_known=is_known)
        self._unread.append(drawn)
        if not logits_SV.is_cuda:
            self._settle()  # nothing to wait for, and the next mask is made meanwhile
        return drawn

    def draw_columns(self, seats_S: Int64Array) -> DrawColumns:
        """How each row is drawn."""
        return DrawColumns(
            self._temperature[seats_S],
            self._seed[seats_S],
            self._top_k[seats_S],
            self._top_p[seats_S],
            self._min_p[seats_S],
        )

    def _needs_of_rows(self, seats_S: Int64Array) -> tuple[NDArray[np.int32], int]:
        """Of each row, and of all together. Most steps have the rows of the step before."""
        if seats_S is not self._known_needs[0]:
            needs_S = self._needs[seats_S]
            self._known_needs = seats_S, needs_S, int(np.bitwise_or.reduce(needs_S, initial=0))
            self._host_draws = None
        return self._known_needs[1:]

    def _told_on_host(
        self, logits_SV: torch.Tensor, needs: int, seats_S: Int64Array, position_S: Int64Array
    ) -> Int64Array:
        """(2, S) tokens and faults of rows of which none is edited. needs: of the rows together."""
        if self._host_draws is None:
            columns = self.draw_columns(seats_S) if needs & Need.DRAW else None
            self._host_draws = HostDraws(self._sample, len(seats_S), columns, has_filters=bool(needs & Need.FILTER))
        return self._host_draws.told(logits_SV, position_S)

    def _sampled(
        self,
        logits_SV: torch.Tensor,
        edits: StepEdits | None,
        needs_S: NDArray[np.int32],
        seats_S: Int64Array,
        position_S: Int64Array,
    ) -> torch.Tensor | Int64Array:
        """(2, S) tokens and faults, op by op."""
        needs = int(np.bitwise_or.reduce(needs_S, initial=0))
        inputs = SamplingInputs() if edits is None else edits.inputs(self.penalties, self._device)
        if needs & Need.DRAW:
            draws = self._draws(bool(needs & Need.FILTER), seats_S, position_S)
            inputs = dataclasses.replace(inputs, draws=draws)
        sampled = self._sample(logits_SV, inputs)
        token_ids_S = sampled.token_ids_S
        if needs & Need.FORCED:
            token_ids_S = self._forced(token_ids_S, needs_S, seats_S, position_S)
        if edits is not None and needs & Need.PENALTY:
            self.penalties.count(token_ids_S, sampled.is_faulty_S, self._tensor(edits.counted_seats_S))
        return _told(token_ids_S, sampled.is_faulty_S)

    def _settle(self) -> None:
        """Let grammars have the tokens of all steps so far."""
        unread, self._unread = self._unread, []
        for drawn in unread:
            drawn.read()

    def _follows(self, rows: NDArray[np.intp], seats_S: Int64Array) -> Callable[[SamplerOutput], None]:
        def follow(output: SamplerOutput) -> None:
            for row in rows.tolist():
                if not output.is_faulty_S[row]:
                    self._constraints.accept(int(seats_S[row]), int(output.token_ids_S[row]))

        return follow

    def _rare_state(self, seating: Seating) -> _Seat | None:
        needs = _needs_of(seating)
        if not needs & (Need.PENALTY | Need.BIAS | Need.MIN_TOKENS | Need.FORCED):
            return None
        if needs & Need.PENALTY:
            self.penalties.seat(seating)
        sampling = seating.sampling
        bias = [(token_id, value) for token_id, value in sampling.logit_bias if 0 <= token_id < self._vocab_size]
        return _Seat(
            sampling.repetition_penalty != 1.0,
            np.array([token_id for token_id in seating.end_token_ids if token_id < self._vocab_size], dtype=np.int64),
            np.array([token_id for token_id, _ in bias], dtype=np.int64),
            np.array([value for _, value in bias], dtype=np.float32),
            None if seating.forced_token_ids is None else seating.forced_token_ids.copy(),
        )

    def _edits(
        self, needs_S: NDArray[np.int32], seats_S: Int64Array, position_S: Int64Array, lost_S: BoolArray
    ) -> StepEdits:
        """lost_S: set where a grammar can no longer be followed."""
        is_early_S = (position_S < self._min_len[seats_S]) & ((needs_S & Need.MIN_TOKENS) != 0)
        mask_rows_G, masks = self._masks(needs_S, seats_S, is_early_S, lost_S)
        penalised_P = np.flatnonzero(needs_S & Need.PENALTY)
        penalty_rows_P, counted_seats_S = None, np.full(len(seats_S), self.penalties.nobody)
        if len(penalised_P):
            penalty_rows_P = np.full(self.penalties.nobody + 1, NO_ROW)
            penalty_rows_P[seats_S[penalised_P]] = penalised_P
            counted_seats_S[penalised_P] = seats_S[penalised_P]
        return StepEdits(
            penalty_rows_P,
            counted_seats_S,
            any(self._seat_of(seat).repeats for seat in seats_S[penalised_P].tolist()),
            *self._values(needs_S, seats_S, is_early_S),
            mask_rows_G,
            masks,
        )

    def _masks(
        self, needs_S: NDArray[np.int32], seats_S: Int64Array, is_early_S: BoolArray, lost_S: BoolArray
    ) -> tuple[Int64Array, tuple[Int32Array, ...]]:
        """Rows, and what each may take. Where only an end may come it comes, even early: is_early_S is cleared."""
        rows: list[int] = []
        bits: list[Int32Array] = []
        for row in np.flatnonzero(needs_S & Need.CONSTRAINT).tolist():
            seat = int(seats_S[row])
            may_end = not is_early_S[row] and not self._ignores_end[seat]
            try:
                step = self._constraints.next(seat, may_end=may_end)
            except GrammarError as error:
                _log.error("a request ends here: its grammar can no longer be followed: %s", error)
                lost_S[row] = True
                continue
            if step.must_end:
                is_early_S[row] = False
            if step.mask is not None:
                rows.append(row)
                bits.append(step.mask)
        return np.array(rows, dtype=np.int64), tuple(bits)

    def _draws(self, has_filter: bool, seats_S: Int64Array, position_S: Int64Array) -> Draws:
        filters = None
        if has_filter:
            filters = Filters(*(self._tensor(column[seats_S]) for column in (self._top_k, self._top_p, self._min_p)))
        return Draws(
            self._tensor(self._temperature[seats_S]),
            self._tensor(self._seed[seats_S]),
            self._tensor(position_S),
            filters,
        )

    def _values(
        self, needs_S: NDArray[np.int32], seats_S: Int64Array, is_early_S: BoolArray
    ) -> tuple[Int64Array, Int64Array, NDArray[np.float32]]:
        """Rows, token ids and what is added to their logits."""
        has_bias_S = (needs_S & Need.BIAS) != 0
        rows, ids, values = [_NO_IDS], [_NO_IDS], [_NO_VALUES]
        for row in np.flatnonzero(is_early_S | has_bias_S):
            seat = self._seat_of(int(seats_S[row]))
            if has_bias_S[row]:
                ids.append(seat.bias_ids)
                values.append(seat.bias_values)
                rows.append(np.full(len(seat.bias_ids), row))
            if is_early_S[row]:
                ids.append(seat.end_ids)
                values.append(np.full(len(seat.end_ids), -np.inf, dtype=np.float32))
                rows.append(np.full(len(seat.end_ids), row))
        return np.concatenate(rows), np.concatenate(ids), np.concatenate(values)

    def _forced(
        self, token_ids_S: torch.Tensor, needs_S: NDArray[np.int32], seats_S: Int64Array, position_S: Int64Array
    ) -> torch.Tensor:
        """The tokens that a script wants in place of some of these."""
        wanted_S = np.full(len(seats_S), -1, dtype=np.int64)
        for row in np.flatnonzero(needs_S & Need.FORCED):
            forced_ids = self._seat_of(int(seats_S[row])).forced_ids
            index = int(position_S[row] - self._prompt_len[seats_S[row]])
            if forced_ids is not None and 0 <= index < len(forced_ids):
                wanted_S[row] = forced_ids[index]
        wanted = self._tensor(wanted_S)
        return torch.where(wanted < 0, token_ids_S, wanted)

    def _scored(
        self,
        logits_SV: torch.Tensor,
        told_2S: torch.Tensor | Int64Array,
        needs_S: NDArray[np.int32],
        seats_S: Int64Array,
    ) -> tuple[list[int], ScoredTokens]:
        token_ids_S = torch.as_tensor(told_2S[0, : len(seats_S)])
        rows_N = np.flatnonzero(needs_S & Need.LOGPROBS)
        num_top_N = self._num_top[seats_S[rows_N]].tolist()
        if len(rows_N) < len(seats_S):
            rows = self._tensor(rows_N)
            logits_SV, token_ids_S = logits_SV.index_select(0, rows), token_ids_S.index_select(0, rows)
        return rows_N.tolist(), ScoredTokens(self._logprobs, logits_SV, token_ids_S, num_top_N)

    def _seat_of(self, seat: int) -> _Seat:
        state = self._seats[seat]
        assert state is not None, f"seat {seat} has no state for what it needs"
        return state

    def _tensor(self, array: NDArray[np.generic]) -> torch.Tensor:
        return uploaded(array, self._device)


def _told(token_ids_S: torch.Tensor, is_faulty_S: torch.Tensor) -> torch.Tensor | Int64Array:
    """Both as (2, S) int64."""
    if token_ids_S.is_cuda:
        return torch.stack([token_ids_S, is_faulty_S.to(torch.int64)])
    return np.stack([token_ids_S.numpy(), is_faulty_S.numpy()])


def _needs_of(seating: Seating) -> int:
    sampling = seating.sampling
    needs = 0
    if sampling.temperature >= GREEDY_BELOW:
        needs |= Need.DRAW
        if sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0:
            needs |= Need.FILTER
    if sampling.presence_penalty or sampling.frequency_penalty or sampling.repetition_penalty != 1.0:
        needs |= Need.PENALTY
    if sampling.logit_bias:
        needs |= Need.BIAS
    if sampling.min_tokens > 0 and seating.end_token_ids:
        needs |= Need.MIN_TOKENS
    if sampling.logprobs is not None:
        needs |= Need.LOGPROBS
    if seating.forced_token_ids is not None:
        needs |= Need.FORCED
    if is_constrained(seating):
        needs |= Need.CONSTRAINT
    return needs


def _seed_of(seating: Seating) -> int:
    seed = seating.sampling.seed
    return zlib.crc32(seating.request_id.encode()) if seed is None else seed


def _to_int64(value: int) -> int:
    """The low 64 bits, as a signed number."""
    low = value & ((1 << 64) - 1)
    return low - (1 << 64) if low >> 63 else low
