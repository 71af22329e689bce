# SPDX-License-Identifier: Apache-2.0
"""A process that keeps an engine and is told what to run over a pipe, and what the other processes of the machine did
meanwhile. Knows no engine."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_WAIT_S = 3600.0
_END_S = 20.0


class WorkerError(Exception):
    """A worker has ended, or does not answer."""


class Worker:
    """Lines of JSON in, lines of JSON out: one before it is asked anything, then one an answer."""

    def __init__(self, name: str, command: Sequence[str], log: Path, wait_s: float = _WAIT_S) -> None:
        self._name, self._log, self._wait_s = name, log, wait_s
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
            )
        try:
            self.hello = self._read()
        except WorkerError:
            self.close()
            raise

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The answer. Raises WorkerError."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None
        return self._read()

    def close(self) -> None:
        """End it: it ends by itself once its input does."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], self._wait_s)
        if not ready:
            self._process.kill()
            raise WorkerError(f"{self._name} did not answer within {self._wait_s:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            raise self._ended()
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _ended(self) -> WorkerError:
        code = self._process.wait()
        lines = self._log.read_text(errors="replace").strip().splitlines() or ["it said nothing"]
        return WorkerError(f"{self._name} ended with code {code}: {lines[-1].strip()} (all of it: {self._log})")


class BusyMeter:
    """How many processors were busy with other processes than these since it was last asked."""

    def __init__(self, pids: Sequence[int], proc: Path = Path("/proc")) -> None:
        self._pids, self._proc = pids, proc
        self._tick_s = 1.0 / os.sysconf("SC_CLK_TCK")
        self._last = (time.monotonic(), *self._seconds())

    def others(self) -> float:
        """In the mean, at least 0."""
        last_at, last_all, last_own = self._last
        now, all_s, own_s = self._last = (time.monotonic(), *self._seconds())
        elapsed = max(1e-9, now - last_at)
        return max(0.0, (all_s - last_all) - (own_s - last_own)) / elapsed

    def _seconds(self) -> tuple[float, float]:
        """Of all processes, and of these."""
        user, nice, system, _idle, _wait, irq, soft, steal = map(int, self._words("stat")[1:9])
        own = 0
        for pid in self._pids:
            after_name = " ".join(self._words(f"{pid}/stat")).rpartition(")")[2].split()
            own += int(after_name[11]) + int(after_name[12])
        return (user + nice + system + irq + soft + steal) * self._tick_s, own * self._tick_s

    def _words(self, name: str) -> list[str]:
        return (self._proc / name).read_text().split()
