# SPDX-License-Identifier: Apache-2.0
"""Notices an engine that has work and takes no step, and puts one report with the stacks of all threads into the log.

Knows counters and time; knows no HTTP and no request.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import NoReturn, Protocol

from tokenspeed.core.ipc import EngineStats
from tokenspeed.observability.stacks import own_stacks

LOOK_EVERY_S = 1.0
_LATE = 4
_NUM_TASKS_MAX = 16
_log = logging.getLogger(__name__)


class Engine(Protocol):
    """What is watched, as llm.AsyncLLM is. num_live: sequences that were sent and have not ended."""

    @property
    def is_alive(self) -> bool: ...

    @property
    def num_live(self) -> int: ...

    @property
    def stats(self) -> EngineStats: ...

    def tell_stacks(self) -> None:
        """Let the engine's process write its stacks to stderr."""
        ...


class StallWatch:
    """stall_s: an engine with work that takes no step for so long is stuck. One report a stall."""

    def __init__(
        self,
        engine: Engine,
        stall_s: float,
        *,
        look_every_s: float = LOOK_EVERY_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine, self._stall_s, self._look_every_s, self._clock = engine, stall_s, look_every_s, clock
        self._looked_at = self._went_on_at = clock()
        self._num_steps = -1
        self._is_stuck = False

    async def run(self) -> NoReturn:
        """Look now and then; to be cancelled when serving ends."""
        while True:
            await asyncio.sleep(self._look_every_s)
            self.look()

    def look(self) -> None:
        """Compare with what was seen last. What this process itself was too late to read is no stall."""
        now, stats = self._clock(), self._engine.stats
        was_late = now - self._looked_at > _LATE * self._look_every_s
        has_work = self._engine.is_alive and (self._engine.num_live or stats.num_running + stats.num_waiting) > 0
        if was_late or not has_work or stats.num_steps != self._num_steps:
            if self._is_stuck:
                _log.warning("the engine goes on, or has no work any more, after %.0f s", now - self._went_on_at)
            self._went_on_at, self._num_steps, self._is_stuck = now, stats.num_steps, False
        elif not self._is_stuck and now - self._went_on_at > self._stall_s:
            self._is_stuck = True
            self._report(now - self._went_on_at, stats)
        self._looked_at = now

    def _report(self, silent_s: float, stats: EngineStats) -> None:
        _log.error(
            "the engine has work and has taken no step for %.0f s (%d run, %d wait, %d steps so far). Stacks of the "
            "server, then of the engine:\n%s%s",
            silent_s, stats.num_running, stats.num_waiting, stats.num_steps, own_stacks(), _tasks(),
        )  # fmt: skip
        self._engine.tell_stacks()


def _tasks() -> str:
    """What the tasks of this event loop wait for."""
    try:
        tasks = asyncio.all_tasks()
    except RuntimeError:  # no loop runs here
        return ""
    lines = [f"\n{len(tasks)} tasks:"]
    for task in list(tasks)[:_NUM_TASKS_MAX]:
        frames = task.get_stack(limit=1)
        where = f"{frames[0].f_code.co_filename}:{frames[0].f_lineno}" if frames else "-"
        lines.append(f"  {task.get_name()} at {where}")
    return "\n".join(lines)
