# SPDX-License-Identifier: Apache-2.0
"""Ranks as real processes without a model: they meet, build, run steps, and end together, whoever goes first."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tokenspeed.core.errors import CapacityError, ConfigError, StartError
from tokenspeed.engine.replica import Replica, ReplicaLostError
from unit.engine import fake_ranks as fakes

FAKES = Path(__file__).with_name("fake_ranks.py")


class Ended:
    """Stands in for the end of this process."""

    def __init__(self) -> None:
        self.code: int | None = None
        self.came = threading.Event()

    def __call__(self, code: int) -> None:
        self.code = code
        self.came.set()


@pytest.fixture
def ended() -> Ended:
    return Ended()


@pytest.fixture
def new(ended: Ended) -> Iterator[Any]:
    """Makes replicas whose processes end with the test."""
    replicas: list[Replica] = []

    def make(**options: Any) -> Replica:
        replicas.append(fakes.new_replica(fakes.config(**options), leave=ended))
        return replicas[-1]

    yield make
    for replica in replicas:
        replica.close(in_order=False)
        if replica._communicator is not None:
            replica._communicator.close()
        assert all(process.poll() is not None for process in replica._processes.values())


def exit_codes(replica: Replica) -> list[int | None]:
    return [process.poll() for process in replica._processes.values()]


def test_ranks_meet_run_steps_and_end_in_order(new: Any, ended: Ended) -> None:
    replica = new(num_ranks=3)
    runner = fakes.start(replica)
    handles = [runner.launch(*fakes.step(step_id)) for step_id in (1, 2)]
    assert [handle.wait().result.token_ids.tolist() for handle in handles] == [[1], [2]]
    runner.close()
    assert exit_codes(replica) == [0, 0]
    assert ended.code is None and replica.watchdog.loss is None
    runner.close()


def test_each_rank_gets_the_shared_configuration(new: Any) -> None:
    """What `share` makes of it reaches the followers: the deed is there, and nowhere in rank 0's own."""
    replica = new()
    seen = []

    def share(config: Any, num_local_ranks: int) -> Any:
        seen.append(num_local_ranks)
        return fakes.config(building="1:capacity")

    config = replica.meet(share)
    assert seen == [2]
    with pytest.raises(CapacityError, match="too small by far"):
        replica.create(lambda communicator: fakes.build(config, communicator), lambda built: built[1])


@pytest.mark.parametrize(
    ("deed", "error", "words"),
    [
        ("1:capacity", CapacityError, "too small by far"),
        ("0:capacity", CapacityError, "too small by far"),
        ("1:bug", StartError, "the engine failed to start: ZeroDivisionError: a bug"),
        ("1:exit", StartError, "rank 1 ended with exit code 7 while starting"),
        ("1:kill", StartError, "rank 1 ended by SIGKILL"),
        ("1:shape", StartError, "rank 1 has another shape, but rank 0 has the shape"),
    ],
)
def test_a_rank_that_cannot_start_is_told_as_it_is(
    new: Any, ended: Ended, deed: str, error: type[StartError], words: str
) -> None:
    replica = new(building=deed)
    with pytest.raises(error) as caught:
        fakes.start(replica)
    assert type(caught.value) is error and str(caught.value).startswith(words)
    assert ended.code is None


def test_a_reason_given_comes_before_what_follows_from_it(new: Any) -> None:
    """Rank 0 fails since rank 1 has gone; rank 1 had said why."""
    replica = new(building="1:capacity")
    config = replica.meet()

    def build(communicator: Any) -> Any:
        assert replica.watchdog.wait_loss(10.0) is not None
        raise RuntimeError("connection reset by peer")

    with pytest.raises(CapacityError, match="too small by far"):
        replica.create(build, str)
    assert config.model.model == "1:capacity"


def test_rank_0_does_not_wait_for_a_rank_that_hangs_while_another_one_dies(new: Any) -> None:
    """Here rank 0 itself hangs in what it builds, as in an exchange that nobody answers."""
    replica = new(building="1:exit")
    replica.meet()
    with pytest.raises(StartError, match="rank 1 ended with exit code 7 while starting"):
        replica.create(lambda _: fakes.FOREVER.wait(), str)


@pytest.mark.parametrize("deed", ["1:exit", "2:kill"])
def test_a_rank_that_dies_before_it_joins_is_told(new: Any, deed: str) -> None:
    replica = new(joining=deed, num_ranks=3)
    with pytest.raises(StartError, match=f"rank {deed[0]} ended .* before it began"):
        replica.meet()


def test_transfers_end_when_they_have_on_all_ranks(new: Any) -> None:
    runner = fakes.start(new(num_ranks=3))
    told = list(runner.launch(*fakes.step(1, "1:late", [7, 7, 8])).wait().transfers)
    told += runner.launch(*fakes.step(2, "2:lose", [9])).wait().transfers
    waited = threading.Event()
    for _ in range(500):
        told += runner.poll_transfers()
        if len(told) == 3:
            break
        waited.wait(0.01)
    assert sorted(told) == [(7, True), (8, True), (9, False)]
    assert runner.poll_transfers() == ()


@pytest.mark.parametrize(
    ("word", "line"),
    [
        ("1:exit", "rank 1 ended with exit code 7"),
        ("1:kill", "rank 1 ended by SIGKILL"),
        ("1:fault", "rank 1 failed step 1"),
        ("1:bug", "rank 1 failed step 1"),
        ("1:break-launch", "rank 1 failed step 1"),
        ("0:fault", "rank 0 failed step 1"),
        ("0:break-launch", "rank 0 failed step 1: RuntimeError: cannot launch"),
    ],
)
def test_a_step_that_one_rank_fails_ends_the_replica(
    new: Any, ended: Ended, capfd: pytest.CaptureFixture[str], word: str, line: str
) -> None:
    replica = new()
    runner = fakes.start(replica)
    if word.startswith("1"):
        runner.launch(*fakes.step(1, word)).wait()
    else:
        with pytest.raises(ReplicaLostError, match=line):
            runner.launch(*fakes.step(1, word)).wait()
    assert ended.came.wait(10.0) and ended.code == 1
    said = [text for text in capfd.readouterr().err.splitlines() if text.startswith("tokenspeed engine: rank")]
    assert len(said) == 1 and said[0].startswith(f"tokenspeed engine: {line}")
    for process in replica._processes.values():
        assert process.wait(10.0) != 0


def test_a_rank_that_hangs_ends_the_replica(new: Any, ended: Ended, capfd: pytest.CaptureFixture[str]) -> None:
    replica = new(rank_timeout_s=1.5, num_ranks=3)
    runner = fakes.start(replica)
    runner.launch(*fakes.step(1)).wait()
    runner.launch(*fakes.step(2, "2:hang")).wait()
    assert ended.came.wait(10.0) and ended.code == 1
    assert "tokenspeed engine: rank 2 has not finished step 2 within 1.5 s" in capfd.readouterr().err
    for process in replica._processes.values():
        assert process.wait(10.0) == -signal.SIGKILL


def test_sending_to_a_rank_that_has_gone_ends_the_replica(new: Any, ended: Ended) -> None:
    replica = new()
    runner = fakes.start(replica)
    os.kill(replica._processes[1].pid, signal.SIGKILL)
    assert ended.came.wait(10.0)

    def launch_on() -> None:
        for step_id in range(1, 100):
            runner.launch(*fakes.step(step_id))

    with pytest.raises(ReplicaLostError, match="rank 1 ended by SIGKILL"):
        launch_on()


class Program:
    """Rank 0 as a process, see fake_ranks."""

    def __init__(self, word: str, rank_timeout_s: float) -> None:
        command = [sys.executable, str(FAKES), "replica", word, str(rank_timeout_s)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        words = self.process.stdout.readline().split()
        assert words[:1] == ["serving"], words
        self.follower = int(words[1])

    def end(self) -> tuple[int, str]:
        """Exit code and stderr, which ends when the followers have ended too."""
        _, said = self.process.communicate(timeout=30.0)
        return self.process.returncode, said


@pytest.fixture
def program(request: pytest.FixtureRequest) -> Iterator[Program]:
    program = Program(*request.param)
    yield program
    program.process.kill()
    program.process.communicate()


@pytest.mark.parametrize("program", [("0:hang", 60.0)], indirect=True)
def test_a_killed_rank_ends_rank_0_though_its_own_step_hangs(program: Program) -> None:
    os.kill(program.follower, signal.SIGKILL)
    code, said = program.end()
    assert code == 1 and said.startswith("tokenspeed engine: rank 1 ended by SIGKILL")


@pytest.mark.parametrize("program", [("0:hang", 1.5)], indirect=True)
def test_rank_0_does_not_outlast_its_own_hanging_step(program: Program) -> None:
    assert program.end() == (1, "tokenspeed engine: rank 0 has not finished step 2 within 1.5 s\n")


@pytest.mark.parametrize("program", [("1:hang", 60.0)], indirect=True)
def test_ranks_end_when_rank_0_is_killed_though_their_step_hangs(program: Program) -> None:
    """They hold stderr open until they have ended."""
    program.process.kill()
    code, said = program.end()
    assert code == -signal.SIGKILL and said in ("", "tokenspeed engine: rank 1 ends, since rank 0 has gone\n")


def launched(monkeypatch: pytest.MonkeyPatch, rank: int, world_size: int) -> None:
    values = (rank, world_size, rank, world_size, "127.0.0.1")
    for name, value in zip(
        ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"), values, strict=True
    ):
        monkeypatch.setenv(name, str(value))


def test_a_launcher_that_started_another_number_of_ranks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    launched(monkeypatch, 0, 4)
    with pytest.raises(ConfigError, match="the launcher has started 4 ranks, but --tp 2 times --dp-attention 1 are 2"):
        fakes.new_replica(fakes.config())


def test_only_rank_0_of_a_launcher_starts_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    launched(monkeypatch, 1, 2)
    with pytest.raises(ConfigError, match="as rank 1, and only rank 0 starts an engine"):
        fakes.new_replica(fakes.config())


@pytest.mark.parametrize("way", ["broken", "full"])
def test_a_log_that_nobody_reads_keeps_no_rank_alive(
    new: Any, ended: Ended, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    forever = threading.Event()

    def say(text: str) -> None:
        if way == "full":
            forever.wait()
        raise BrokenPipeError(text)

    monkeypatch.setattr("tokenspeed.engine.replica.say", say)
    replica = new()
    fakes.start(replica)
    (process,) = replica._processes.values()
    os.kill(process.pid, signal.SIGKILL)
    assert ended.came.wait(60.0) and ended.code == 1
    forever.set()
