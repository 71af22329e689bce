# SPDX-License-Identifier: Apache-2.0
"""The Python face of the control plane: events in, step plans out, step results in, sequence events out.

Turns core's types into the native scheduler's arguments and back. Decides nothing, and knows no model, tensor, clock
or process. One thread at a time; planning releases the GIL.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tokenspeed.control._control import CheckError, Scheduler
from tokenspeed.core.plan import (
    CacheGroup,
    ControlStats,
    HostStore,
    Int32Array,
    KvEvents,
    RequestKey,
    SequenceEvents,
    StepPlan,
    StepResult,
)
from tokenspeed.core.request import ContentSpan, Retention

__all__ = ["CheckError", "ControlPlane", "Refusal"]


_PLAN_WIDTHS = (5, None, 3, 4, 2, 3, 4, 4)
"""Columns of a plan's arrays in the order of its fields, None for the one of one dimension."""


def _nothing(width: int | None) -> Int32Array:
    array = np.zeros(0 if width is None else (0, width), dtype=np.int32)
    array.flags.writeable = False
    return array


_NOTHING = tuple(_nothing(width) for width in _PLAN_WIDTHS)


@dataclass(frozen=True, slots=True)
class Refusal:
    """A submitted request that could never run: needed_tokens does not fit capacity_tokens, which is the context
    window or what the KV pool holds."""

    key: RequestKey
    needed_tokens: int
    capacity_tokens: int


class ControlPlane:
    """Decides which tokens run next and who owns which KV block.

    groups: the cache groups of each partition, in the order of their numbers in a plan. max_num_seqs: seats of a
    partition; they are numbered from 0 over all partitions. max_num_batched_tokens: tokens that one step computes in a
    partition, not below max_num_seqs. max_num_mixed_prefill_tokens: how many of them may be of prompts where any row of
    the step decodes, 1 or more; None leaves it at that. mixed_step_unit: of these only about a sixteenth of what waits,
    beyond four units a sixty-fourth, and what is missing to steps of whole units of tokens; None: all. ageing_steps:
    waiting so many steps lifts a request past newcomers of the next sooner priority class. num_partitions: ranks of
    data-parallel attention. kv_events: keep what take_kv_events returns, which must then be called.

    Values out of range, and calls out of order, raise CheckError, which is an AssertionError and a RuntimeError: in
    apply() where they were queued, else at once. Arguments of another type raise TypeError at once: arrays that are not
    contiguous int32 ones, which are never cast, and integers that do not fit their place (int32 for an index, a
    generation, a priority and the like, int64 for tokens and times). A retention whose ttl_s is no number raises
    ValueError, an infinite one OverflowError. After an exception in the middle of a call, which is a bug or a lack of
    memory, every further call raises CheckError and says so.
    """

    def __init__(
        self,
        *,
        groups: tuple[CacheGroup, ...],
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        max_num_mixed_prefill_tokens: int | None = None,
        mixed_step_unit: int | None = None,
        ageing_steps: int = 256,
        prefix_caching: bool = True,
        num_partitions: int = 1,
        host_store: HostStore = HostStore.ON_SEAL,
        kv_events: bool = False,
    ) -> None:
        self._scheduler = Scheduler(
            groups=[
                (int(group.kind), group.block_size, group.num_blocks, group.num_host_blocks, group.window or 0)
                for group in groups
            ],
            num_partitions=num_partitions,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_mixed_prefill_tokens=max_num_mixed_prefill_tokens,
            mixed_step_unit=mixed_step_unit,
            max_model_len=max_model_len,
            ageing_steps=ageing_steps,
            prefix_caching=prefix_caching,
            host_store=int(host_store),
            kv_events=kv_events,
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
        adapter: str = "",
        spans: tuple[ContentSpan, ...] = (),
        retain: Retention | None = None,
        deadline_ms: int | None = None,
        draft_width: int = 0,
        partition_hint: int | None = None,
    ) -> None:
        """Queues a request. token_ids: (n,) int32, contiguous, copied. max_new_tokens beyond the context window: up to
        its end. priority: lower is sooner. An end token ends the request
        once more than min_new_tokens tokens are generated. namespace and adapter keep prefix caches apart, and spans
        prompts whose placeholders stand for different contents. match_limit: at most so many prompt tokens may come
        from the prefix cache. retain: the pages of a good end stay for the session's next turn. deadline_ms, on the
        clock of tick(): the request ends then, in whatever state it is. draft_width: tokens that each decode row may
        draft."""
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
            adapter,
            [(span.start, span.length, span.hash_high, span.hash_low) for span in spans],
            None if retain is None else (retain.session, round(retain.ttl_s * 1000), retain.priority),
            deadline_ms,
            draft_width,
            partition_hint,
        )

    def cancel(self, key: RequestKey) -> None:
        """Queues the end of a request in whatever state it is. One that has ended already is left alone."""
        self._scheduler.cancel(key.index, key.generation)

    def finish(self, key: RequestKey, keep_tokens: int) -> None:
        """Queues the end of a request after its first keep_tokens generated tokens (a stop string was found). Of one
        that has ended already keep_tokens may be any number: the fewest that were ever told count."""
        self._scheduler.finish(key.index, key.generation, keep_tokens)

    def retain(self, key: RequestKey, deadline_ms: int) -> None:
        """Queues a new deadline for the pages of a request that was submitted with a retention, before its end or
        after. One that keeps nothing is left alone."""
        self._scheduler.retain(key.index, key.generation, deadline_ms)

    def release(self, key: RequestKey) -> None:
        """Queues that such pages are wanted no longer."""
        self._scheduler.release(key.index, key.generation)

    def transfer_done(self, lease: int, ok: bool) -> None:
        """Queues the acknowledgement of a plan's load or store rows with that lease. A late, second or unknown one is
        ignored."""
        self._scheduler.transfer_done(lease, ok)

    def tick(self, now_ms: int) -> None:
        """Queues the time, which never goes back."""
        self._scheduler.tick(now_ms)

    def apply(self, now_ms: int | None = None) -> list[Refusal]:
        """Checks the whole queued batch, to which now_ms is added as by tick(), then applies it in order. Where one
        event is invalid none is applied, the batch is dropped and CheckError is raised. A refused request has ended;
        its index may be used again."""
        return [
            Refusal(RequestKey(index, generation), needed, capacity)
            for index, generation, needed, capacity in self._scheduler.apply(now_ms)
        ]

    def next_plan(self) -> StepPlan | None:
        """The next step, or None where nothing can run before a result or an event comes. At most two steps may be
        in flight. Its arrays are views that the next plan but one overwrites, those without rows the same for all."""
        plan = self._scheduler.next_plan(_NOTHING)
        return None if plan is None else StepPlan(*plan)

    def advance(self, result: StepResult) -> None:
        """Takes in the result of the oldest step in flight, in contiguous int32 arrays. It is checked whole before
        anything changes. Rows of requests that have ended meanwhile are ignored."""
        self._scheduler.advance(
            result.step_id, result.accepted_offsets, result.token_ids, result.row_faults, result.fault
        )

    def take_events(self) -> SequenceEvents:
        """What changed for sequences since the last call, in order."""
        return SequenceEvents(*self._scheduler.take_events())

    def take_kv_events(self) -> KvEvents:
        """What the prefix index gained and lost since the last call; the arrays are the caller's."""
        rows, token_ids = self._scheduler.take_kv_events()
        return KvEvents(rows, token_ids)

    def stats(self) -> ControlStats:
        """Counters and gauges; costs the same whatever the load."""
        return ControlStats(*self._scheduler.stats())

    def has_work(self) -> bool:
        """Whether any request has not ended, or has ended and still waits for a step or transfer in flight. Pages held
        for a session are no work."""
        return self._scheduler.has_work()
