# SPDX-License-Identifier: Apache-2.0
"""Where the threads of a process are, for somebody who wonders why nothing goes on.

A process that answers the signal does so even while its interpreter is held up in native code. Knows no engine.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import traceback

STACKS_SIGNAL = signal.SIGUSR1
_STDERR = 2


def answer_stacks_signal() -> None:
    """From now on this process writes the stacks of its threads to stderr when it gets STACKS_SIGNAL. Without this the
    signal ends a process."""
    faulthandler.register(STACKS_SIGNAL, file=_STDERR, all_threads=True)


def own_stacks() -> str:
    """The stacks of this process's threads, the innermost call last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = [f"process {os.getpid()}:"]
    for ident, frame in sys._current_frames().items():
        stack = "".join(traceback.format_stack(frame)).rstrip()
        parts.append(f"thread {names.get(ident, ident)}:\n{stack}")
    return "\n".join(parts)
