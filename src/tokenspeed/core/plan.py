# SPDX-License-Identifier: Apache-2.0
"""What the control plane tells execution to do in one step, and what execution answers.

All arrays are C-contiguous int32 views of buffers that the control plane reuses: they are valid until the
next-but-`overlap_depth` plan is made, so whoever needs one longer copies it. Control and execution meet here
and import each other nowhere.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step.

    rows: (num_rows, 5), see RowField. Decode rows come first. context_len counts tokens of the sequence whose
    K/V are already in the cache (for DECODE with a step in flight: the committed lower bound; the device's own
    seq_len[seat] is exact). query_len counts tokens computed now.
    token_ids: (sum of query_len over PREFILL and PREFILL_LAST rows,), in row order.
    seated: (n, 3) seat, request index, generation: seats that a request took for this step; such a seat's page
    table is empty before page_delta is applied.
    page_delta: (n, 4) seat, group, block index in the sequence, page. zero: (n, 2) group, page.
    copy: (n, 3) group, source page, target page. load and store: (n, 4) lease, group, device page, host page.
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


@dataclass(frozen=True, slots=True)
class StepResult:
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


@dataclass(frozen=True, slots=True)
class SequenceEvents:
    """What changed for sequences since the events were last taken.

    rows: (n, 5), see EventField. token_ids: (sum of NUM_TOKENS,), in row order. CACHED_LEN is the number of
    prompt tokens served from the prefix cache when the sequence was first admitted.
    """

    rows: Int32Array
    token_ids: Int32Array


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


@dataclass(frozen=True, slots=True)
class ControlStats:
    """Counters and gauges, kept incrementally. used_blocks are those that live requests hold; blocks that are only
    cached count as free."""

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
