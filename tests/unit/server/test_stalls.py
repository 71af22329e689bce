# SPDX-License-Identifier: Apache-2.0
"""An engine that is stuck is reported once, with stacks; one that is idle, slow or loading is not."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from fakes import FakeRunner, FakeWorker, engine_info
from tokenspeed.core.ipc import EngineStats
from tokenspeed.server.served import Patience
from tokenspeed.server.stalls import StallWatch


@dataclass
class FakeEngine:
    """Says what it is told to, and counts how often its stacks are asked for."""

    is_alive: bool = True
    num_live: int = 1
    stats: EngineStats = field(default_factory=EngineStats)
    num_asked: int = 0

    def tell_stacks(self) -> None:
        self.num_asked += 1

    def step(self) -> None:
        self.stats = EngineStats(num_running=1, num_steps=self.stats.num_steps + 1)


@dataclass
class Scene:
    """A watch that looks every second of a clock that is set by hand."""

    engine: FakeEngine = field(default_factory=FakeEngine)
    now: float = 100.0

    def __post_init__(self) -> None:
        self.watch = StallWatch(self.engine, 10.0, clock=lambda: self.now)
        self.watch.look()

    def wait(self, seconds: int, each_second: Callable[[], None] = lambda: None) -> int:
        """How many reports there were."""
        before = self.engine.num_asked
        for _ in range(seconds):
            self.now += 1.0
            each_second()
            self.watch.look()
        return self.engine.num_asked - before


def test_a_stall_is_reported_once_with_stacks_and_its_end_is_told(caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene()
    scene.engine.step()
    assert scene.wait(10) == 0
    with caplog.at_level(logging.WARNING, "tokenspeed"):
        assert scene.wait(100) == 1
        scene.engine.step()
        assert scene.wait(10) == 0
        assert scene.wait(100) == 1, "another stall"
    report, end, _ = [record.getMessage() for record in caplog.records if record.name == "tokenspeed.server.stalls"]
    assert report.startswith("the engine has work and has taken no step for 1")
    assert "thread MainThread:" in report and "test_stalls.py" in report
    assert end.startswith("the engine goes on")


@pytest.mark.parametrize(
    "each_second",
    [
        lambda engine: engine.step(),
        lambda engine: setattr(engine, "num_live", 0),
        lambda engine: setattr(engine, "is_alive", False),
    ],
    ids=["steps", "idle", "dead or loading"],
)
def test_what_is_no_stall(each_second: Callable[[FakeEngine], None]) -> None:
    scene = Scene()
    assert scene.wait(300, lambda: each_second(scene.engine)) == 0


def test_long_steps_below_the_limit_are_no_stall() -> None:
    scene = Scene()
    for _ in range(20):
        scene.engine.step()
        assert scene.wait(10) == 0


def test_work_that_was_sent_and_never_begun_is_a_stall() -> None:
    scene = Scene(FakeEngine(num_live=1, stats=EngineStats()))
    assert scene.wait(30) == 1


def test_heartbeats_without_steps_are_a_stall() -> None:
    scene = Scene(FakeEngine(num_live=0))

    def beat() -> None:
        scene.engine.stats = EngineStats(num_waiting=1, num_steps=7)

    assert scene.wait(30, beat) == 1


def test_a_server_that_was_held_up_itself_blames_nobody() -> None:
    scene = Scene()
    scene.engine.step()
    scene.wait(1)
    scene.now += 60.0
    assert scene.wait(10) == 0
    assert scene.wait(10) == 1


def test_the_tasks_of_the_server_are_named(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        waiting = asyncio.create_task(asyncio.sleep(60), name="somebody-who-waits")
        await asyncio.sleep(0)
        Scene().wait(30)
        waiting.cancel()

    with caplog.at_level(logging.WARNING, "tokenspeed"):
        asyncio.run(scenario())
    assert "somebody-who-waits" in caplog.text


class Gate:
    """Holds up the engine at a step while it is shut."""

    def __init__(self) -> None:
        self.open = threading.Event()

    def __call__(self) -> None:
        assert self.open.wait(120.0)


def test_an_engine_that_hangs_in_its_first_step_is_unhealthy_and_reported(
    start: Any, caplog: pytest.LogCaptureFixture
) -> None:
    gate = Gate()
    server = start(
        worker=FakeWorker(FakeRunner(pace=gate), engine_info()),
        patience=Patience(stall_s=0.2),
    )
    watch = StallWatch(server.llm, 0.2, look_every_s=60.0)

    def reports() -> list[str]:
        texts = [record.getMessage() for record in caplog.records]
        return [text for text in texts if text.startswith("the engine has work and has taken no step")]

    caller = threading.Thread(target=server.chat, daemon=True)
    caller.start()
    deadline = time.monotonic() + 60.0
    with caplog.at_level(logging.ERROR, "tokenspeed"):
        while server.client.get("/health").status_code == 200 or not reports():
            watch.look()
            assert time.monotonic() < deadline, "nobody noticed"
            time.sleep(0.01)
    gate.open.set()
    caller.join(60.0)
    (report,) = reports()
    assert "thread tokenspeed-engine:" in report, "an engine on a thread is in our own stacks"
    assert "in launch" in report
    assert server.client.get("/health").status_code == 200
