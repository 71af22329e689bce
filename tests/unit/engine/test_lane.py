# SPDX-License-Identifier: Apache-2.0
"""Work on another thread, and an owner that may stop to wait for it."""

from __future__ import annotations

import threading

import pytest

from tokenspeed.engine.lane import Lane


def test_all_work_runs_in_order_on_one_other_thread() -> None:
    lane = Lane("lane")
    threads = [lane.run(threading.get_ident, lambda: None) for _ in range(3)]
    assert len(set(threads)) == 1 and threads[0] != threading.get_ident()
    lane.close()


@pytest.mark.parametrize("error", [ValueError("no"), TimeoutError("its own")])
def test_what_the_work_raises_is_raised(error: Exception) -> None:
    lane = Lane("lane")

    def work() -> None:
        raise error

    with pytest.raises(type(error), match=str(error)):
        lane.run(work, lambda: None)
    lane.close()


def test_a_check_that_raises_ends_the_waiting_not_the_work() -> None:
    lane, go, done = Lane("lane"), threading.Event(), threading.Event()
    checks = []

    def check() -> None:
        checks.append(None)
        if len(checks) == 3:
            raise LookupError("the other has gone")

    def work() -> None:
        go.wait()
        done.set()

    with pytest.raises(LookupError, match="the other has gone"):
        lane.run(work, check)
    assert not done.is_set()
    go.set()
    assert done.wait(10.0)
    lane.close()
