# SPDX-License-Identifier: Apache-2.0
"""One step as attention sees it: tensors on the device, an argument of every layer and never a global.

Shapes: T tokens of this step, R rows (sequences), B blocks of the longest row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class KvLayer:
    """K and V pages of one attention layer: (num_pages, block_size, num_kv_heads, head_dim), or head_dim + 4 where they
    are of int8 (kernels/kv_pages). Page 0 is the null page: never allocated; padded rows and blocks that have left a
    window point at it. group: the one of ForwardBatch.groups whose tables number the pages. v_in_k: v is a view of the
    leading dimensions of k, which are all that is kept."""

    k: torch.Tensor
    v: torch.Tensor
    group: int = 0
    v_in_k: bool = False

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All that is kept, once: what whoever copies, moves or clears pages has to go through."""
        return (self.k,) if self.v_in_k else (self.k, self.v)


@dataclass(frozen=True, slots=True)
class GroupTables:
    """Where the layers of one cache group find K and V. slot_mapping_T: int64, page * block_size + offset of each
    token's K/V. block_tables_RB: (R, B) int32, padded with 0; blocks that no token of this step looks at may be 0."""

    slot_mapping_T: torch.Tensor
    block_tables_RB: torch.Tensor


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """Rows are ragged: row r owns tokens query_start[r] : query_start[r + 1]. With data-parallel attention they are
    those of this rank's partition.

    positions_T: int64. query_start: (R + 1,) int32. seq_lens_R: (R,) int32, tokens of the row in the cache after this
    step's write (context_len + query_len). groups: tables by KvLayer.group. kv_layers: an entry for each attention
    layer.
    """

    positions_T: torch.Tensor
    query_start: torch.Tensor
    seq_lens_R: torch.Tensor
    max_query_len: int
    max_seq_len: int
    groups: tuple[GroupTables, ...]
    kv_layers: tuple[KvLayer, ...]
