# SPDX-License-Identifier: Apache-2.0
"""Steps of few tokens, padded to a size that was prepared when the engine started, and replayed as captured graphs.

A step is two graphs, forward and sample. Both read what changes from step to step in buffers that stay where they are,
filled by one copy from the host; the sampled tokens stay on the device, where the next step finds them. Rows and tokens
that pad a step belong to nobody's seat and write to the null page. Where nothing can be captured the same computation
runs op by op, so that the tokens are the same.
Knows sizes and buffers; knows neither plans nor what a model computes.
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tokenspeed.execution.drawn import Drawn
from tokenspeed.execution.forward import Forward
from tokenspeed.execution.input_buffers import InputBuffers, StepInputs
from tokenspeed.kernels.ops.decode_step import DecodeBatch, DecodeStep
from tokenspeed.kernels.ops.sampling import Draws, Filters, SampleFn, SamplingInputs
from tokenspeed.layers.decoder import TOKEN_IDS
from tokenspeed.layers.forward_batch import ForwardBatch, GroupTables
from tokenspeed.spmd.placement import TokenTable
from tokenspeed.spmd.step import StepInput

_log = logging.getLogger("tokenspeed.execution")

TOKENS_MAX = 2048
"""Steps of more tokens keep a GPU busy for longer than it takes to launch them."""
DECODE_ROWS_MAX = 16
"""Rows up to which a decode step is one op, where the model has it."""
_FEW_ROWS = 4

ProgressFn = Callable[[str, int, int, str], None]
DrawColumns = tuple[NDArray[np.generic], ...]


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


class StepBuffers:
    """What changes from step to step, in one piece of device memory. Dimensions of the size, S sampled rows: as many
    as rows."""

    def __init__(self, size: StepSize, num_groups: int, device: torch.device) -> None:
        tokens, rows = size.tokens, size.rows
        eight = [tokens, tokens, *[tokens] * num_groups, rows, rows, rows, rows, rows, rows]
        four = [rows + 1, rows, rows, rows, rows]
        self._lens = (*eight, *four)
        self._num_eight = len(eight)
        self._bytes = torch.zeros(sum(eight) * 8 + sum(four) * 4, dtype=torch.uint8, device=device)
        views = list(self._views(self._bytes))
        self.sources_T, self.positions_T, *slots = views[: 2 + num_groups]
        self.slots_GT = tuple(slots)
        rest = views[2 + num_groups :]
        self.places_R, self.sampled_S, self.seats_S, self.seed_S, self.position_S, self.top_k_S = rest[:6]
        self.query_start, self.seq_lens_R = rest[6:8]
        self.temperature_S, self.top_p_S, self.min_p_S = (view.view(torch.float32) for view in rest[8:])

    def fill(self, arrays: Sequence[NDArray[np.generic]], padding: Sequence[float]) -> None:
        """Copy arrays of the host into the buffers, in the order of the attributes; what is left of each is padded."""
        staged = torch.empty_like(self._bytes, device="cpu", pin_memory=self._bytes.is_cuda)
        for view, array, pad in zip(self._views(staged), arrays, padding, strict=True):
            there = view.numpy()
            if array.dtype == np.float32:
                there = there.view(np.float32)
            there[: len(array)] = array
            there[len(array) :] = pad
        self._bytes.copy_(staged, non_blocking=True)

    def _views(self, whole: torch.Tensor) -> Any:
        start = 0
        for place, length in enumerate(self._lens):
            is_eight = place < self._num_eight
            stop = start + length * (8 if is_eight else 4)
            yield whole[start:stop].view(torch.int64 if is_eight else torch.int32)
            start = stop


class StepGraphs:
    """The prepared sizes. captures: whether they are captured as graphs, or run op by op."""

    def __init__(
        self,
        forward: Forward,
        buffers: InputBuffers,
        sample: SampleFn,
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
        self._device = buffers.tables.device
        self._pool = torch.cuda.graph_pool_handle() if captures else None
        self._decode = sorted(size for size in sizes if size.decodes)
        self._mixed = sorted(size for size in sizes if not size.decodes)
        self._steps: dict[StepSize, _PreparedStep] = {}

    def prepare(self, progress: ProgressFn | None) -> None:
        """Run and capture every size, the largest first, so that the smaller ones share its memory."""
        sizes = [*reversed(self._mixed), *reversed(self._decode)]
        for done, size in enumerate(sizes):
            self._steps[size] = self._prepared(size)
            if progress is not None:
                progress("graphs", done + 1, len(sizes), "graphs")

    def fitting(self, inputs: StepInputs) -> StepSize | None:
        """The least of the sizes that holds a step."""
        num_tokens, num_rows = len(inputs.sources_T), len(inputs.seats_R)
        if num_tokens == num_rows == len(inputs.sampled_rows_S) and bool((inputs.sources_T < 0).all()):
            place = bisect.bisect_left(self._decode, num_rows, key=lambda size: size.rows)
            return self._decode[place] if place < len(self._decode) else None
        fits = (size for size in self._mixed if size.tokens >= num_tokens and size.rows >= num_rows)
        return next(fits, None)

    def launch(
        self, inputs: StepInputs, size: StepSize, columns: DrawColumns | None
    ) -> tuple[torch.Tensor, Drawn | None]:
        """Logits (S, V) of the sampled rows, good until the next launch, and what was sampled by columns: temperature,
        seed, top-k, top-p and min-p of each sampled row. Nothing is sampled without columns."""
        step = self._steps[size]
        step.fill(inputs, self._buffers, columns)
        step.forward()
        num_sampled = len(inputs.sampled_rows_S)
        if columns is None or step.sample is None:
            return step.logits_SV[:num_sampled], None
        step.sample()
        drawn = Drawn(step.told_2S, num_sampled)
        if not step.told_2S.is_cuda:
            drawn.read()  # the next step writes there
        return step.logits_SV[:num_sampled], drawn

    def _prepared(self, size: StepSize) -> _PreparedStep:
        step = _PreparedStep(size, len(self._buffers.tables), self._device)
        step.pad(self._buffers)

        def forward() -> None:
            step.logits_SV = self._logits(step)

        def sample() -> None:
            self._sampled(step)

        step.forward = self._captured(forward)
        if self._samples:
            step.sample = self._captured(sample)
        return step

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
        tables = tuple(tables.index_select(0, inputs.places_R) for tables in buffers.tables)
        if size.decodes:
            token_ids_T = buffers.last_token.index_select(0, inputs.seats_S)
        else:
            token_ids_T = buffers.token_ids(inputs.sources_T)
        if self._decode_step is not None and size.decodes and size.rows <= DECODE_ROWS_MAX:
            return self._decode_step(DecodeBatch(token_ids_T, inputs.positions_T, inputs.seq_lens_R, tables))
        batch = ForwardBatch(
            positions_T=inputs.positions_T,
            query_start=inputs.query_start,
            seq_lens_R=inputs.seq_lens_R,
            max_query_len=1 if size.decodes else size.tokens,
            max_seq_len=tables[0].shape[1] * buffers.block_size,
            groups=tuple(GroupTables(slots_T, each) for slots_T, each in zip(inputs.slots_GT, tables, strict=True)),
            kv_layers=buffers.kv_layers,
        )
        table = TokenTable.of(buffers.seats.mesh, (size.tokens,))
        sampled_index = None if size.decodes else inputs.sampled_S
        return self._forward.logits(
            StepInput(table, {TOKEN_IDS: token_ids_T}, np.arange(size.rows), batch, sampled_index)
        )

    def _sampled(self, step: _PreparedStep) -> None:
        inputs = step.inputs
        filters = Filters(inputs.top_k_S, inputs.top_p_S, inputs.min_p_S)
        draws = Draws(inputs.temperature_S, inputs.seed_S, inputs.position_S, filters)
        sampled = self._sample(step.logits_SV, SamplingInputs(draws))
        self._buffers.last_token.index_copy_(0, inputs.seats_S, sampled.token_ids_S)
        step.told_2S[0].copy_(sampled.token_ids_S)
        step.told_2S[1].copy_(sampled.is_faulty_S)


class _PreparedStep:
    """One size: its buffers, and what computes on them."""

    forward: Callable[[], None]
    sample: Callable[[], None] | None = None
    logits_SV: torch.Tensor

    def __init__(self, size: StepSize, num_groups: int, device: torch.device) -> None:
        self.size = size
        self.inputs = StepBuffers(size, num_groups, device)
        self.told_2S = torch.zeros(2, size.rows, dtype=torch.int64, device=device)

    def pad(self, buffers: InputBuffers) -> None:
        """A step of nobody."""
        nothing, none = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.float32)
        eight: list[NDArray[np.generic]] = [nothing] * (8 + len(self.inputs.slots_GT))
        self.inputs.fill([*eight, np.zeros(1, dtype=np.int64), nothing, none, none, none], self._padding(buffers, 0))

    def fill(self, inputs: StepInputs, buffers: InputBuffers, columns: DrawColumns | None) -> None:
        """The step of the engine."""
        own, none = inputs.own, np.zeros(0, dtype=np.float32)
        temperature, seed, top_k, top_p, min_p = columns or (none, none, none, none, none)
        arrays = (
            inputs.sources_T,
            own.positions_T,
            *own.slots_GT,
            own.places_R,
            inputs.sampled_tokens_S,
            inputs.seats_S,
            seed,
            inputs.position_S,
            top_k,
            own.query_start,
            own.seq_lens_R,
            temperature,
            top_p,
            min_p,
        )
        self.inputs.fill(arrays, self._padding(buffers, len(inputs.sources_T)))

    def _padding(self, buffers: InputBuffers, num_tokens: int) -> tuple[float, ...]:
        """What stands where there is nothing, in the order of StepBuffers: nobody's seat, no token of a row."""
        slots = [0] * len(self.inputs.slots_GT)
        return (0, 0, *slots, buffers.seats.each, 0, buffers.seats.num_seats, 0, 0, 0, num_tokens, 1, 0.0, 1.0, 0.0)
