# SPDX-License-Identifier: Apache-2.0
"""The Python face of the control plane: events in, step plans out, step results in, sequence events out.

Turns core's types into the native scheduler's arguments and back. Decides nothing, and knows no model, tensor, clock
or process. One thread at a time; planning releases the GIL.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenspeed.control._control import CheckError, Scheduler
from tokenspeed.core.plan import ControlStats, Int32Array, RequestKey, SequenceEvents, StepPlan, StepResult

__all__ = ["CheckError", "ControlPlane", "Refusal"]


@dataclass(frozen=True, slots=True)
class Refusal:
    """A submitted request that could never run: needed_tokens does not fit capacity_tokens, which is the context
    window or what the KV pool holds."""

    key: RequestKey
    needed_tokens: int
    capacity_tokens: int


class ControlPlane:
    """Decides which tokens run next and who owns which KV block.

    num_blocks: blocks that sequences may use; their pages are 1 .. num_blocks, and page 0 (the null page) comes on
    top, so execution holds num_blocks + 1 pages. block_size: tokens a block. max_num_seqs: seats, which are numbered
    from 0. max_num_batched_tokens: tokens of one step, not below max_num_seqs. ageing_steps: waiting so many steps
    lifts a request past newcomers of the next sooner priority class.

    Calls that are out of contract raise CheckError, which is an AssertionError and a RuntimeError.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        ageing_steps: int = 256,
        prefix_caching: bool = True,
    ) -> None:
        self._scheduler = Scheduler(
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            ageing_steps=ageing_steps,
            prefix_caching=prefix_caching,
        )

    def submit(
        self,
        key: RequestKey,
        token_ids: Int32Array,
        *,
        max_new_tokens: int,
        min_new_tokens: int = 0,
        end_token_ids: tuple[int, ...] = (),
        priority: int = 0,
        namespace: str = "",
        match_limit: int | None = None,
    ) -> None:
        """Queues a request. token_ids: (n,) int32, copied. priority: lower is sooner. An end token ends the request
        once more than min_new_tokens tokens are generated. namespace keeps prefix caches apart.
        match_limit: at most so many prompt tokens may come from the prefix cache."""
        self._scheduler.submit(
            key.index,
            key.generation,
            token_ids,
            max_new_tokens,
            min_new_tokens,
            list(end_token_ids),
            priority,
            namespace,
            match_limit,
        )

    def cancel(self, key: RequestKey) -> None:
        """Queues the end of a request in whatever state it is. One that has ended already is left alone."""
        self._scheduler.cancel(key.index, key.generation)

    def finish(self, key: RequestKey, keep_tokens: int) -> None:
        """Queues the end of a request after its first keep_tokens generated tokens (a stop string was found)."""
        self._scheduler.finish(key.index, key.generation, keep_tokens)

    def retain(self, key: RequestKey, deadline_ms: int) -> None:
        """Queues the wish to keep an ended request's pages. It is checked and has no effect: pages of ended requests
        stay as long as the prefix cache has room for them."""
        self._scheduler.retain(key.index, key.generation, deadline_ms)

    def release(self, key: RequestKey) -> None:
        """Takes back `retain`. It is checked and has no effect, see there."""
        self._scheduler.release(key.index, key.generation)

    def tick(self, now_ms: int) -> None:
        """Queues the time, which never goes back."""
        self._scheduler.tick(now_ms)

    def apply(self) -> list[Refusal]:
        """Checks the whole queued batch, then applies it in order. Where one event is invalid none is applied, the
        batch is dropped and CheckError is raised. A refused request has ended; its index may be used again."""
        return [
            Refusal(RequestKey(index, generation), needed, capacity)
            for index, generation, needed, capacity in self._scheduler.apply()
        ]

    def next_plan(self) -> StepPlan | None:
        """The next step, or None where nothing can run before a result or an event comes. At most two steps may be
        in flight. Its arrays are views that the next plan but one overwrites."""
        plan = self._scheduler.next_plan()
        return None if plan is None else StepPlan(*plan)

    def advance(self, result: StepResult) -> None:
        """Takes in the result of the oldest step in flight. It is checked whole before anything changes. Rows of
        requests that have ended meanwhile are ignored."""
        self._scheduler.advance(
            result.step_id, result.accepted_offsets, result.token_ids, result.row_faults, result.fault
        )

    def take_events(self) -> SequenceEvents:
        """What changed for sequences since the last call, in order; the arrays are the caller's."""
        rows, token_ids = self._scheduler.take_events()
        return SequenceEvents(rows, token_ids)

    def stats(self) -> ControlStats:
        """Counters and gauges; costs the same whatever the load."""
        return ControlStats(*self._scheduler.stats())

    def has_work(self) -> bool:
        """Whether any request has not ended, or has ended and still waits for a step in flight."""
        return self._scheduler.has_work()
