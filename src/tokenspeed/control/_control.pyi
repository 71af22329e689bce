# SPDX-License-Identifier: Apache-2.0
import numpy as np
from numpy.typing import NDArray

from tokenspeed.core.plan import Int32Array

class CheckError(AssertionError, RuntimeError): ...

class Scheduler:
    def __init__(
        self,
        *,
        groups: list[tuple[int, int, int, int, int]],
        num_partitions: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_num_mixed_prefill_tokens: int | None,
        mixed_step_unit: int | None,
        max_model_len: int,
        ageing_steps: int,
        prefix_caching: bool,
        host_store: int,
        kv_events: bool,
    ) -> None: ...
    def submit(
        self,
        index: int,
        generation: int,
        token_ids: Int32Array,
        max_new_tokens: int,
        min_new_tokens: int,
        end_token_ids: list[int],
        priority: int,
        namespace: str,
        match_limit: int | None,
        adapter: str,
        spans: list[tuple[int, int, int, int]],
        retain: tuple[str, int, int] | None,
        deadline_ms: int | None,
        draft_width: int,
        partition_hint: int | None,
    ) -> None: ...
    def cancel(self, index: int, generation: int) -> None: ...
    def finish(self, index: int, generation: int, keep_tokens: int) -> None: ...
    def retain(self, index: int, generation: int, deadline_ms: int) -> None: ...
    def release(self, index: int, generation: int) -> None: ...
    def transfer_done(self, lease: int, ok: bool) -> None: ...
    def tick(self, now_ms: int) -> None: ...
    def apply(self, now_ms: int | None) -> list[tuple[int, int, int, int]]: ...
    def next_plan(
        self, nothing: tuple[Int32Array, ...]
    ) -> (
        tuple[int, Int32Array, Int32Array, Int32Array, Int32Array, Int32Array, Int32Array, Int32Array, Int32Array]
        | None
    ): ...
    def advance(
        self,
        step_id: int,
        accepted_offsets: Int32Array,
        token_ids: Int32Array,
        row_faults: Int32Array,
        fault: bool,
    ) -> None: ...
    def take_events(self) -> tuple[list[tuple[int, int, int, int, int]], list[int]]: ...
    def take_kv_events(self) -> tuple[NDArray[np.int64], Int32Array]: ...
    def stats(self) -> tuple[int, ...]: ...
    def has_work(self) -> bool: ...
