# SPDX-License-Identifier: Apache-2.0
"""A worker answers line by line; one that ends, or hangs, is an error that says what it said last."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tokenspeed.bench.workers import BusyMeter, Worker, WorkerError

ECHO = """
import json, sys
print(json.dumps({"hello": 1}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    if asked["do"] == "end":
        print("no room left", file=sys.stderr)
        sys.exit(7)
    print(json.dumps({"did": asked["do"]}), flush=True)
"""


def started(program: str, log: Path, wait_s: float = 30.0) -> Worker:
    return Worker("peer", [sys.executable, "-c", program], log, wait_s)


def test_answers_come_one_for_each_request(tmp_path: Path) -> None:
    worker = started(ECHO, tmp_path / "log")
    try:
        assert worker.hello == {"hello": 1}
        assert [worker.ask({"do": name})["did"] for name in ("a", "b")] == ["a", "b"]
    finally:
        worker.close()


def test_one_that_ends_is_told_with_its_last_words(tmp_path: Path) -> None:
    worker = started(ECHO, tmp_path / "log")
    try:
        with pytest.raises(WorkerError, match="peer ended with code 7: no room left"):
            worker.ask({"do": "end"})
        with pytest.raises(WorkerError, match="code 7"):
            worker.ask({"do": "a"})
    finally:
        worker.close()


def test_one_that_cannot_start_is_told(tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match="no such engine"):
        started("raise SystemExit('no such engine')", tmp_path / "log")


def test_one_that_hangs_is_ended(tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match=r"did not answer within 0 s"):
        started("import time; time.sleep(600)", tmp_path / "log", wait_s=0.2)


def stat(proc: Path, pid: int, own_ticks: int, all_ticks: int) -> None:
    """As the kernel writes them; a process may have any name."""
    (proc / str(pid)).mkdir(exist_ok=True)
    (proc / "stat").write_text(f"cpu  {all_ticks} 0 0 999999 0 0 0 0 0 0\n")
    (proc / str(pid) / "stat").write_text(f"{pid} (a) b (c) S 1 1 1 0 -1 0 0 0 0 0 {own_ticks} 0 0 0 20 0\n")


def test_others_are_all_but_the_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("tokenspeed.bench.workers.time.monotonic", lambda: now)
    ticks = os.sysconf("SC_CLK_TCK")
    stat(tmp_path, 12, 0, 0)
    meter = BusyMeter([12], tmp_path)
    now = 10.0
    stat(tmp_path, 12, 12 * ticks, 17 * ticks)
    assert meter.others() == pytest.approx(0.5)
    now = 20.0
    stat(tmp_path, 12, 22 * ticks, 27 * ticks)
    assert meter.others() == pytest.approx(0.0)
