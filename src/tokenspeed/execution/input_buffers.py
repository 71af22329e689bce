# SPDX-License-Identifier: Apache-2.0
"""Per-seat state of the device (page tables, last token, sequence length) and the ForwardBatch made from a plan.

A seat has a page table in each cache group; it changes only by a plan's page_delta. Knows neither requests nor how
tokens are chosen.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from tokenspeed.core.plan import GroupKind, Int32Array, RowField, RowKind, StepPlan
from tokenspeed.execution.kv_cache import PoolSize, copy_pages, zero_pages
from tokenspeed.layers.forward_batch import ForwardBatch, GroupTables, KvLayer

Int64Array = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The batch and what the host knows of its rows. sampled_rows_S: indices into the rows. position_S: the index
    that a sampled token takes in its sequence."""

    batch: ForwardBatch
    seats_R: Int64Array
    kinds_R: Int64Array
    context_lens_R: Int64Array
    query_start: Int64Array
    sampled_rows_S: Int64Array

    @property
    def seats_S(self) -> Int64Array:
        return self.seats_R[self.sampled_rows_S]

    @property
    def seq_lens_R(self) -> Int64Array:
        return self.context_lens_R + np.diff(self.query_start)

    @property
    def position_S(self) -> Int64Array:
        return self.seq_lens_R[self.sampled_rows_S]


class InputBuffers:
    """State by seat. A decode row reads its input token and its position from here, not from the plan."""

    def __init__(self, size: PoolSize, max_num_seqs: int, kv_layers: tuple[KvLayer, ...], device: torch.device) -> None:
        self._size = size
        self._kv_layers = kv_layers
        self._device = device
        # One block beyond max_model_len: a step in flight may be planned past the end of a sequence that has ended.
        self.page_tables = np.zeros((len(size.groups), max_num_seqs, size.blocks_per_seat + 1), dtype=np.int32)
        self._num_blocks = np.array([group.num_blocks for group in size.groups])
        self._may_expire = np.array([group.kind == GroupKind.WINDOW for group in size.groups])
        self.last_token = np.zeros(max_num_seqs, dtype=np.int64)
        self.seq_len = np.zeros(max_num_seqs, dtype=np.int64)

    def apply(self, plan: StepPlan) -> None:
        """Take in what the plan changes in page tables and pages."""
        if len(plan.seated):
            seats = plan.seated[:, 0]
            self.page_tables[:, seats] = 0
            self.seq_len[seats] = 0
        if len(plan.page_delta):
            seats, groups, indices, pages = plan.page_delta.T
            assert groups.max() < len(self._num_blocks), f"no cache group {groups.max()} of {len(self._num_blocks)}"
            assert ((pages > 0) | self._may_expire[groups]).all(), "page delta hands out the null page"
            assert (pages <= self._num_blocks[groups]).all(), (pages.max(), self._num_blocks)
            self.page_tables[groups, seats, indices] = pages
        for group in np.unique(plan.copy[:, 0]).tolist():
            pairs = plan.copy[plan.copy[:, 0] == group]
            copy_pages(self._layers_of(group), self._tensor(pairs[:, 1]).long(), self._tensor(pairs[:, 2]).long())
        for group in np.unique(plan.zero[:, 0]).tolist():
            pages = plan.zero[plan.zero[:, 0] == group, 1]
            zero_pages(self._layers_of(group), self._tensor(pages).long())

    def build(self, plan: StepPlan) -> StepInputs:
        """The batch of this plan. Decode rows come first."""
        block_size = self._size.block_size
        rows = plan.rows.astype(np.int64)
        seats_R, kinds_R = rows[:, RowField.SEAT], rows[:, RowField.KIND]
        query_lens_R = rows[:, RowField.QUERY_LEN]
        is_decode_R = kinds_R == RowKind.DECODE
        num_decodes = int(is_decode_R.sum())
        assert is_decode_R[:num_decodes].all(), "decode rows do not come first"
        assert not rows[:, RowField.DRAFT_LEN].any(), "this runner verifies no drafts"
        context_lens_R = np.where(is_decode_R, self.seq_len[seats_R], rows[:, RowField.CONTEXT_LEN])
        query_start = np.zeros(len(rows) + 1, dtype=np.int64)
        np.cumsum(query_lens_R, out=query_start[1:])
        token_ids_T = np.concatenate([self.last_token[seats_R[:num_decodes]], plan.token_ids])
        assert len(token_ids_T) == query_start[-1], (len(token_ids_T), query_start[-1])
        sampled_rows_S = np.flatnonzero(kinds_R != RowKind.PREFILL)
        seq_lens_R = context_lens_R + query_lens_R
        max_seq_len = int(seq_lens_R.max(initial=0))
        positions_T = np.arange(query_start[-1]) + np.repeat(context_lens_R - query_start[:-1], query_lens_R)
        seats_T, (block_index_T, offset_T) = np.repeat(seats_R, query_lens_R), np.divmod(positions_T, block_size)
        num_blocks = -(-max_seq_len // block_size)
        batch = ForwardBatch(
            token_ids_T=self._tensor(token_ids_T),
            positions_T=self._tensor(positions_T),
            query_start=self._tensor(query_start.astype(np.int32)),
            seq_lens_R=self._tensor(seq_lens_R.astype(np.int32)),
            sample_index_S=self._tensor(query_start[1:][sampled_rows_S] - 1),
            max_query_len=int(query_lens_R.max(initial=0)),
            max_seq_len=max_seq_len,
            groups=tuple(
                GroupTables(
                    self._tensor(tables[seats_T, block_index_T].astype(np.int64) * block_size + offset_T),
                    self._tensor(tables[seats_R, :num_blocks]),
                )
                for tables in self.page_tables
            ),
            kv_layers=self._kv_layers,
        )
        return StepInputs(batch, seats_R, kinds_R, context_lens_R, query_start, sampled_rows_S)

    def _layers_of(self, group: int) -> list[KvLayer]:
        return [layer for layer in self._kv_layers if layer.group == group]

    def commit(self, inputs: StepInputs, token_ids_S: Int32Array) -> None:
        """The step has run: these tokens were sampled and the K/V of all its rows are written."""
        self.seq_len[inputs.seats_R] = inputs.seq_lens_R
        self.last_token[inputs.seats_S] = token_ids_S

    def _tensor(self, array: NDArray[np.generic]) -> torch.Tensor:
        # Kernels take the last dimension to be contiguous, which a slice or a transposed pick need not be.
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)
