# SPDX-License-Identifier: Apache-2.0
"""Per-seat state of the device (page tables, last token, sequence length) and a step's input made from a plan.

A seat has a page table in each cache group; it changes only by a plan's page_delta. Seats are numbered over all
partitions of data-parallel attention: a rank keeps page tables of its own, and what is known of a sequence of all.
The last tokens are on the device alone, where the next step finds them before the host knows them. One seat more than
there are is nobody's: rows that pad a step sit there, with the null page.
Knows neither requests nor how tokens are chosen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from tokenspeed.core.plan import GroupKind, Int32Array, RowField, RowKind, StepPlan
from tokenspeed.execution.host_copies import uploaded
from tokenspeed.execution.kv_cache import PoolSize, copy_pages, zero_pages
from tokenspeed.execution.page_tables import PageTables
from tokenspeed.kernels.ops.page_table_update import PageTableUpdate
from tokenspeed.layers.build import ONE_RANK
from tokenspeed.layers.decoder import TOKEN_IDS
from tokenspeed.layers.forward_batch import ForwardBatch, GroupTables, KvLayer
from tokenspeed.spmd.mesh import Mesh
from tokenspeed.spmd.placement import TokenTable
from tokenspeed.spmd.step import StepInput

Int64Array = NDArray[np.int64]
_PREFILL, _DECODE = int(RowKind.PREFILL), int(RowKind.DECODE)
_CONTEXT_LEN = int(RowField.CONTEXT_LEN)


class OwnRows(msgspec.Struct, frozen=True):
    """What attention of this rank's partition needs, on the host. places_R, and places_T of each token: seats, counted
    from the partition's first."""

    places_R: Int64Array
    places_T: Int64Array
    query_start: Int64Array
    seq_lens_R: Int64Array
    positions_T: Int64Array

    @property
    def max_query_len(self) -> int:
        return int(np.diff(self.query_start).max(initial=0))

    @property
    def max_seq_len(self) -> int:
        return int(self.seq_lens_R.max(initial=0))


class StepInputs(msgspec.Struct, frozen=True):
    """A step as the host knows it: the rows of a plan, partition after partition. only_decodes: each row computes one
    token and samples one. order_R: a row's place in the plan. seq_lens_R: tokens of the row with those of the step.
    sampled_rows_S: indices into the rows, and seats_S their seats. position_S: the index that a sampled token takes in
    its sequence. sources_T: ids of the tokens; -1 - seat stands for the seat's last token, which only the device knows.

    Nobody changes the arrays: steps that decode the same rows share most of them."""

    only_decodes: bool
    tokens_of_partitions: tuple[int, ...]
    order_R: Int64Array
    seats_R: Int64Array
    kinds_R: Int64Array
    context_lens_R: Int64Array
    seq_lens_R: Int64Array
    query_start: Int64Array
    sampled_rows_S: Int64Array
    seats_S: Int64Array
    position_S: Int64Array
    sources_T: Int64Array
    own: OwnRows

    @property
    def is_plain(self) -> bool:
        """Whether it only decodes, its rows in the order of the plan."""
        return self.only_decodes and len(self.tokens_of_partitions) == 1

    @property
    def sampled_tokens_S(self) -> Int64Array:
        """Which of the tokens are sampled, ascending."""
        return self.query_start[1:][self.sampled_rows_S] - 1


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
    """State by seat. A decode row reads its input token and its position from here, not from the plan.

    last_token: (seats + 1,) int64 on the device. tables: of own seats and one more."""

    def __init__(
        self,
        size: PoolSize,
        seats: Seats,
        kv_layers: tuple[KvLayer, ...],
        device: torch.device,
        update_tables: PageTableUpdate,
    ) -> None:
        self.block_size = size.block_size
        self.seats = seats
        self.kv_layers = kv_layers
        self.device = device
        # One block beyond max_model_len: a step in flight may be planned past the end of a sequence that has ended.
        extent = (len(size.groups), seats.each + 1, size.blocks_per_seat + 1)
        self.num_groups = len(size.groups)
        self.tables = PageTables(extent, device, update_tables)
        self._num_blocks = np.array([group.num_blocks for group in size.groups])
        self._may_expire = np.array([group.kind == GroupKind.WINDOW for group in size.groups])
        self.last_token = torch.zeros(seats.num_seats + 1, dtype=torch.int64, device=device)
        self._last_token_on_host: Int64Array | None = self.last_token.numpy() if device.type == "cpu" else None
        self.seq_len = np.zeros(seats.num_seats, dtype=np.int64)
        self._decoded: tuple[bytes, slice, StepInputs] | None = None

    @property
    def page_tables(self) -> Int32Array:
        """Those of the seats that there are, as the host knows them."""
        return self.tables.on_host[:, : self.seats.each]

    def apply(self, plan: StepPlan) -> None:
        """Take in what the plan changes in page tables and pages."""
        if len(plan.seated) or len(plan.page_delta):
            self._change_tables(plan.seated[:, 0], plan.page_delta)
        if len(plan.copy) or len(plan.zero):
            self._change_pages(plan)

    def _change_tables(self, seats: Int32Array, delta: Int32Array) -> None:
        self.seq_len[seats] = 0
        if len(delta):
            delta = delta[self.seats.is_own(delta[:, 0])]
            _, groups, _, pages = delta.T
            num_groups, most = len(self._num_blocks), self._num_blocks
            assert groups.max(initial=0) < num_groups, f"no cache group {groups.max()} of {num_groups}"
            assert ((pages > 0) | self._may_expire[groups]).all(), "page delta hands out the null page"
            assert (pages <= most[groups]).all(), (pages.max(), most)
        first = np.array([self.seats.first, 0, 0, 0], dtype=np.int32)
        self.tables.change(seats[self.seats.is_own(seats)] - first[0], delta - first)

    def _change_pages(self, plan: StepPlan) -> None:
        for group in _groups_of(plan.copy):
            pairs = plan.copy[plan.copy[:, 0] == group]
            copy_pages(self._layers_of(group), self._tensor(pairs[:, 1]).long(), self._tensor(pairs[:, 2]).long())
        for group in _groups_of(plan.zero):
            pages = plan.zero[plan.zero[:, 0] == group, 1]
            zero_pages(self._layers_of(group), self._tensor(pages).long())

    def read(self, plan: StepPlan) -> StepInputs:
        """The step of this plan. Decode rows come first in each partition."""
        if len(plan.token_ids) or not len(plan.rows):
            return self._read(plan)[0]
        rows = plan.rows.copy()
        rows[:, _CONTEXT_LEN] = 0  # all else stays the same of a row that decodes, step after step
        unchanging = rows.tobytes()
        if self._decoded is not None and self._decoded[0] == unchanging:
            return self._decodes_again(*self._decoded[1:])
        inputs, own = self._read(plan)
        self._decoded = unchanging, own, inputs
        return inputs

    def _read(self, plan: StepPlan) -> tuple[StepInputs, slice]:
        """The step, and which of its rows are this rank's."""
        planned = plan.rows.astype(np.int64)
        order_R, tokens_of_partitions, own = self._partitions(planned)
        seats_R, kinds_R, planned_lens_R, query_lens_R, draft_lens_R = planned[order_R].T
        assert not draft_lens_R.any(), "this runner verifies no drafts"
        is_decode_R = kinds_R == _DECODE
        context_lens_R = np.where(is_decode_R, self.seq_len[seats_R], planned_lens_R)
        seq_lens_R = context_lens_R + query_lens_R
        sampled_rows_S = np.flatnonzero(kinds_R != _PREFILL)
        sources_T = self._sources(plan, planned, order_R)
        inputs = StepInputs(
            bool(is_decode_R.all()) and len(sources_T) == len(planned),
            tokens_of_partitions,
            order_R,
            np.ascontiguousarray(seats_R),
            kinds_R,
            context_lens_R,
            seq_lens_R,
            _starts(query_lens_R),
            sampled_rows_S,
            seats_R[sampled_rows_S],
            seq_lens_R[sampled_rows_S],
            sources_T,
            self._own(seats_R[own], context_lens_R[own], seq_lens_R[own], query_lens_R[own]),
        )
        return inputs, own

    def _decodes_again(self, own: slice, last: StepInputs) -> StepInputs:
        """The rows of a step that only decoded, at the place where they are now."""
        context_lens_R = self.seq_len[last.seats_R]
        seq_lens_R = context_lens_R + 1
        rows = last.own
        if len(rows.places_R) == len(context_lens_R):
            own_lens_R, own_positions_T = seq_lens_R, context_lens_R
        else:
            own_lens_R, own_positions_T = seq_lens_R[own], context_lens_R[own]
        return StepInputs(
            last.only_decodes,
            last.tokens_of_partitions,
            last.order_R,
            last.seats_R,
            last.kinds_R,
            context_lens_R,
            seq_lens_R,
            last.query_start,
            last.sampled_rows_S,
            last.seats_S,
            seq_lens_R,
            last.sources_T,
            OwnRows(rows.places_R, rows.places_T, rows.query_start, own_lens_R, own_positions_T),
        )

    def _partitions(self, planned: Int64Array) -> tuple[Int64Array, tuple[int, ...], slice]:
        """The order of the rows, the tokens of each partition, and which rows are this rank's."""
        num_partitions = self.seats.mesh.sizes.attention_dp
        if num_partitions == 1:
            return np.arange(len(planned)), (int(planned[:, RowField.QUERY_LEN].sum()),), slice(None)
        partition_R = planned[:, RowField.SEAT] // self.seats.each
        order_R = np.argsort(partition_R, kind="stable")
        tokens_P = np.bincount(partition_R, weights=planned[:, RowField.QUERY_LEN], minlength=num_partitions)
        own = np.searchsorted(partition_R[order_R], (self.seats.partition, self.seats.partition + 1))
        return order_R, tuple(tokens_P.astype(np.int64).tolist()), slice(*own.tolist())

    def step(self, inputs: StepInputs) -> StepInput:
        """The step as a model takes it. On a GPU it has as many rows as there are seats, the rest of them empty, and
        tables of full width: a kernel is compiled for a shape."""
        self.tables.flush()
        own, all_tables = inputs.own, self.tables.on_device
        num_blocks, num_empty = -(-own.max_seq_len // self.block_size), 0
        if all_tables.is_cuda:
            num_blocks, num_empty = all_tables.shape[2], self.seats.each - len(own.places_R)
        places_R = self._tensor(_padded(own.places_R, num_empty, self.seats.each))
        batch = ForwardBatch(
            positions_T=self._tensor(own.positions_T),
            query_start=self._tensor(_padded(own.query_start, num_empty, len(own.positions_T)).astype(np.int32)),
            seq_lens_R=self._tensor(_padded(own.seq_lens_R, num_empty, 1).astype(np.int32)),
            max_query_len=own.max_query_len,
            max_seq_len=own.max_seq_len,
            groups=tuple(
                GroupTables(self._tensor(self.slots(own, group)), tables[:, :num_blocks].index_select(0, places_R))
                for group, tables in enumerate(all_tables)
            ),
            kv_layers=self.kv_layers,
        )
        token_ids_T = self.token_ids(self._tensor(inputs.sources_T))
        table = TokenTable.of(self.seats.mesh, inputs.tokens_of_partitions)
        return StepInput(table, {TOKEN_IDS: token_ids_T}, inputs.sampled_tokens_S, batch)

    def token_ids(self, sources_T: torch.Tensor) -> torch.Tensor:
        """(T,) int64 of StepInputs.sources_T on the device."""
        return torch.where(sources_T < 0, self.last_token[(-1 - sources_T).clamp_(min=0)], sources_T)

    def slots(self, own: OwnRows, group: int) -> Int64Array:
        """(T,): page * block_size + offset of each token of this rank's partition, in a cache group; before the next
        plan is applied."""
        block_index_T, offset_T = np.divmod(own.positions_T, self.block_size)
        pages_T: Int64Array = self.tables.on_host[group][own.places_T, block_index_T].astype(np.int64)
        return pages_T * self.block_size + offset_T

    def advance(self, inputs: StepInputs) -> None:
        """The step was launched: the K/V of all its rows will be there for the next one."""
        self.seq_len[inputs.seats_R] = inputs.seq_lens_R

    def commit(self, inputs: StepInputs, token_ids_S: torch.Tensor | Int64Array) -> None:
        """These tokens, int64 on the device, are the last of the sampled seats."""
        if self._last_token_on_host is not None:
            self._last_token_on_host[inputs.seats_S] = token_ids_S
        else:
            assert isinstance(token_ids_S, torch.Tensor), token_ids_S
            self.last_token.index_copy_(0, self._tensor(inputs.seats_S), token_ids_S)

    def _sources(self, plan: StepPlan, planned: Int64Array, order_R: Int64Array) -> Int64Array:
        """(T,) of all rows in the order of the step."""
        is_decode_R = planned[:, RowField.KIND] == _DECODE
        num_decodes = int(is_decode_R.sum())
        assert is_decode_R[:num_decodes].all(), "decode rows do not come first"
        sources_T = np.concatenate([-1 - planned[:num_decodes, RowField.SEAT], plan.token_ids])
        query_lens_R = planned[:, RowField.QUERY_LEN]
        starts = _starts(query_lens_R)
        assert len(sources_T) == starts[-1], (len(sources_T), starts[-1])
        if self.seats.mesh.sizes.attention_dp == 1:
            return sources_T
        lens_R, firsts_R = query_lens_R[order_R], starts[:-1][order_R]
        places_T = np.arange(starts[-1]) + np.repeat(firsts_R - _starts(lens_R)[:-1], lens_R)
        return np.take(sources_T, places_T)

    def _own(
        self, seats_R: Int64Array, context_lens_R: Int64Array, seq_lens_R: Int64Array, query_lens_R: Int64Array
    ) -> OwnRows:
        """The rows of this rank's partition."""
        query_start = _starts(query_lens_R)
        places_R = seats_R - self.seats.first
        if (query_lens_R == 1).all():
            positions_T, places_T = context_lens_R, places_R
        else:
            positions_T = np.arange(query_start[-1]) + np.repeat(context_lens_R - query_start[:-1], query_lens_R)
            places_T = np.repeat(places_R, query_lens_R)
        return OwnRows(places_R, places_T, query_start, seq_lens_R, positions_T)

    def _layers_of(self, group: int) -> list[KvLayer]:
        return [layer for layer in self.kv_layers if layer.group == group]

    def _tensor(self, array: NDArray[np.generic]) -> torch.Tensor:
        return uploaded(array, self.device)


def _padded(array: Int64Array, num: int, value: int) -> Int64Array:
    return np.concatenate([array, np.full(num, value, dtype=np.int64)]) if num else array


def _groups_of(moves: Int32Array) -> list[int]:
    """The cache groups of plan rows that begin with one."""
    return sorted(set(moves[:, 0].tolist()))


def _starts(lens: Int64Array) -> Int64Array:
    """Where each run begins, and at last where all end."""
    starts = np.zeros(len(lens) + 1, dtype=np.int64)
    np.cumsum(lens, out=starts[1:])
    return starts
