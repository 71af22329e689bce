# SPDX-License-Identifier: Apache-2.0
"""One daemon thread that does what its owner asks, while the owner looks whether it still makes sense to wait.

For work that may never return because another rank does not. Knows nothing of the work.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")
_CHECK_EVERY_S = 0.05


class Lane:
    """Used by one thread at a time; all work runs on the same other thread."""

    def __init__(self, name: str) -> None:
        self._work: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def run(self, work: Callable[[], T], check: Callable[[], None]) -> T:
        """What `work` returns or raises. check is called now and then meanwhile; what it raises ends the waiting, and
        the work is left to itself."""
        future: Future[T] = Future()
        self._work.put((work, future))
        while True:
            try:
                return future.result(_CHECK_EVERY_S)
            except TimeoutError:
                if future.done():  # the work's own, or it ended just now
                    return future.result()
            check()

    def close(self) -> None:
        """End the thread after its work; does not wait."""
        self._work.put(None)

    def _run(self) -> None:
        while (job := self._work.get()) is not None:
            work, future = job
            try:
                future.set_result(work())
            except BaseException as error:  # noqa: BLE001 whatever it is, the owner gets it
                future.set_exception(error)
            del job, work, future  # they may hold much
