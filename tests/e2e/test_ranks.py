# SPDX-License-Identifier: Apache-2.0
"""Replicas of several real ranks: same tokens, one end. Everything through the command line."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from scripted import write_scripted_model

MODULE = ("-m", "tokenspeed")
LAUNCHER = (sys.executable, "-m", "torch.distributed.run")
REPLY = "All work and no play makes a dull day. " * 50


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_scripted_model(tmp_path_factory.mktemp("ranks") / "model", [("", REPLY)], step_s=0.01)


def generate(model: Path, *flags: str) -> tuple[str, ...]:
    """Arguments of a command that continues a prompt."""
    sampling = ("--max-tokens", "16", "--temperature", "0", "--kv-tokens", "1024")
    return ("generate", "--model", str(model), *sampling, *flags, "def add(a, b):")


def scripted(folder: Path, *flags: str) -> tuple[str, ...]:
    return generate(folder, "--load-format", "scripted", *flags)


@contextlib.contextmanager
def started(*commands: Sequence[str]) -> Iterator[list[subprocess.Popen[str]]]:
    """Processes in sessions of their own, of which nothing is left afterwards."""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, start_new_session=True, **pipes) for command in commands]
    try:
        yield processes
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def run(*commands: Sequence[str]) -> list[tuple[int, str, str]]:
    """(exit code, stdout, stderr) of processes that run side by side."""
    with started(*commands) as processes:
        said = [process.communicate(timeout=200.0) for process in processes]
        return [(process.returncode, *texts) for process, texts in zip(processes, said, strict=True)]


def tokenspeed(*arguments: str) -> tuple[int, str, str]:
    return run((sys.executable, *MODULE, *arguments))[0]


@pytest.mark.models
@pytest.mark.parametrize(
    "flags", [("--tp", "2"), pytest.param(("--dp-attention", "2"), marks=pytest.mark.slow)], ids=" ".join
)
def test_several_ranks_say_what_one_says(tinycoder_path: Path, flags: tuple[str, ...]) -> None:
    code, alone, _ = tokenspeed(*generate(tinycoder_path))
    assert code == 0 and len(alone.split()) > 1
    code, together, log = tokenspeed(*generate(tinycoder_path, *flags))
    assert code == 0, log
    assert together == alone
    assert "2 ranks are ready, 2 of them on this machine" in log


@pytest.mark.models
@pytest.mark.slow
def test_ranks_that_do_not_fit_the_model_are_one_line(tinycoder_path: Path) -> None:
    code, _, log = tokenspeed(*generate(tinycoder_path, "--tp", "3"))
    errors = [line for line in log.splitlines() if "rror" in line]
    assert code == 1 and len(errors) == 1 and errors[0].startswith("error: ")


def test_ranks_that_do_not_nest_are_one_line(folder: Path) -> None:
    code, _, log = tokenspeed(*scripted(folder, "--tp", "2", "--ep", "3"))
    assert code == 1
    assert log.splitlines()[-1] == "error: ep 3 does not divide the 2 ranks; ep may be 1 or 2"


def children(pid: int) -> list[int]:
    """Processes that this one has started, the longest living first."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sorted(int(child) for task in tasks for child in (task / "children").read_text().split())


@pytest.mark.parametrize(
    ("number", "line"),
    [
        (signal.SIGKILL, "tokenspeed engine: rank 1 ended by SIGKILL"),
        pytest.param(signal.SIGSTOP, "tokenspeed engine: rank 1 has not finished step ", marks=pytest.mark.slow),
    ],
)
def test_a_lost_rank_ends_the_replica_and_all_of_it_is_started_again(
    start_server: Any, folder: Path, number: signal.Signals, line: str
) -> None:
    server = start_server(str(folder), "--load-format", "scripted", "--tp", "2", "--rank-timeout", "3")
    (engine,) = children(server.process.pid)
    (rank_1,) = children(engine)
    answers: list[object] = []

    def call() -> None:
        with contextlib.suppress(httpx.HTTPError):
            answers.append(server.chat("x", max_tokens=4000, ignore_eos=True).status_code)

    caller = threading.Thread(target=call)
    caller.start()
    while server.metric("num_requests_running") == 0.0:
        time.sleep(0.01)
    os.kill(rank_1, number)
    caller.join(60.0)
    assert answers == [503]
    deadline = time.monotonic() + 240.0
    while server.client.get("/health").status_code != 200:
        assert time.monotonic() < deadline, server.log
        time.sleep(0.05)
    assert server.chat("x", max_tokens=4).status_code == 200
    said = [text for text in server.log.splitlines() if text.startswith("tokenspeed engine: ")]
    assert len(said) == 1 and said[0].startswith(line)
    assert not Path(f"/proc/{rank_1}").exists() and not Path(f"/proc/{engine}").exists()
    assert server.metric("engine_restarts_total") == 1.0
    (engine,) = children(server.process.pid)
    assert len(children(engine)) == 1 and server.stop() == 0
    assert not Path(f"/proc/{engine}").exists()


def test_a_server_of_several_ranks_ends_in_order(start_server: Any, folder: Path) -> None:
    server = start_server(str(folder), "--load-format", "scripted", "--tp", "2")
    (engine,) = children(server.process.pid)
    (rank_1,) = children(engine)
    assert server.chat("x").status_code == 200
    assert server.stop() == 0
    assert not Path(f"/proc/{rank_1}").exists() and not Path(f"/proc/{engine}").exists()
    assert "tokenspeed engine" not in server.log and "Traceback" not in server.log


def test_a_launcher_starts_the_ranks_of_one_node(folder: Path) -> None:
    command = (*LAUNCHER, "--standalone", "--nproc-per-node", "2", *MODULE, *scripted(folder, "--tp", "2"))
    ((code, text, log),) = run(command)
    assert (code, text) == (0, f"{REPLY[:16]}\n"), log
    assert "2 ranks are ready, 2 of them on this machine" in log


def test_a_launcher_starts_the_ranks_of_two_nodes(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    meet = ("--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", port)
    arguments = (*MODULE, *scripted(folder, "--tp", "2"))
    first, second = run(*((*LAUNCHER, *meet, "--node-rank", str(node), *arguments) for node in (0, 1)))
    assert first[:2] == (0, f"{REPLY[:16]}\n"), first[2]
    assert second[:2] == (0, ""), second[2]
    assert "2 ranks are ready, 1 of them on this machine" in first[2]


@pytest.mark.slow
def test_a_launcher_with_another_number_of_ranks_is_refused(folder: Path) -> None:
    command = (*LAUNCHER, "--standalone", "--nproc-per-node", "2", *MODULE, *scripted(folder))
    ((code, text, log),) = run(command)
    assert code != 0 and text == ""
    assert "error: the launcher has started 2 ranks, but --tp 1 times --dp-attention 1 are 1" in log


PROMPTS = (
    "Write a haiku about rain.",
    "List three prime numbers.",
    "What does the command `ls -la` show?",
    "Explain what a mutex is.",
)


def texts(start: Any, model: Path, *flags: str) -> list[str]:
    """What a server answers to all prompts at once, and to the first again in a form. Exact weights: ranks add up in
    another order, which shows where activations are rounded to bytes."""
    server = start(str(model), "--exact", "--kv-tokens", "4096", *flags)
    server.client.timeout = httpx.Timeout(900.0)
    try:
        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            answers = list(pool.map(lambda prompt: server.chat(prompt, max_tokens=24), PROMPTS))
            answers.append(server.chat(PROMPTS[0], guided_regex="[a-z]{3}( [a-z]{3}){3}"))
        assert [answer.status_code for answer in answers] == [200] * (len(PROMPTS) + 1)
        server.wait_until_idle(10.0)
        return [answer.json()["choices"][0]["message"]["content"] for answer in answers]
    finally:
        server.close()


@pytest.fixture(scope="module")
def smollm2_answers(start_module_server: Any, smollm2_path: Path) -> list[str]:
    """Those of one rank."""
    return texts(start_module_server, smollm2_path)


@pytest.mark.models
@pytest.mark.parametrize(
    "flags",
    [("--tp", "3"), pytest.param(("--tp", "1", "--dp-attention", "3"), marks=pytest.mark.slow)],
    ids=" ".join,
)
def test_smollm2_over_three_ranks_answers_as_over_one(
    start_server: Any, smollm2_path: Path, smollm2_answers: list[str], flags: tuple[str, ...]
) -> None:
    """Nine heads and three K/V heads; or whole heads, and requests spread over three partitions."""
    assert texts(start_server, smollm2_path, *flags) == smollm2_answers


@pytest.mark.models
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_qwen_coder_over_two_ranks_answers_as_over_one(start_server: Any, qwen_coder_path: Path) -> None:
    alone = texts(start_server, qwen_coder_path)
    assert texts(start_server, qwen_coder_path, "--tp", "2") == alone
