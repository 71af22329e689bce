# SPDX-License-Identifier: Apache-2.0
"""A process that answers the signal tells where all of its threads are."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading

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
    with subprocess.Popen(
        [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        assert child.stdin is not None and child.stdout is not None and child.stderr is not None
        assert child.stdout.readline() == "ready\n"
        seen = ""
        for _ in range(2):
            child.send_signal(STACKS_SIGNAL)
            part = ""
            while "inner_of_main" not in part or "inner_of_other_thread" not in part:
                part += child.stderr.readline()
            seen += part
        child.stdin.close()
        assert child.wait(10.0) == 0
    assert seen.count("inner_of_main") >= 2
    assert STACKS_SIGNAL is signal.SIGUSR1
