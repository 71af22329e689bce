# SPDX-License-Identifier: Apache-2.0
"""How ranks come to follow, and what of the machine each of them takes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tokenspeed import cli
from tokenspeed.core.config import CacheConfig, DeviceConfig, EngineConfig, LaunchedRank, ParallelConfig
from tokenspeed.engine import follower
from tokenspeed.engine.process import EngineProcess
from tokenspeed.engine.replica import share_of_machine
from tokenspeed.llm import async_llm
from tokenspeed.llm.llm import engine_config
from tokenspeed.server import serve as serving


def launch_as(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    values = (rank, 2, rank, 2, "127.0.0.1")
    for name, value in zip(
        ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"), values, strict=True
    ):
        monkeypatch.setenv(name, str(value))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was done: following, or serving."""
    calls: list[Any] = []

    def follow(*arguments: Any) -> int:
        calls.append(arguments)
        return 5

    def serve(asked: Any) -> int:
        calls.append(asked.engine.parallel)
        return 0

    monkeypatch.setattr(follower, "follow_launched", follow)
    monkeypatch.setattr(serving, "serve", serve)
    return calls


FLAGS = "serve m --tp 2 --ep 4 --dp-attention 3 --moe-tp 1 --rank-timeout 2.5 --device cpu --kernel collective=gloo"


def test_flags_and_options_become_configuration(calls: list[Any]) -> None:
    assert cli.main(FLAGS.split()) == 0
    asked = ParallelConfig(tp=2, ep=4, dp_attention=3, moe_tp=1, rank_timeout_s=2.5)
    assert calls == [asked]
    assert engine_config(model="m", tp=2, ep=4, dp_attention=3, moe_tp=1, rank_timeout_s=2.5).parallel == asked


def test_the_first_rank_of_a_launcher_runs_the_command(monkeypatch: pytest.MonkeyPatch, calls: list[Any]) -> None:
    launch_as(monkeypatch, 0)
    assert cli.main(["serve", "m", "--tp", "2"]) == 0
    assert calls == [ParallelConfig(tp=2)]


@pytest.mark.parametrize("command", [FLAGS, FLAGS.replace("serve m", "chat m"), FLAGS.replace("serve", "generate")])
def test_further_ranks_of_a_launcher_follow_in_place_of_it(
    monkeypatch: pytest.MonkeyPatch, calls: list[Any], command: str
) -> None:
    launch_as(monkeypatch, 1)
    assert cli.main(command.split()) == 5
    device = DeviceConfig(device="cpu", kernel_overrides=(("collective", "gloo"),))
    assert calls == [(LaunchedRank(1, 2, 1, 2, "127.0.0.1"), device)]


def test_a_command_without_a_model_is_run_by_every_rank(
    monkeypatch: pytest.MonkeyPatch, calls: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    launch_as(monkeypatch, 1)
    assert cli.main(["models"]) == 0
    assert calls == [] and "MODEL" in capsys.readouterr().out


def test_several_ranks_are_never_started_on_a_thread_of_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    spawned: list[EngineConfig] = []
    monkeypatch.setattr(EngineProcess, "spawn", spawned.append)
    several = EngineConfig(parallel=ParallelConfig(tp=2))
    async_llm._launcher(several, "thread")()
    assert spawned == [several]


def test_ranks_of_a_machine_share_its_cores_and_memory() -> None:
    config = EngineConfig(cache=CacheConfig(memory_fraction=0.6), parallel=ParallelConfig(tp=4))
    cpu = share_of_machine(config, 4, 10, on_cpu=True)
    assert (cpu.device.num_threads, cpu.cache.memory_fraction) == (2, pytest.approx(0.15))
    assert share_of_machine(config, 4, 3, on_cpu=True).device.num_threads == 1
    assert share_of_machine(config, 4, 10, on_cpu=False).cache.memory_fraction == 0.6
    given = EngineConfig(device=DeviceConfig(num_threads=7))
    assert share_of_machine(given, 4, 10, on_cpu=True).device.num_threads == 7


def test_importing_a_follower_loads_no_torch() -> None:
    """So that it can be told early to leave."""
    code = "import sys, tokenspeed.engine.follower; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_rank_that_cannot_meet_the_others_says_so() -> None:
    """Nobody listens at the address any more; and its parent may be gone before it has joined."""
    command = [sys.executable, "-m", "tokenspeed.engine.follower", "--rank", "1", "--ranks", "2", "--device", "cpu"]
    asked = [*command, "--address", "127.0.0.1:1", "--kernel", "collective=nobody"]
    with subprocess.Popen(asked, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        said = process.stderr.read()
        assert process.wait(60.0) == 1
    assert said.startswith("tokenspeed engine: rank 1 could not meet the others: ConfigError: kernel override")


def test_a_rank_whose_parent_has_gone_leaves_while_it_still_waits() -> None:
    """Here it waits for good in joining the others."""
    program = [sys.executable, str(Path(__file__).with_name("fake_ranks.py")), "--kernel", "join=1:hang"]
    place = ["--rank", "1", "--ranks", "2", "--device", "cpu", "--address", "127.0.0.1:1"]
    with subprocess.Popen([*program, *place], stdin=subprocess.PIPE) as process:
        try:
            assert process.stdin is not None
            process.stdin.close()
            assert process.wait(60.0) == 1
        finally:
            process.kill()
