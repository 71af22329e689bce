# SPDX-License-Identifier: Apache-2.0
"""A process that answers the signal tells where all of its threads are."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time

from tokenspeed.observability.stacks import STACKS_SIGNAL, own_stacks

CHILD = """
import sys, threading, time
from tokenspeed.observability.stacks import answer_stacks_signal
answer_stacks_signal()
begun = threading.Event()
def inner_of_other_thread():
    begun.set()
    time.sleep(60)
def inner_of_main():
    print("ready", flush=True)
    sys.stdin.read()
threading.Thread(target=inner_of_other_thread, daemon=True).start()
begun.wait()
inner_of_main()
"""


def test_own_stacks_name_every_thread() -> None:
    stop, ready = threading.Event(), threading.Event()

    def work_of_a_thread() -> None:
        ready.set()
        stop.wait(10.0)

    thread = threading.Thread(target=work_of_a_thread, name="a-worker")
    thread.start()
    ready.wait(10.0)
    text = own_stacks()
    stop.set()
    thread.join()
    assert "thread a-worker:" in text and "in work_of_a_thread" in text
    assert "thread MainThread:" in text and "in test_own_stacks_name_every_thread" in text


def test_the_signal_is_answered_twice_and_ends_nothing() -> None:
    """One that comes while the last is still being answered is dropped, so they are repeated."""
    with subprocess.Popen(
        [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        assert child.stdin is not None and child.stdout is not None and child.stderr is not None
        assert child.stdout.readline() == "ready\n"
        lines: list[str] = []
        reading = threading.Thread(target=lambda: lines.extend(child.stderr or ()))
        reading.start()
        deadline = time.monotonic() + 60.0
        while any(sum(name in line for line in lines) < 2 for name in ("inner_of_main", "inner_of_other_thread")):
            assert time.monotonic() < deadline, lines
            child.send_signal(STACKS_SIGNAL)
            time.sleep(0.02)
        child.stdin.close()
        assert child.wait(60.0) == 0
        reading.join()
    assert STACKS_SIGNAL is signal.SIGUSR1
