# SPDX-License-Identifier: Apache-2.0
"""Rank 0's eye on the other ranks: what they say, whether they live, whether they are late. One thread.

The first loss ends the replica. Knows ranks, streams and clocks; knows neither plans nor how a replica is ended.
"""

from __future__ import annotations

import select
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tokenspeed.core.ipc import Done, FromRank, Hello, Moved, Ready, StartFailed
from tokenspeed.engine.channel import ChannelClosedError, Stream
from tokenspeed.engine.failures import one_line
from tokenspeed.engine.process import describe_exit
from tokenspeed.engine.transfers import TransferLedger

_WAKE_EVERY_S = 0.05
_CAUSE_WAIT_S = 0.5
"""A rank that fails a step, or hangs up, may have lost another one: that one's end is waited for, and told instead."""


@dataclass(frozen=True, slots=True)
class Loss:
    """Why the replica cannot go on, in one line. failure: what a rank said that could not start."""

    message: str
    failure: StartFailed | None = None


@dataclass(slots=True)
class Follower:
    """A rank other than 0. process: None where a launcher has started it. pending: steps that it was sent and has not
    done, since when the oldest could run."""

    rank: int
    stream: Stream[FromRank]
    process: subprocess.Popen[bytes] | None = None
    pending: deque[int] = field(default_factory=deque)
    since: float = 0.0
    is_dead: bool = False
    hung_up_at: float | None = None
    failure: StartFailed | None = None
    fault: tuple[int, float] | None = None
    shape: str | None = None


class Watchdog:
    """Methods may be called from any thread. on_loss (see arm) runs on the watchdog's own."""

    def __init__(
        self,
        followers: Sequence[Follower],
        ledger: TransferLedger,
        rank_timeout_s: float,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._followers = {follower.rank: follower for follower in followers}
        self._ledger = ledger
        self._rank_timeout_s = rank_timeout_s
        self._now = now
        self._changed = threading.Condition()
        self._waiting: tuple[int, float] | None = None
        self._loss: Loss | None = None
        self._on_loss: Callable[[Loss], None] | None = None
        self._closing = False
        self._poll = select.poll()
        self._rank_of = {follower.stream.fileno(): follower.rank for follower in followers}
        for descriptor in self._rank_of:
            self._poll.register(descriptor, select.POLLIN)
        self._thread = threading.Thread(target=self._run, name="tokenspeed-watchdog", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def arm(self, on_loss: Callable[[Loss], None]) -> None:
        """Call on_loss at a loss from now on. What was lost before is known from `loss`."""
        with self._changed:
            self._on_loss = on_loss

    def close(self) -> None:
        """Look away: ranks may go. Idempotent."""
        self._closing = True
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()

    @property
    def loss(self) -> Loss | None:
        """The first loss."""
        return self._loss

    def wait_loss(self, timeout_s: float) -> Loss | None:
        """The first loss, once there is one; None when none is seen within timeout_s."""
        with self._changed:
            self._changed.wait_for(lambda: self._loss is not None, timeout_s)
            return self._loss

    def wait_shapes(self) -> dict[int, str] | None:
        """The shape of each rank once all are ready; None at a loss."""
        with self._changed:
            self._changed.wait_for(lambda: self._loss is not None or all(self._shapes().values()))
            return None if self._loss is not None else self._shapes()

    def sent(self, step_id: int) -> None:
        """The ranks are being told to run this step."""
        with self._changed:
            for follower in self._followers.values():
                if not follower.pending:
                    follower.since = self._now()
                follower.pending.append(step_id)

    def waiting(self, step_id: int | None) -> None:
        """Rank 0 waits for its own part of this step; None: it has it."""
        with self._changed:
            self._waiting = None if step_id is None else (step_id, self._now())

    def _shapes(self) -> dict[int, str]:
        return {rank: follower.shape or "" for rank, follower in self._followers.items()}

    def _run(self) -> None:
        loss = None
        while loss is None and not self._closing:
            try:
                loss = self._look()
            except Exception as error:  # noqa: BLE001 nobody watches any more, so the replica must end
                loss = Loss(f"the watchdog failed: {one_line(error)}")
        with self._changed:
            self._loss, on_loss = loss, self._on_loss
            self._changed.notify_all()
        if loss is not None and on_loss is not None:
            on_loss(loss)

    def _look(self) -> Loss | None:
        self._note_deaths()
        for descriptor, _ in self._poll.poll(_WAKE_EVERY_S * 1000):
            self._read(self._followers[self._rank_of[descriptor]])
        with self._changed:
            return None if self._closing else self._find_loss(self._now())

    def _note_deaths(self) -> None:
        """Before reading: what a dead rank has said is read in the same round."""
        for follower in self._followers.values():
            follower.is_dead = follower.process is not None and follower.process.poll() is not None

    def _read(self, follower: Follower) -> None:
        try:
            messages = follower.stream.receive(0.0)
        except ChannelClosedError:
            self._poll.unregister(follower.stream.fileno())
            follower.hung_up_at = self._now()
            return
        with self._changed:
            for message in messages:
                self._take(follower, message)
            self._changed.notify_all()

    def _take(self, follower: Follower, message: FromRank) -> None:
        match message:
            case Ready(shape):
                follower.shape = shape
            case StartFailed():
                follower.failure = message
            case Done(step_id, transfers, fault):
                oldest = follower.pending.popleft()
                assert step_id == oldest, f"rank {follower.rank} has done step {step_id} before step {oldest}"
                follower.since = self._now()
                self._ledger.note(follower.rank, transfers)
                if fault and follower.fault is None:
                    follower.fault = (step_id, self._now())
            case Moved(transfers):
                self._ledger.note(follower.rank, transfers)
            case Hello():
                raise AssertionError(f"rank {follower.rank} says Hello twice")

    def _find_loss(self, now: float) -> Loss | None:
        """The most telling one: a reason given, then an end, then a failed step, then lateness."""
        followers = self._followers.values()
        for follower in followers:
            if follower.failure is not None:
                return Loss(follower.failure.message, follower.failure)
        for follower in followers:
            if follower.is_dead and follower.process is not None:
                return Loss(f"rank {follower.rank} ended {describe_exit(follower.process.returncode)}")
        for follower in followers:
            if follower.hung_up_at is not None and now - follower.hung_up_at >= _CAUSE_WAIT_S:
                return Loss(f"rank {follower.rank} has gone: its connection is closed")
        for follower in followers:
            if follower.fault is not None and now - follower.fault[1] >= _CAUSE_WAIT_S:
                return Loss(f"rank {follower.rank} failed step {follower.fault[0]}")
        return self._find_late(now)

    def _find_late(self, now: float) -> Loss | None:
        late = [each for each in self._followers.values() if each.pending and now - each.since > self._rank_timeout_s]
        if late:
            step_id = min(follower.pending[0] for follower in late)
            return self._late([follower.rank for follower in late if follower.pending[0] == step_id], step_id)
        if self._waiting is not None and now - self._waiting[1] > self._rank_timeout_s:
            return self._late([0], self._waiting[0])
        return None

    def _late(self, ranks: list[int], step_id: int) -> Loss:
        who = f"rank {ranks[0]} has" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} have"
        return Loss(f"{who} not finished step {step_id} within {self._rank_timeout_s:g} s")
