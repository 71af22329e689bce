# SPDX-License-Identifier: Apache-2.0
from tokenspeed.core.plan import Int32Array

class CheckError(AssertionError, RuntimeError): ...

class Scheduler:
    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        ageing_steps: int,
        prefix_caching: bool,
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
    ) -> None: ...
    def cancel(self, index: int, generation: int) -> None: ...
    def finish(self, index: int, generation: int, keep_tokens: int) -> None: ...
    def retain(self, index: int, generation: int, deadline_ms: int) -> None: ...
    def release(self, index: int, generation: int) -> None: ...
    def tick(self, now_ms: int) -> None: ...
    def apply(self) -> list[tuple[int, int, int, int]]: ...
    def next_plan(
        self,
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
    def take_events(self) -> tuple[Int32Array, Int32Array]: ...
    def stats(self) -> tuple[int, int, int, int, int, int, int, int, int, int, int, int]: ...
    def has_work(self) -> bool: ...
