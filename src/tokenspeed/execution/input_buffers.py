# SPDX-License-Identifier: Apache-2.0
"""Per-seat state of the device (page tables, last token, sequence length) and the ForwardBatch made from a plan.

A page table changes only by a plan's page_delta. Knows neither requests nor how tokens are chosen.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from tokenspeed.core.plan import Int32Array, RowField, RowKind, StepPlan
from tokenspeed.execution.kv_cache import PoolSize, copy_pages, zero_pages
from tokenspeed.layers.forward_batch import ForwardBatch, KvLayer

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
        self.page_tables = np.zeros((max_num_seqs, size.blocks_per_seat + 1), dtype=np.int32)
        self.last_token = np.zeros(max_num_seqs, dtype=np.int64)
        self.seq_len = np.zeros(max_num_seqs, dtype=np.int64)

    def apply(self, plan: StepPlan) -> None:
        """Take in what the plan changes in page tables and pages."""
        assert len(plan.load) + len(plan.store) == 0, "this runner has no host tier to load from or store to"
        if len(plan.seated):
            seats = plan.seated[:, 0]
            self.page_tables[seats] = 0
            self.seq_len[seats] = 0
        if len(plan.page_delta):
            seats, groups, indices, pages = plan.page_delta.T
            assert not groups.any(), f"page delta names cache group {groups.max()}; there is only group 0"
            assert pages.min() > 0, "page delta hands out the null page"
            assert pages.max() <= self._size.num_blocks, (pages.max(), self._size)
            self.page_tables[seats, indices] = pages
        if len(plan.copy):
            copy_pages(self._kv_layers, self._tensor(plan.copy[:, 1]).long(), self._tensor(plan.copy[:, 2]).long())
        if len(plan.zero):
            zero_pages(self._kv_layers, self._tensor(plan.zero[:, 1]).long())

    def build(self, plan: StepPlan) -> StepInputs:
        """The batch of this plan. Decode rows come first."""
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
        batch = self._batch(token_ids_T, seats_R, context_lens_R, query_start, max_seq_len)
        sample_index_S = self._tensor(query_start[1:][sampled_rows_S] - 1)
        return StepInputs(
            ForwardBatch(
                **batch,
                query_start=self._tensor(query_start.astype(np.int32)),
                seq_lens_R=self._tensor(seq_lens_R.astype(np.int32)),
                sample_index_S=sample_index_S,
                max_query_len=int(query_lens_R.max(initial=0)),
                max_seq_len=max_seq_len,
                kv_layers=self._kv_layers,
            ),
            seats_R,
            kinds_R,
            context_lens_R,
            query_start,
            sampled_rows_S,
        )

    def _batch(
        self,
        token_ids_T: Int64Array,
        seats_R: Int64Array,
        context_lens_R: Int64Array,
        query_start: Int64Array,
        max_seq_len: int,
    ) -> dict[str, torch.Tensor]:
        block_size = self._size.block_size
        query_lens_R = np.diff(query_start)
        positions_T = np.arange(query_start[-1]) + np.repeat(context_lens_R - query_start[:-1], query_lens_R)
        block_index_T, offset_T = np.divmod(positions_T, block_size)
        pages_T = self.page_tables[np.repeat(seats_R, query_lens_R), block_index_T].astype(np.int64)
        num_blocks = -(-max_seq_len // block_size)
        return {
            "token_ids_T": self._tensor(token_ids_T),
            "positions_T": self._tensor(positions_T),
            "slot_mapping_T": self._tensor(pages_T * block_size + offset_T),
            "block_tables_RB": self._tensor(self.page_tables[seats_R, :num_blocks]),
        }

    def commit(self, inputs: StepInputs, token_ids_S: Int32Array) -> None:
        """The step has run: these tokens were sampled and the K/V of all its rows are written."""
        self.seq_len[inputs.seats_R] = inputs.seq_lens_R
        self.last_token[inputs.seats_S] = token_ids_S

    def _tensor(self, array: NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)
