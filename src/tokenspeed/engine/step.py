# SPDX-License-Identifier: Apache-2.0
"""The loop: messages become events, events a plan, a plan a step, a step's result updates.

One body serves both depths of overlap: steps in flight are a deque of length 0 or 1 between two turns. Knows the map
request id ⇄ RequestKey, each request's tokens and the clock; knows no scheduling policy, no tensor and no text.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec
import numpy as np

from tokenspeed.core.ipc import (
    CacheChanges,
    Cancel,
    EngineStats,
    Finish,
    FromEngine,
    Release,
    Retain,
    Shutdown,
    Start,
    Submit,
    ToEngine,
    Updates,
    Vocabulary,
    WatchCache,
)
from tokenspeed.core.plan import (
    ControlStats,
    Int32Array,
    KvEvents,
    RequestKey,
    RowField,
    Seating,
    SequenceEvents,
    StepPlan,
    StepResult,
)
from tokenspeed.core.request import (
    ContentSpan,
    EngineRequest,
    FinishReason,
    Retention,
    SequenceUpdate,
    TokenLogprobs,
)
from tokenspeed.engine.cache_watch import CacheWatch
from tokenspeed.engine.sequences import PromptLogprobs, RecordBook
from tokenspeed.engine.step_sizes import StepSizes

HEARTBEAT_S = 1.0
STATS_EVERY_MS = 50
"""Counters come with other news than tokens, and at least so often: to tell them takes as long as to tell a token."""
_TRANSFER_POLL_S = 0.001
_SEAT, _QUERY_LEN = int(RowField.SEAT), int(RowField.QUERY_LEN)


class Refusal(Protocol):
    """A request that can never fit."""

    @property
    def key(self) -> RequestKey: ...
    @property
    def needed_tokens(self) -> int: ...
    @property
    def capacity_tokens(self) -> int: ...


class Control(Protocol):
    """The control plane, as the loop uses it; see tokenspeed.control."""

    def submit(
        self,
        key: RequestKey,
        token_ids: Int32Array,
        *,
        max_new_tokens: int,
        min_new_tokens: int,
        end_token_ids: tuple[int, ...],
        priority: int,
        namespace: str,
        match_limit: int | None,
        adapter: str,
        spans: tuple[ContentSpan, ...],
        retain: Retention | None,
        deadline_ms: int | None,
    ) -> None: ...
    def cancel(self, key: RequestKey) -> None: ...
    def finish(self, key: RequestKey, keep_tokens: int) -> None: ...
    def retain(self, key: RequestKey, deadline_ms: int) -> None: ...
    def release(self, key: RequestKey) -> None: ...
    def transfer_done(self, lease: int, ok: bool) -> None: ...
    def apply(self, now_ms: int) -> Sequence[Refusal]: ...
    def next_plan(self) -> StepPlan | None: ...
    def advance(self, result: StepResult) -> None: ...
    def take_events(self) -> SequenceEvents: ...
    def take_kv_events(self) -> KvEvents: ...
    def stats(self) -> ControlStats: ...


class StepOutput(Protocol):
    """A step's result and, beside it, the log-probabilities of each row (None where not asked for); both are empty
    when the whole step faulted. logprobs[r]: one entry for each token that row r accepted. transfers: (lease, ok) of
    each transfer that has ended by now and was not told yet, of this step or an earlier one."""

    @property
    def result(self) -> StepResult: ...
    @property
    def logprobs(self) -> Sequence[Sequence[TokenLogprobs] | None]: ...
    @property
    def prompt_logprobs(self) -> Sequence[PromptLogprobs | None]: ...
    @property
    def transfers(self) -> Sequence[tuple[int, bool]]: ...


class StepHandle(Protocol):
    """A step in flight."""

    def wait(self) -> StepOutput: ...


class Runner(Protocol):
    """Execution, as the loop uses it; see tokenspeed.execution."""

    def launch(self, plan: StepPlan, seatings: Sequence[Seating]) -> StepHandle: ...
    def know(self, vocabulary: Vocabulary) -> None:
        """What grammars need; before the first seating that has one."""
        ...

    def poll_transfers(self) -> Sequence[tuple[int, bool]]:
        """(lease, ok) of each transfer that has ended and that no step's output told."""
        ...


class Messages(Protocol):
    """Where requests come from and updates go; see tokenspeed.engine.channel."""

    def receive(self, timeout_s: float) -> list[ToEngine]: ...
    def send(self, message: FromEngine) -> None: ...


class _InFlight(msgspec.Struct, frozen=True):
    """A launched step, whose row is whose, and the transfers that it was to make."""

    step_id: int
    keys: tuple[RequestKey, ...]
    leases: tuple[int, ...]
    handle: StepHandle


class EngineLoop:
    """Carries plans from control to execution and results back, until told to stop."""

    def __init__(
        self,
        control: Control,
        runner: Runner,
        messages: Messages,
        *,
        overlap_depth: int,
        cache_watch: CacheWatch | None = None,
        on_fault: Callable[[Exception], None] = lambda error: None,
        heartbeat_s: float = HEARTBEAT_S,
        now_ms: Callable[[], int] = lambda: time.monotonic_ns() // 1_000_000,
    ) -> None:
        assert overlap_depth in (0, 1), f"overlap depth {overlap_depth}"
        self._control = control
        self._runner = runner
        self._messages = messages
        self._overlap_depth = overlap_depth
        self._cache_watch = cache_watch
        self._on_fault = on_fault
        self._heartbeat_s = heartbeat_s
        self._now_ms = now_ms
        self._book = RecordBook()
        self._seats: dict[int, RequestKey] = {}
        self._in_flight: deque[_InFlight] = deque()
        self._leases: set[int] = set()
        self._sizes = StepSizes()
        self._pause_s = 0.0
        self._stats_due_ms = 0
        self._running = True

    def run(self) -> None:
        """Serve until Shutdown. Raises ChannelClosedError when the API process has gone."""
        blocked = True
        while self._running:
            blocked = self.turn(self._heartbeat_s if blocked else 0.0)

    def turn(self, wait_s: float) -> bool:
        """One turn: take messages (waiting up to wait_s), plan, launch, collect, report. True when nothing is left to
        do before the next message."""
        for message in self._messages.receive(max(wait_s, self._pause_s)):
            self._stats_due_ms = 0
            self._receive(message)
        if self._leases and not self._in_flight:
            self._end_transfers(self._runner.poll_transfers())
        now_ms = self._now_ms()
        updates = [self._refuse(refusal) for refusal in self._control.apply(now_ms)]
        plan = self._control.next_plan()
        if plan is not None:
            if len(plan.seated):
                updates += self._started(plan)
            self._in_flight.append(self._launch(plan))
        collects = bool(self._in_flight) and (plan is None or len(self._in_flight) > self._overlap_depth)
        if collects:
            self._collect(self._in_flight.popleft())
        # A result may have freed what the next plan waits for, so after one there is always another turn.
        stalled = plan is None and not collects
        blocked = stalled and not self._leases
        self._pause_s = _TRANSFER_POLL_S if stalled and self._leases else 0.0
        self._report(updates, now_ms, blocked=blocked)
        if self._cache_watch is not None:
            self._tell_cache(self._cache_watch.changes(self._control.take_kv_events()))
        return blocked

    def _report(self, updates: list[SequenceUpdate], now_ms: int, *, blocked: bool) -> None:
        """Tell the news there is; at times, and before any waiting, also that there is none."""
        tokens = _Tokens()
        updates += self._take_updates(tokens)
        tells_stats = bool(updates) or blocked or now_ms >= self._stats_due_ms
        if not tells_stats and not tokens.handles:
            return
        stats = None
        if tells_stats:
            stats = _engine_stats(self._control.stats(), self._sizes)
            self._stats_due_ms = now_ms + STATS_EVERY_MS
        self._messages.send(Updates(tokens.handles, tokens.token_ids, tuple(updates), stats, tokens.counts()))

    def _receive(self, message: ToEngine) -> None:
        match message:
            case Submit(request, handle):
                self._submit(request, handle)
            case Vocabulary():
                self._runner.know(message)
            case Cancel(request_id):
                self._end(request_id, None)
            case Finish(request_id, keep_tokens):
                self._end(request_id, keep_tokens)
            case Retain(request_id, ttl_s):
                self._retain(request_id, ttl_s)
            case Release(request_id):
                self._release(request_id)
            case WatchCache(on):
                if self._cache_watch is not None:
                    self._tell_cache(self._cache_watch.switch(on))
            case Shutdown():
                self._running = False
            case Start():
                raise AssertionError("a second Start")

    def _tell_cache(self, changes: CacheChanges | None) -> None:
        if changes is not None:
            self._messages.send(changes)

    def _submit(self, request: EngineRequest, handle: int) -> None:
        record = self._book.add(request, handle)
        self._control.submit(
            record.key,
            record.prompt,
            max_new_tokens=record.max_tokens,
            # Where a grammar allows nothing but an end, it comes even early: that is the sampler's to see to.
            min_new_tokens=request.sampling.min_tokens if request.sampling.grammar is None else 0,
            end_token_ids=request.end_token_ids,
            priority=request.priority,
            namespace=request.namespace,
            match_limit=request.match_limit,
            adapter=request.adapter,
            spans=request.spans,
            retain=request.retain,
            deadline_ms=None if request.timeout_s is None else self._now_ms() + _milliseconds(request.timeout_s),
        )

    def _retain(self, request_id: str, ttl_s: float) -> None:
        key = self._book.find_retained(request_id)
        if key is not None:
            self._control.retain(key, self._now_ms() + _milliseconds(ttl_s))

    def _release(self, request_id: str) -> None:
        key = self._book.find_retained(request_id)
        if key is not None:
            self._control.release(key)
            self._book.forget_retained(request_id)

    def _end(self, request_id: str, keep_tokens: int | None) -> None:
        """Cancel, or finish where keep_tokens is given. Ids that are unknown or already ending are ignored: the
        message and the natural end may cross on the way."""
        record = self._book.find(request_id)
        if record is None or record.ending:
            return
        record.ending = True
        if keep_tokens is None:
            self._control.cancel(record.key)
        else:
            self._control.finish(record.key, keep_tokens)

    def _refuse(self, refusal: Refusal) -> SequenceUpdate:
        record = self._book.remove(refusal.key)
        return SequenceUpdate(
            request_id=record.request.request_id,
            finish_reason=FinishReason.ERROR,
            error=f"the request needs {refusal.needed_tokens} tokens of KV cache, but the whole pool holds "
            f"{refusal.capacity_tokens}",
        )

    def _launch(self, plan: StepPlan) -> _InFlight:
        seatings = [self._seat(seat, RequestKey(index, gen)) for seat, index, gen in _rows(plan.seated)]
        rows = _rows(plan.rows)
        keys = tuple([self._seats[row[_SEAT]] for row in rows])
        try:
            handle = self._runner.launch(plan, seatings)
        except (RuntimeError, MemoryError) as error:
            handle = _FailedLaunch(error)
        if keys:
            self._sizes.note(sum([row[_QUERY_LEN] for row in rows]))
        leases = leases_of(plan)
        if leases:
            self._leases.update(leases)
        return _InFlight(plan.step_id, keys, leases, handle)

    def _started(self, plan: StepPlan) -> list[SequenceUpdate]:
        """News of the requests whose first step this is."""
        keys = [RequestKey(index, gen) for _, index, gen in plan.seated.tolist()]
        return [update for key in keys if (update := self._book.get(key).started()) is not None]

    def _seat(self, seat: int, key: RequestKey) -> Seating:
        self._seats[seat] = key
        return self._book.get(key).seating(seat)

    def _collect(self, step: _InFlight) -> None:
        try:
            output = step.handle.wait()
        except (RuntimeError, MemoryError) as error:
            self._on_fault(error)
            self._end_transfers([(lease, False) for lease in step.leases])
            self._control.advance(_faulted(step.step_id, len(step.keys)))
            return
        self._end_transfers(output.transfers)
        self._control.advance(output.result)
        if output.result.fault:
            return
        for key, logprobs, prompt_logprobs in zip(step.keys, output.logprobs, output.prompt_logprobs, strict=True):
            if logprobs is None and prompt_logprobs is None:
                continue
            record = self._book.peek(key)
            if record is not None:
                record.note_logprobs(logprobs, prompt_logprobs)

    def _end_transfers(self, transfers: Sequence[tuple[int, bool]]) -> None:
        for lease, ok in transfers:
            self._leases.discard(lease)
            self._control.transfer_done(lease, ok)

    def _take_updates(self, tokens: _Tokens) -> list[SequenceUpdate]:
        """The updates of sequences of which there is more news than tokens; those of the others go to `tokens`."""
        events = self._control.take_events()
        token_ids = events.token_ids
        updates, start = [], 0
        for index, generation, num_tokens, finish, cached_len in events.rows:
            end = start + num_tokens
            record = self._book.at(index, generation)
            new_ids = token_ids[start:end]
            start = end
            told_ids = record.add(new_ids, finish, cached_len)
            if told_ids is not None:
                if told_ids:
                    tokens.add(record.handle, told_ids)
                continue
            update = record.update(new_ids, finish, cached_len)
            if update.finish_reason is not None:
                self._book.retire(record.key, update.finish_reason)
            updates.append(update)
        assert start == len(token_ids), f"events speak of {start} tokens and carry {len(token_ids)}"
        return updates


class _Tokens:
    """Tokens of sequences of which there is no other news; see core.ipc.Updates."""

    def __init__(self) -> None:
        self.handles: list[int] = []
        self.token_ids: list[int] = []
        self._counts: list[int] = []

    def add(self, handle: int, token_ids: list[int]) -> None:
        self.handles.append(handle)
        self._counts.append(len(token_ids))
        self.token_ids += token_ids

    def counts(self) -> list[int]:
        """How many each has; nothing where each has one."""
        return self._counts if len(self.token_ids) != len(self.handles) else []


class _FailedLaunch:
    """A step that could not even be launched: it fails where its result is awaited."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def wait(self) -> StepOutput:
        raise self._error


def _faulted(step_id: int, num_rows: int) -> StepResult:
    """The result of a step of which nothing may be used."""
    return StepResult(
        step_id=step_id,
        accepted_offsets=np.zeros(num_rows + 1, np.int32),
        token_ids=np.zeros(0, np.int32),
        row_faults=np.zeros(num_rows, np.int32),
        fault=True,
    )


def leases_of(plan: StepPlan) -> tuple[int, ...]:
    """One for each transfer of the plan; a transfer may have many rows."""
    if not len(plan.load) and not len(plan.store):
        return ()
    return tuple(dict.fromkeys([row[0] for row in (*_rows(plan.load), *_rows(plan.store))]))


def _rows(array: Int32Array) -> list[list[int]]:
    """Of an array of a plan; most often there are none, and numpy is not asked."""
    rows: list[list[int]] = array.tolist() if len(array) else []
    return rows


def _milliseconds(seconds: float) -> int:
    return math.ceil(seconds * 1000)


def _engine_stats(stats: ControlStats, sizes: StepSizes) -> EngineStats:
    return EngineStats(
        num_running=stats.num_running,
        num_waiting=stats.num_waiting,
        num_held=stats.num_held,
        used_blocks=stats.used_blocks,
        cached_blocks=stats.cached_blocks,
        total_blocks=stats.total_blocks,
        num_preemptions=stats.num_preemptions,
        prefix_query_tokens=stats.prefix_query_tokens,
        prefix_hit_tokens=stats.prefix_hit_tokens,
        prompt_tokens=stats.prompt_tokens,
        generated_tokens=stats.generated_tokens,
        num_steps=stats.num_steps,
        host_used_blocks=stats.host_used_blocks,
        host_total_blocks=stats.host_total_blocks,
        loaded_tokens=stats.loaded_tokens,
        stored_blocks=stats.stored_blocks,
        step_tokens=sizes.counts,
        num_step_tokens=sizes.num_tokens,
    )
