# SPDX-License-Identifier: Apache-2.0
"""When an engine is started again, how long that is put off, and when it is no use. The real ones are in tests/e2e."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from tokenspeed.core.errors import EngineDeadError, StartError
from tokenspeed.server.supervisor import EngineEndedError, RestartPolicy, supervise

POLICY = RestartPolicy(quick_s=60.0, restarts_max=4, back_off_s=1.0)
START_S = 5.0


@dataclass
class FakeEngine:
    """Lives for each of `lives_s`, then for ever. A start in `bad_starts`, counted from 0, fails."""

    lives_s: Sequence[float]
    bad_starts: Sequence[int] = ()
    now_s: float = 100.0
    waits_s: list[float] = field(default_factory=list)
    num_deaths: int = 0
    num_starts: int = 0
    lives_on: asyncio.Event = field(default_factory=asyncio.Event)

    async def wait_death(self) -> EngineDeadError:
        if self.num_deaths == len(self.lives_s):
            self.lives_on.set()
            await asyncio.Event().wait()
        self.now_s += self.lives_s[self.num_deaths]
        self.num_deaths += 1
        return EngineDeadError(f"death {self.num_deaths}")

    async def restart(self) -> None:
        self.num_starts += 1
        self.now_s += START_S
        if self.num_starts - 1 in self.bad_starts:
            raise (StartError, OSError)[self.num_starts % 2]("no room")

    async def sleep(self, wait_s: float) -> None:
        self.waits_s.append(wait_s)
        self.now_s += wait_s


def run(engine: FakeEngine) -> None:
    """Until the engine lives on, or is given up."""

    async def scenario() -> None:
        work = asyncio.ensure_future(supervise(engine, POLICY, clock=lambda: engine.now_s, sleep=engine.sleep))
        lives_on = asyncio.ensure_future(engine.lives_on.wait())
        await asyncio.wait({work, lives_on}, return_when=asyncio.FIRST_COMPLETED)
        for task in (work, lives_on):
            task.cancel()
        await asyncio.gather(lives_on, return_exceptions=True)
        if not work.cancelled() and work.done():
            work.result()
        else:
            await asyncio.gather(work, return_exceptions=True)

    asyncio.run(scenario())


def test_the_first_death_is_mended_at_once() -> None:
    engine = FakeEngine([1.0])
    run(engine)
    assert (engine.num_starts, engine.waits_s) == (1, [0.0])


def test_quick_deaths_are_mended_ever_later_and_then_no_more() -> None:
    engine = FakeEngine([1.0] * 9)
    with pytest.raises(EngineEndedError, match="ended 5 times in a row, the last time so: death 5"):
        run(engine)
    assert engine.waits_s == [0.0, 1.0, 2.0, 4.0]


def test_a_long_life_makes_up_for_quick_deaths() -> None:
    engine = FakeEngine([1.0, 1.0, 1.0, 61.0, 1.0, 1.0, 1.0])
    run(engine)
    assert engine.waits_s == [0.0, 1.0, 2.0, 0.0, 1.0, 2.0, 4.0]
    assert engine.num_starts == 7


def test_a_start_that_fails_counts_as_a_death() -> None:
    engine = FakeEngine([100.0], bad_starts=(0, 1))
    run(engine)
    assert (engine.num_starts, engine.waits_s) == (3, [0.0, 1.0, 2.0])
    hopeless = FakeEngine([100.0], bad_starts=range(99))
    with pytest.raises(EngineEndedError, match="5 times in a row, the last time so: the engine cannot start: no room"):
        run(hopeless)
    assert hopeless.num_starts == 4
