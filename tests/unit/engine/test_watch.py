# SPDX-License-Identifier: Apache-2.0
"""What counts as a loss, in which words, and which of several is told. Time is a number that the test moves."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from tokenspeed.core.ipc import Done, FromRank, Hello, Moved, Ready, StartFailed, decode_from_rank, send
from tokenspeed.engine.channel import Stream
from tokenspeed.engine.transfers import TransferLedger
from tokenspeed.engine.watch import Follower, Loss, Watchdog


@dataclass
class FakeProcess:
    returncode: int | None = None

    def poll(self) -> int | None:
        return self.returncode


@dataclass
class Ranks:
    """A watchdog that looks when it is told to, and the other ends of its streams."""

    num_ranks: int
    stack: contextlib.ExitStack
    now: float = 100.0
    ours: list[socket.socket] = field(default_factory=list)
    processes: list[FakeProcess] = field(default_factory=list)

    def __post_init__(self) -> None:
        followers = []
        for rank in range(1, self.num_ranks):
            near, far = (self.stack.enter_context(sock) for sock in socket.socketpair())
            self.ours.append(far)
            self.processes.append(FakeProcess())
            followers.append(Follower(rank, Stream(near, decode_from_rank), cast("Any", self.processes[-1])))
        self.ledger = TransferLedger(self.num_ranks)
        self.watchdog = Watchdog(followers, self.ledger, 10.0, lambda: self.now)

    def say(self, rank: int, message: FromRank) -> None:
        send(self.ours[rank - 1], message)

    def look(self, after_s: float = 0.0) -> str | None:
        """What is lost that much later; at least one look before and one after."""
        self.watchdog._look()
        self.now += after_s
        loss = self.watchdog._look()
        return None if loss is None else loss.message


@pytest.fixture
def ranks() -> Iterator[Any]:
    with contextlib.ExitStack() as stack:
        yield lambda num_ranks: Ranks(num_ranks, stack)


def test_steps_that_are_done_in_time_are_no_loss(ranks: Any) -> None:
    three = ranks(3)
    for step_id in range(1, 6):
        three.watchdog.sent(step_id)
        assert three.look(9.0) is None
        three.say(1, Done(step_id))
        three.say(2, Done(step_id))
        assert three.look() is None


def test_an_idle_replica_is_never_late(ranks: Any) -> None:
    assert ranks(2).look(1e6) is None


def test_a_step_that_waits_for_another_is_not_late_for_it(ranks: Any) -> None:
    two = ranks(2)
    two.watchdog.sent(1)
    two.watchdog.sent(2)
    assert two.look(9.0) is None
    two.say(1, Done(1))
    assert two.look(9.0) is None
    assert two.look(2.0) == "rank 1 has not finished step 2 within 10 s"


def test_all_that_are_late_are_named(ranks: Any) -> None:
    four = ranks(4)
    four.watchdog.sent(17)
    four.say(2, Done(17))
    assert four.look(11.0) == "ranks 1, 3 have not finished step 17 within 10 s"


def test_rank_0_may_be_the_late_one(ranks: Any) -> None:
    two = ranks(2)
    two.watchdog.sent(3)
    two.watchdog.waiting(3)
    two.say(1, Done(3))
    assert two.look(9.0) is None
    assert two.look(2.0) == "rank 0 has not finished step 3 within 10 s"
    two.watchdog.waiting(None)
    assert two.look() is None


@pytest.mark.parametrize(("code", "words"), [(-9, "by SIGKILL"), (-11, "by SIGSEGV"), (3, "with exit code 3")])
def test_the_end_of_a_process_is_told_by_its_code(ranks: Any, code: int, words: str) -> None:
    two = ranks(2)
    two.processes[0].returncode = code
    assert two.look().startswith(f"rank 1 ended {words}")


def test_a_rank_of_another_machine_is_lost_with_its_connection(ranks: Any) -> None:
    two = ranks(2)
    two.ours[0].close()
    assert two.look() is None, "its process may end in a moment, and say more"
    assert two.look(1.0) == "rank 1 has gone: its connection is closed"


def test_a_reason_comes_before_an_end_and_an_end_before_a_failed_step(ranks: Any) -> None:
    four = ranks(4)
    four.watchdog.sent(5)
    four.say(1, Done(5, fault=True))
    assert four.look() is None, "why it failed may show in a moment"
    four.processes[1].returncode = -9
    assert four.look().startswith("rank 2 ended by SIGKILL")
    four.say(3, StartFailed("ConfigError", "the sizes do not nest"))
    assert four.look() == "the sizes do not nest"


def test_a_failed_step_is_told_when_nothing_else_explains_it(ranks: Any) -> None:
    two = ranks(2)
    two.watchdog.sent(5)
    two.say(1, Done(5, fault=True))
    assert two.look(1.0) == "rank 1 failed step 5"


def test_what_a_dead_rank_said_is_heard(ranks: Any) -> None:
    two = ranks(2)
    two.say(1, StartFailed("CapacityError", "too small"))
    two.ours[0].close()
    two.processes[0].returncode = 1
    assert two.look() == "too small"


def test_transfers_reach_the_ledger(ranks: Any) -> None:
    two = ranks(2)
    two.watchdog.sent(1)
    two.say(1, Done(1, ((4, True),)))
    two.say(1, Moved(((5, False),)))
    two.look()
    two.ledger.note(0, [(4, True), (5, True)])
    assert two.ledger.take() == ((4, True), (5, False))


def test_shapes_are_known_once_all_are_ready(ranks: Any) -> None:
    three = ranks(3)
    three.watchdog.start()
    three.say(1, Ready("a"))
    three.say(2, Ready("b"))
    assert three.watchdog.wait_shapes() == {1: "a", 2: "b"}
    three.watchdog.close()


def test_a_loss_is_told_once_and_ends_the_watch(ranks: Any) -> None:
    two, told = ranks(2), []
    two.watchdog.arm(told.append)
    two.processes[0].returncode = 7
    two.watchdog.start()
    loss = two.watchdog.wait_loss(10.0)
    assert loss == Loss("rank 1 ended with exit code 7") == two.watchdog.loss
    assert two.watchdog.wait_shapes() is None
    two.watchdog.close()
    assert told == [loss]


def test_a_watchdog_that_fails_is_a_loss(ranks: Any) -> None:
    two = ranks(2)
    two.say(1, Hello(1, "again"))
    two.watchdog.start()
    loss = two.watchdog.wait_loss(10.0)
    assert loss is not None and loss.message.startswith("the watchdog failed: AssertionError: rank 1 says Hello twice")
    two.watchdog.close()


def test_after_the_close_ranks_may_go(ranks: Any) -> None:
    two, told = ranks(2), []
    two.watchdog.arm(told.append)
    two.watchdog.start()
    two.watchdog.close()
    two.processes[0].returncode = 0
    assert two.watchdog.wait_loss(0.2) is None and told == []
