# SPDX-License-Identifier: Apache-2.0
"""Per-seat state of the device (page tables, last token, sequence length) and a step's input made from a plan.

A seat has a page table in each cache group; it changes only by a plan's page_delta. Seats are numbered over all
partitions of data-parallel attention: a rank keeps page tables of its own, and what is known of a sequence of all.
Knows neither requests nor how tokens are chosen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tokenspeed.core.plan import GroupKind, Int32Array, RowField, RowKind, StepPlan
from tokenspeed.execution.kv_cache import PoolSize, copy_pages, zero_pages
from tokenspeed.layers.build import ONE_RANK
from tokenspeed.layers.decoder import TOKEN_IDS
from tokenspeed.layers.forward_batch import ForwardBatch, GroupTables, KvLayer
from tokenspeed.spmd.mesh import Mesh
from tokenspeed.spmd.placement import TokenTable
from tokenspeed.spmd.step import StepInput

Int64Array = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StepInputs:
    """A step and what the host knows of its rows: those of a plan, partition after partition. order_R: a row's place in
    the plan. sampled_rows_S: indices into the rows. position_S: the index that a sampled token takes in its
    sequence."""

    step: StepInput
    order_R: Int64Array
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


@dataclass(frozen=True, slots=True)
class Seats:
    """Which seats there are. each: seats of a partition. partition: this rank's, of those that the mesh has."""

    each: int
    mesh: Mesh = ONE_RANK
    partition: int = 0

    @property
    def num_seats(self) -> int:
        """Over all partitions."""
        return self.each * self.mesh.sizes.attention_dp

    @property
    def first(self) -> int:
        """The first seat of this rank's partition."""
        return self.partition * self.each

    def is_own(self, seats: NDArray[np.integer[Any]]) -> NDArray[np.bool_]:
        """Which of these seats are of this rank's partition."""
        own: NDArray[np.bool_] = seats // self.each == self.partition
        return own


class InputBuffers:
    """State by seat. A decode row reads its input token and its position from here, not from the plan."""

    def __init__(self, size: PoolSize, seats: Seats, kv_layers: tuple[KvLayer, ...], device: torch.device) -> None:
        self._size = size
        self._seats = seats
        self._kv_layers = kv_layers
        self._device = device
        # One block beyond max_model_len: a step in flight may be planned past the end of a sequence that has ended.
        self.page_tables = np.zeros((len(size.groups), seats.each, size.blocks_per_seat + 1), dtype=np.int32)
        self._num_blocks = np.array([group.num_blocks for group in size.groups])
        self._may_expire = np.array([group.kind == GroupKind.WINDOW for group in size.groups])
        self.last_token = np.zeros(seats.num_seats, dtype=np.int64)
        self.seq_len = np.zeros(seats.num_seats, dtype=np.int64)

    def apply(self, plan: StepPlan) -> None:
        """Take in what the plan changes in page tables and pages."""
        if len(plan.seated):
            seats = plan.seated[:, 0]
            self.page_tables[:, seats[self._seats.is_own(seats)] - self._seats.first] = 0
            self.seq_len[seats] = 0
        delta = plan.page_delta[self._seats.is_own(plan.page_delta[:, 0])]
        if len(delta):
            seats, groups, indices, pages = delta.T
            assert groups.max() < len(self._num_blocks), f"no cache group {groups.max()} of {len(self._num_blocks)}"
            assert ((pages > 0) | self._may_expire[groups]).all(), "page delta hands out the null page"
            assert (pages <= self._num_blocks[groups]).all(), (pages.max(), self._num_blocks)
            self.page_tables[groups, seats - self._seats.first, indices] = pages
        for group in np.unique(plan.copy[:, 0]).tolist():
            pairs = plan.copy[plan.copy[:, 0] == group]
            copy_pages(self._layers_of(group), self._tensor(pairs[:, 1]).long(), self._tensor(pairs[:, 2]).long())
        for group in np.unique(plan.zero[:, 0]).tolist():
            pages = plan.zero[plan.zero[:, 0] == group, 1]
            zero_pages(self._layers_of(group), self._tensor(pages).long())

    def build(self, plan: StepPlan) -> StepInputs:
        """The step of this plan. Decode rows come first in each partition."""
        planned = plan.rows.astype(np.int64)
        partition_R = planned[:, RowField.SEAT] // self._seats.each
        order_R = np.argsort(partition_R, kind="stable")
        rows, partition_R = planned[order_R], partition_R[order_R]
        seats_R, kinds_R = rows[:, RowField.SEAT], rows[:, RowField.KIND]
        query_lens_R = rows[:, RowField.QUERY_LEN]
        assert not rows[:, RowField.DRAFT_LEN].any(), "this runner verifies no drafts"
        context_lens_R = np.where(kinds_R == RowKind.DECODE, self.seq_len[seats_R], rows[:, RowField.CONTEXT_LEN])
        query_start = _starts(query_lens_R)
        sampled_rows_S = np.flatnonzero(kinds_R != RowKind.PREFILL)
        num_partitions = self._seats.mesh.sizes.attention_dp
        tokens_P = np.bincount(partition_R, weights=query_lens_R, minlength=num_partitions).astype(np.int64)
        own = slice(*np.searchsorted(partition_R, (self._seats.partition, self._seats.partition + 1)).tolist())
        step = StepInput(
            TokenTable.of(self._seats.mesh, tokens_P.tolist()),
            {TOKEN_IDS: self._tensor(self._token_ids(plan, planned, order_R))},
            query_start[1:][sampled_rows_S] - 1,
            self._batch(seats_R[own], context_lens_R[own], query_lens_R[own]),
        )
        return StepInputs(step, order_R, seats_R, kinds_R, context_lens_R, query_start, sampled_rows_S)

    def _token_ids(self, plan: StepPlan, planned: Int64Array, order_R: Int64Array) -> Int64Array:
        """(T,) of all rows in the order of the step."""
        is_decode_R = planned[:, RowField.KIND] == RowKind.DECODE
        num_decodes = int(is_decode_R.sum())
        assert is_decode_R[:num_decodes].all(), "decode rows do not come first"
        ids_T = np.concatenate([self.last_token[planned[:num_decodes, RowField.SEAT]], plan.token_ids])
        query_lens_R = planned[:, RowField.QUERY_LEN]
        starts = _starts(query_lens_R)
        assert len(ids_T) == starts[-1], (len(ids_T), starts[-1])
        if self._seats.mesh.sizes.attention_dp == 1:
            return ids_T
        lens_R, firsts_R = query_lens_R[order_R], starts[:-1][order_R]
        places_T = np.arange(starts[-1]) + np.repeat(firsts_R - _starts(lens_R)[:-1], lens_R)
        return np.take(ids_T, places_T)

    def _batch(self, seats_R: Int64Array, context_lens_R: Int64Array, query_lens_R: Int64Array) -> ForwardBatch:
        """The rows of this rank's partition."""
        block_size, query_start = self._size.block_size, _starts(query_lens_R)
        seq_lens_R, places_R = context_lens_R + query_lens_R, seats_R - self._seats.first
        max_seq_len = int(seq_lens_R.max(initial=0))
        positions_T = np.arange(query_start[-1]) + np.repeat(context_lens_R - query_start[:-1], query_lens_R)
        places_T, (block_index_T, offset_T) = np.repeat(places_R, query_lens_R), np.divmod(positions_T, block_size)
        num_blocks = -(-max_seq_len // block_size)
        return ForwardBatch(
            positions_T=self._tensor(positions_T),
            query_start=self._tensor(query_start.astype(np.int32)),
            seq_lens_R=self._tensor(seq_lens_R.astype(np.int32)),
            max_query_len=int(query_lens_R.max(initial=0)),
            max_seq_len=max_seq_len,
            groups=tuple(
                GroupTables(
                    self._tensor(tables[places_T, block_index_T].astype(np.int64) * block_size + offset_T),
                    self._tensor(tables[places_R, :num_blocks]),
                )
                for tables in self.page_tables
            ),
            kv_layers=self._kv_layers,
        )

    def _layers_of(self, group: int) -> list[KvLayer]:
        return [layer for layer in self._kv_layers if layer.group == group]

    def commit(self, inputs: StepInputs, token_ids_S: Int32Array) -> None:
        """The step has run: these tokens were sampled and the K/V of all its rows are written."""
        self.seq_len[inputs.seats_R] = inputs.seq_lens_R
        self.last_token[inputs.seats_S] = token_ids_S

    def _tensor(self, array: NDArray[np.generic]) -> torch.Tensor:
        # Kernels take the last dimension to be contiguous, which a slice or a transposed pick need not be.
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)


def _starts(lens: Int64Array) -> Int64Array:
    """Where each run begins, and at last where all end."""
    starts = np.zeros(len(lens) + 1, dtype=np.int64)
    np.cumsum(lens, out=starts[1:])
    return starts
