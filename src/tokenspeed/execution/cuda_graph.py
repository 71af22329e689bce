# SPDX-License-Identifier: Apache-2.0
"""Steps of few tokens, padded to a size that was prepared when the engine started, and replayed as captured graphs.

A step is two graphs, forward and sample; of sample there is another for steps with penalties, biases or masks. They
read what changes from step to step in buffers that stay where they are, filled by one copy from the host; the sampled
tokens stay on the device, where the next step finds them. Rows and tokens that pad a step belong to nobody's seat and
write to the null page. Where nothing can be captured the same computation runs op by op, so that the tokens are the
same.
Knows sizes and buffers; knows neither plans nor what a model computes.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from tokenspeed.core.plan import Int32Array
from tokenspeed.execution.edits import DrawColumns, EditBuffers, SampleStep, StepEdits
from tokenspeed.execution.forward import Forward
from tokenspeed.execution.host_copies import uploaded
from tokenspeed.execution.input_buffers import InputBuffers, StepInputs
from tokenspeed.execution.penalties import PenaltyTables
from tokenspeed.execution.staged_arrays import Section, StagedArrays
from tokenspeed.kernels.compile_ahead import compiled_ahead
from tokenspeed.kernels.ops.decode_step import DecodeBatch, DecodeStep
from tokenspeed.kernels.ops.sampling import Draws, Filters, Sampled, SampleFn, SamplingInputs
from tokenspeed.kernels.platform import num_cpus
from tokenspeed.layers.decoder import TOKEN_IDS
from tokenspeed.layers.forward_batch import ForwardBatch, GroupTables
from tokenspeed.spmd.placement import TokenTable
from tokenspeed.spmd.step import StepInput

TOKENS_MAX = 2048
"""Steps of more tokens keep a GPU busy for longer than it takes to launch them."""
DECODE_ROWS_MAX = 16
"""Rows up to which a decode step is one op, where the model has it."""
_FEW_ROWS = 4

ProgressFn = Callable[[str, int, int, str], None]


@dataclass(frozen=True, slots=True, order=True)
class StepSize:
    """tokens: of the step, padding included. rows: that attend; each has one token in a step that only decodes."""

    tokens: int
    rows: int
    decodes: bool


def step_sizes(max_num_seqs: int, max_num_tokens: int) -> tuple[StepSize, ...]:
    """Those to prepare, smallest first: fine enough that padding costs little, few enough that a start does not."""
    decode = [rows for rows in _rising(max_num_seqs) if rows < max_num_seqs] + [max_num_seqs]
    tokens = [size for size in _rising(min(max_num_tokens, TOKENS_MAX)) if size >= 16]
    rows = sorted({min(_FEW_ROWS, max_num_seqs), max_num_seqs})
    return (
        *(StepSize(each, each, decodes=True) for each in decode),
        *(StepSize(size, each, decodes=False) for size in tokens for each in rows if each <= size),
    )


def _rising(most: int) -> list[int]:
    """In steps of a half at the most, from 128 on of a quarter, from 1024 on of an eighth."""
    sizes = [1, 2, 4, 8, 12, 16, 24, 32, 48, 64]
    while sizes[-1] < most:
        sizes.append(sizes[-1] + min(128, max(32, 1 << (sizes[-1].bit_length() - 3))))
    return [size for size in sizes if size <= most]


class _Given(NamedTuple):
    """What the buffers of a step are filled with. delta_N4: what it sets in page tables."""

    inputs: StepInputs
    columns: DrawColumns
    delta_N4: Int32Array


def _table(size: StepSize, buffers: InputBuffers) -> tuple[Section, ...]:
    """What changes from step to step. Padding is nobody's seat, and no token of a row. S sampled rows: as many as
    rows."""
    tokens, rows, seats = size.tokens, size.rows, buffers.seats

    def slots(group: int) -> Section:
        return Section(f"slots_{group}", tokens, np.int64, lambda given: buffers.slots(given.inputs.own, group))

    def of(name: str, dtype: type[np.generic], source: Callable[[_Given], Any], padding: float | None = 0) -> Section:
        return Section(name, rows, dtype, source, padding)

    nothing_N4 = np.tile(np.array([seats.each, 0, 0, 0], dtype=np.int32), (_delta_len(size), 1))  # null pages, as ever

    def delta(given: _Given) -> Int32Array:
        return np.concatenate((given.delta_N4, nothing_N4[len(given.delta_N4) :])).ravel()

    return (
        Section("delta", 4 * _delta_len(size), np.int32, delta),
        Section("sources_T", tokens, np.int64, lambda given: given.inputs.sources_T),
        Section("positions_T", tokens, np.int64, lambda given: given.inputs.own.positions_T),
        *(slots(group) for group in range(buffers.num_groups)),
        Section("query_start", rows + 1, np.int32, lambda given: given.inputs.own.query_start, None),
        of("seq_lens_R", np.int32, lambda given: given.inputs.own.seq_lens_R, 1),
        of("places_R", np.int64, lambda given: given.inputs.own.places_R, seats.each),
        of("sampled_S", np.int64, lambda given: given.inputs.sampled_tokens_S),
        of("seats_S", np.int64, lambda given: given.inputs.seats_S, seats.num_seats),
        of("position_S", np.int64, lambda given: given.inputs.position_S),
        of("seed_S", np.int64, lambda given: given.columns.seed_S),
        of("top_k_S", np.int64, lambda given: given.columns.top_k_S),
        of("temperature_S", np.float32, lambda given: given.columns.temperature_S),
        of("top_p_S", np.float32, lambda given: given.columns.top_p_S, 1.0),
        of("min_p_S", np.float32, lambda given: given.columns.min_p_S),
    )


def _delta_len(size: StepSize) -> int:
    """Blocks of page tables that a step sets itself at most. A row that decodes begins a block now and then, and a
    window lets one go; other steps are launched behind their changes."""
    return max(_FEW_ROWS, size.rows) if size.decodes else 0


class StepGraphs:
    """The prepared sizes. captures: whether they are captured as graphs, or run op by op."""

    def __init__(
        self,
        forward: Forward,
        buffers: InputBuffers,
        sample: SampleFn,
        penalties: PenaltyTables,
        sizes: Sequence[StepSize],
        *,
        captures: bool,
        samples: bool,
        decode_step: DecodeStep | None = None,
    ) -> None:
        """samples: the sampling op may be captured too; else tokens are sampled op by op. decode_step: what computes
        steps of DECODE_ROWS_MAX rows at the most that only decode, in place of the model's own ops."""
        self._decode_step = decode_step
        self._forward, self._buffers, self._sample = forward, buffers, sample
        self._captures, self._samples = captures, samples
        vocab_size, max_rows = penalties.vocab_size, max(size.rows for size in sizes)
        self._edits = EditBuffers(penalties, max_rows, vocab_size, buffers.device)
        self._pool = torch.cuda.graph_pool_handle() if captures else None
        self._decode = sorted(size for size in sizes if size.decodes)
        self._mixed = sorted(size for size in sizes if not size.decodes)
        self._steps: dict[StepSize, _PreparedStep] = {}

    def prepare(self, progress: ProgressFn | None) -> None:
        """Run and capture every size, the largest first, so that the smaller ones share its memory."""
        sizes = [*reversed(self._mixed), *reversed(self._decode)]
        self._steps = {size: _PreparedStep(size, self._buffers) for size in sizes}
        if self._captures:
            with compiled_ahead(num_cpus()):
                for step in self._steps.values():
                    self._touch(step)
        for done, step in enumerate(self._steps.values()):
            self._prepare(step)
            if progress is not None:
                progress("graphs", done + 1, len(sizes), "graphs")

    def fitting(self, inputs: StepInputs) -> StepSize | None:
        """The least of the sizes that holds a step."""
        num_tokens, num_rows = len(inputs.sources_T), len(inputs.seats_R)
        if inputs.only_decodes:
            place = bisect.bisect_left(self._decode, num_rows, key=lambda size: size.rows)
            return self._decode[place] if place < len(self._decode) else None
        fits = (size for size in self._mixed if size.tokens >= num_tokens and size.rows >= num_rows)
        return next(fits, None)

    def forward(self, inputs: StepInputs, size: StepSize, columns: DrawColumns) -> torch.Tensor:
        """Logits (S, V) of the sampled rows, good until the next step."""
        step = self._steps[size]
        step.inputs.fill(_Given(inputs, columns, self._buffers.tables.take(_delta_len(size))))
        step.forward()
        return step.logits_SV[: len(inputs.sampled_rows_S)]

    def sampling(self, size: StepSize) -> SampleStep | None:
        """What samples the step whose forward ran last, by its columns; None where that is not prepared."""
        step = self._steps[size]
        if step.sample is None or step.sample_edited is None:
            return None
        sample, sample_edited = step.sample, step.sample_edited

        def sampled(edits: StepEdits | None) -> torch.Tensor | None:
            if edits is None:
                sample()
            elif self._edits.fill(edits):
                sample_edited()
            else:
                return None
            return step.told_2S

        return sampled

    def sampling_behind(self, logits_SV: torch.Tensor, inputs: StepInputs, columns: DrawColumns) -> SampleStep | None:
        """As sampling, of a step that ran op by op: by the kernels of captured ones, so that none is compiled late."""
        if not self._samples:
            return None

        def sampled(edits: StepEdits | None) -> torch.Tensor | None:
            if edits is not None and not self._edits.fill(edits):
                return None
            device, none = self._buffers.device, SamplingInputs()
            top_k_S, top_p_S, min_p_S, temperature_S, seed_S, position_S = (
                uploaded(column, device)
                for column in (
                    columns.top_k_S,
                    columns.top_p_S,
                    columns.min_p_S,
                    columns.temperature_S,
                    columns.seed_S,
                    inputs.position_S,
                )
            )
            draws = Draws(temperature_S, seed_S, position_S, Filters(top_k_S, top_p_S, min_p_S))
            drawn_by = dataclasses.replace(none if edits is None else self._edits.inputs(), draws=draws)
            found = self._sample(logits_SV, drawn_by)
            if edits is not None:
                self._edits.count(found)
            self._buffers.commit(inputs, found.token_ids_S)
            return torch.stack([found.token_ids_S, found.is_faulty_S.to(torch.int64)])

        return sampled

    def _touch(self, step: _PreparedStep) -> None:
        """Call all that a step calls, where that computes nothing. Tokens that nobody computed may be any number."""
        step.logits_SV = self._logits(step)
        if self._samples:
            self._sampled(step, SamplingInputs())
            self._sampled(step, self._edits.inputs())
        self._buffers.last_token.zero_()

    def _prepare(self, step: _PreparedStep) -> None:
        def forward() -> None:
            step.logits_SV = self._logits(step)

        def sample() -> None:
            self._sampled(step, SamplingInputs())

        def sample_edited() -> None:
            self._edits.count(self._sampled(step, self._edits.inputs()))

        step.forward = self._captured(forward)
        if self._samples:
            step.sample = self._captured(sample)
            step.sample_edited = self._captured(sample_edited)

    def _captured(self, run: Callable[[], None]) -> Callable[[], None]:
        run()  # what a kernel sets up when it is first used cannot be captured
        if not self._captures:
            return run
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(
            graph, pool=self._pool, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"
        ):
            run()
        return graph.replay

    def _logits(self, step: _PreparedStep) -> torch.Tensor:
        size, inputs, buffers = step.size, step.inputs, self._buffers
        if size.decodes:
            delta_N4 = inputs["delta"].view(-1, 4)
            buffers.tables.update(buffers.tables.on_device, delta_N4.new_empty(0), delta_N4)
        tables = tuple(tables.index_select(0, inputs["places_R"]) for tables in buffers.tables.on_device)
        if size.decodes:
            token_ids_T = buffers.last_token.index_select(0, inputs["seats_S"])
        else:
            token_ids_T = buffers.token_ids(inputs["sources_T"])
        if self._decode_step is not None and size.decodes and size.rows <= DECODE_ROWS_MAX:
            return self._decode_step(DecodeBatch(token_ids_T, inputs["positions_T"], inputs["seq_lens_R"], tables))
        batch = ForwardBatch(
            positions_T=inputs["positions_T"],
            query_start=inputs["query_start"],
            seq_lens_R=inputs["seq_lens_R"],
            max_query_len=1 if size.decodes else size.tokens,
            max_seq_len=tables[0].shape[1] * buffers.block_size,
            groups=tuple(GroupTables(inputs[f"slots_{group}"], each) for group, each in enumerate(tables)),
            kv_layers=buffers.kv_layers,
        )
        table = TokenTable.of(buffers.seats.mesh, (size.tokens,))
        sampled_index = None if size.decodes else inputs["sampled_S"]
        return self._forward.logits(
            StepInput(table, {TOKEN_IDS: token_ids_T}, np.arange(size.rows), batch, sampled_index)
        )

    def _sampled(self, step: _PreparedStep, edits: SamplingInputs) -> Sampled:
        inputs = step.inputs
        filters = Filters(inputs["top_k_S"], inputs["top_p_S"], inputs["min_p_S"])
        draws = Draws(inputs["temperature_S"], inputs["seed_S"], inputs["position_S"], filters)
        sampled = self._sample(step.logits_SV, dataclasses.replace(edits, draws=draws))
        self._buffers.last_token.index_copy_(0, inputs["seats_S"], sampled.token_ids_S)
        step.told_2S[0].copy_(sampled.token_ids_S)
        step.told_2S[1].copy_(sampled.is_faulty_S)
        return sampled


class _PreparedStep:
    """One size: its buffers, at first of a step of nobody, and what computes on them."""

    forward: Callable[[], None]
    sample: Callable[[], None] | None = None
    sample_edited: Callable[[], None] | None = None
    logits_SV: torch.Tensor

    def __init__(self, size: StepSize, buffers: InputBuffers) -> None:
        device = buffers.device
        self.size = size
        self.inputs = StagedArrays(_table(size, buffers), device)
        self.inputs.fill(None)
        self.told_2S = torch.zeros(2, size.rows, dtype=torch.int64, device=device)
