# SPDX-License-Identifier: Apache-2.0
"""Starts the engine again when it has died, and knows when that is no use.

Knows deaths, times and starts; knows no HTTP, no process and no request.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import NoReturn, Protocol

from tokenspeed.core.errors import EngineDeadError, StartError

_log = logging.getLogger(__name__)


class EngineEndedError(StartError):
    """The engine ended while serving, and is not started again; the program ends with it."""


class Mortal(Protocol):
    """Something with an engine, as llm.AsyncLLM is."""

    async def wait_death(self) -> EngineDeadError:
        """Why the engine has died, once it has."""
        ...

    async def restart(self) -> None:
        """Put a new engine in place of the dead one. Raises StartError, and OSError when no process can be had."""
        ...


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """quick_s: an engine that dies so soon after it could serve has died quickly, and so has one that cannot start.
    restarts_max: after so many quick deaths in a row that were followed by another start, the next one is the last.
    back_off_s: waited before the second start in a row, and twice as long before each further one."""

    quick_s: float = 60.0
    restarts_max: int = 4
    back_off_s: float = 1.0

    def wait_s(self, num_quick: int) -> float:
        """How long to wait before the start that follows so many quick deaths in a row. The first is mended at once."""
        return 0.0 if num_quick <= 1 else float(self.back_off_s * 2 ** (num_quick - 2))


async def supervise(
    llm: Mortal,
    policy: RestartPolicy,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
) -> NoReturn:
    """Start the engine again each time that it dies; to be cancelled when serving ends. Raises EngineEndedError after
    too many quick deaths in a row."""
    num_quick, ready_at = 0, clock()
    while True:
        cause = str(await llm.wait_death())
        num_quick = num_quick + 1 if clock() - ready_at < policy.quick_s else 1
        while True:
            if num_quick > policy.restarts_max:
                raise EngineEndedError(f"the engine has ended {num_quick} times in a row, the last time so: {cause}")
            wait_s = policy.wait_s(num_quick)
            _log.warning("%s; its requests are lost, and it is started again in %.0f s", cause, wait_s)
            await sleep(wait_s)
            try:
                await llm.restart()
            except (StartError, OSError) as error:  # the latter where the machine has no room for a process
                cause = f"the engine cannot start: {error}"
                num_quick += 1
            else:
                break
        ready_at = clock()
        _log.warning("the engine serves again")
