# SPDX-License-Identifier: Apache-2.0
"""What the control plane tells execution to do in one step, and what execution answers.

All arrays are C-contiguous int32 views of buffers that the control plane reuses: they are valid until the
next-but-`overlap_depth` plan is made, so whoever needs one longer copies it. Control and execution meet here
and import each other nowhere. What is made in every step is a struct: a frozen dataclass takes several times as long to
make.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from tokenspeed.core.request import SamplingParams

Int32Array = NDArray[np.int32]


class RowKind(enum.IntEnum):
    """PREFILL: tokens from the plan, nothing sampled. PREFILL_LAST: tokens from the plan, one token sampled.
    DECODE: the one input token is last_token[seat] on the device, one token sampled."""

    PREFILL = 0
    PREFILL_LAST = 1
    DECODE = 2


class RowField(enum.IntEnum):
    """Columns of StepPlan.rows."""

    SEAT = 0
    KIND = 1
    CONTEXT_LEN = 2
    QUERY_LEN = 3
    DRAFT_LEN = 4


class FinishCode(enum.IntEnum):
    """Column FINISH of SequenceEvents.rows."""

    NONE = 0
    STOP = 1
    LENGTH = 2
    CANCELLED = 3
    FAULT = 4
    DEADLINE = 5


class EventField(enum.IntEnum):
    """Columns of SequenceEvents.rows."""

    REQUEST_INDEX = 0
    GENERATION = 1
    NUM_TOKENS = 2
    FINISH = 3
    CACHED_LEN = 4


@dataclass(frozen=True, slots=True)
class RequestKey:
    """Names a live request in the control plane. An index is reused, a (index, generation) pair never."""

    index: int
    generation: int


class GroupKind(enum.IntEnum):
    """What a cache group keeps of a sequence. FULL: K/V of every token. WINDOW: of the last tokens only. RECURRENT: one
    state, and snapshots of it at block boundaries."""

    FULL = 0
    WINDOW = 1
    RECURRENT = 2


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that share one page table; a group's place in the list of groups is its number in a plan.

    block_size: tokens a page covers (RECURRENT: tokens between two snapshots). num_blocks: usable pages, numbered from
    1; page 0 is the null page and comes on top. num_host_blocks: pages of the host tier, numbered alike; 0 means none.
    window: tokens a WINDOW layer looks back on, the current one included.
    """

    kind: GroupKind
    block_size: int
    num_blocks: int
    num_host_blocks: int = 0
    window: int | None = None


class HostStore(enum.IntEnum):
    """When a page is copied to the host tier: as soon as it is full, or when its memory is about to be wanted."""

    ON_SEAL = 0
    ON_PRESSURE = 1


class KvEventKind(enum.IntEnum):
    """Column KIND of KvEvents.rows."""

    STORED = 0
    REMOVED = 1


class KvTier(enum.IntEnum):
    """Column TIER of KvEvents.rows."""

    DEVICE = 0
    HOST = 1


@dataclass(frozen=True, slots=True)
class KvEvents:
    """What the prefix index gained and lost since the events were last taken, in order: replaying them from the start
    gives the index.

    rows: (n, 8) int64: kind, tier, partition * number of groups + group, the block's hash (high, low), its parent's
    hash (high, low), number of tokens. token_ids: (sum of the last column,) int32; only device pages carry tokens.
    """

    rows: NDArray[np.int64]
    token_ids: Int32Array


class StepPlan(msgspec.Struct, frozen=True):
    """One step.

    rows: (num_rows, 5), see RowField; there may be none, where a plan only moves pages. Decode rows come first.
    context_len counts tokens of the sequence whose K/V are already in the cache (for DECODE with a step in flight: the
    committed lower bound; the device's own seq_len[seat] is exact). query_len counts tokens computed now, 1 + draft_len
    in a decode row.
    token_ids: (sum of query_len over PREFILL and PREFILL_LAST rows,), in row order.
    seated: (n, 3) seat, request index, generation: seats that a request took for this step; such a seat's page
    table is empty before page_delta is applied.
    page_delta: (n, 4) seat, group, block index in the sequence, page; page 0 takes an expired block out of the table.
    zero: (n, 2) group, page. copy: (n, 3) group, source page, target page.
    load and store: (n, 4) lease, partition * number of groups + group, device page, host page. Rows of one lease are
    one transfer and are answered by one acknowledgement. Host page 0 stands for the peer of a remote prefill.
    """

    step_id: int
    rows: Int32Array
    token_ids: Int32Array
    seated: Int32Array
    page_delta: Int32Array
    zero: Int32Array
    copy: Int32Array
    load: Int32Array
    store: Int32Array


class StepResult(msgspec.Struct, frozen=True):
    """What a step produced.

    accepted_offsets: (num_rows + 1,), row r accepted token_ids[accepted_offsets[r]:accepted_offsets[r + 1]]
    (none for PREFILL rows). row_faults: (num_rows,), non-zero ends that row's request only (NaN logits).
    fault: the whole step failed and nothing it wrote may be used.
    """

    step_id: int
    accepted_offsets: Int32Array
    token_ids: Int32Array
    row_faults: Int32Array
    fault: bool = False


class SequenceEvents(msgspec.Struct, frozen=True):
    """What changed for sequences since the events were last taken.

    rows: n rows of five, see EventField. token_ids: (sum of NUM_TOKENS,), in row order. CACHED_LEN is the number of
    prompt tokens served from the prefix cache when the sequence was first admitted. Lists and not arrays: they are
    made in every step and read one by one.
    """

    rows: list[tuple[int, int, int, int, int]]
    token_ids: list[int]


@dataclass(frozen=True, slots=True)
class Seating:
    """What execution must know of the request that takes a seat: how it is sampled and its tokens so far.

    token_ids: prompt and the tokens already generated (after a preemption); prompt_len says where the prompt
    ends. forced_token_ids: ids that sampling is made to return, counted from the first generated token.
    """

    seat: int
    request_id: str
    sampling: SamplingParams
    end_token_ids: tuple[int, ...]
    token_ids: Int32Array
    prompt_len: int
    forced_token_ids: Int32Array | None = None


class ControlStats(msgspec.Struct, frozen=True):
    """Counters and gauges, kept incrementally. used_blocks are those that live and held requests hold; blocks that are
    only cached count as free. Blocks are those of the first group, over all partitions. num_waiting includes requests
    that wait for a transfer. loaded_tokens: prompt tokens that came back from the host tier."""

    num_running: int
    num_waiting: int
    num_held: int
    used_blocks: int
    cached_blocks: int
    total_blocks: int
    num_preemptions: int
    prefix_query_tokens: int
    prefix_hit_tokens: int
    prompt_tokens: int
    generated_tokens: int
    num_steps: int
    host_used_blocks: int = 0
    host_total_blocks: int = 0
    loaded_tokens: int = 0
    stored_blocks: int = 0
    num_transfers: int = 0
