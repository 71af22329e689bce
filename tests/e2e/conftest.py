# SPDX-License-Identifier: Apache-2.0
"""`tokenspeed serve` as a child process with a scripted model: real HTTP, real engine process, real control plane."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

_ADDRESS = re.compile(r"address\s+http://127\.0\.0\.1:(\d+)")
_IDLE = ("num_requests_running", "num_requests_waiting", "kv_cache_used_blocks")


class ServerProcess:
    """A running server. Ends it on close; what it wrote to stderr is in `log`. program: what Python runs."""

    def __init__(self, *arguments: str, program: Sequence[str] = ("-m", "tokenspeed.cli")) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._log_path = Path(self._folder.name) / "stderr"
        command = [sys.executable, *program, "serve", "--port", "0", "--threads", "1", *arguments]
        with self._log_path.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        self.banner = self._read_banner()
        match = _ADDRESS.search(self.banner)
        assert match, f"the server did not start:\n{self.banner}{self.log}"
        self.port = int(match[1])
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=60.0)

    @property
    def log(self) -> str:
        return self._log_path.read_text()

    def chat(self, content: str, **fields: object) -> httpx.Response:
        """A greedy chat with one user message."""
        body = {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 64, **fields}
        return self.client.post("/v1/chat/completions", json=body)

    def metric(self, name: str) -> float:
        """The value of one of our metrics."""
        text = self.client.get("/metrics").text
        return sum(
            float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(f"tokenspeed:{name}{{")
        )

    def is_idle(self) -> bool:
        """Nothing runs, waits or holds a block."""
        return all(self.metric(name) == 0.0 for name in _IDLE)

    def wait_until_idle(self, timeout_s: float = 2.0) -> None:
        """Fails when it takes longer."""
        deadline = time.monotonic() + timeout_s
        while not self.is_idle():
            state = {name: self.metric(name) for name in _IDLE}
            assert time.monotonic() < deadline, f"not idle after {timeout_s} s: {state}"
            time.sleep(0.02)

    def wait_for(self, name: str, value: float, timeout_s: float = 30.0) -> None:
        """Until a metric has this value."""
        deadline = time.monotonic() + timeout_s
        while self.metric(name) != value:
            assert time.monotonic() < deadline, f"{name} is {self.metric(name)} after {timeout_s} s, not {value}"
            time.sleep(0.02)

    @contextlib.contextmanager
    def asking(self, body: dict[str, Any], path: str = "/v1/chat/completions") -> Iterator[socket.socket]:
        """A request on its way, whose client hangs up at the end of the block."""
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n"
        with contextlib.closing(socket.create_connection(("127.0.0.1", self.port), timeout=30.0)) as sock:
            sock.sendall(head.encode() + data)
            yield sock

    def hang_up(self, body: dict[str, object], *, after_s: float, read: bool = False) -> None:
        """Send a chat, wait, and close the socket."""
        with self.asking(body) as sock:
            if read:
                assert sock.recv(65536).startswith(b"HTTP/1.1 200")
            time.sleep(after_s)

    def stop(self, number: signal.Signals = signal.SIGINT) -> int:
        """The exit code after a signal."""
        self.process.send_signal(number)
        return self.process.wait(30.0)

    def close(self) -> None:
        self.client.close()
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(20.0)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._folder.cleanup()

    def _read_banner(self) -> str:
        assert self.process.stdout is not None
        timer = threading.Timer(120.0, self.process.kill)
        timer.start()
        lines = []
        for line in self.process.stdout:
            lines.append(line)
            if line.startswith("Press"):
                break
        timer.cancel()
        return "".join(lines)


StartServer = Callable[..., ServerProcess]


@pytest.fixture
def start_server() -> Iterator[Any]:
    """Starts servers that end with the test."""
    with contextlib.ExitStack() as stack:

        def start(*arguments: str, **options: Any) -> ServerProcess:
            server = ServerProcess(*arguments, **options)
            stack.callback(server.close)
            return server

        yield start


@pytest.fixture(scope="module")
def start_module_server() -> Iterator[Any]:
    """Starts servers that end with the module."""
    with contextlib.ExitStack() as stack:

        def start(*arguments: str) -> ServerProcess:
            server = ServerProcess(*arguments)
            stack.callback(server.close)
            return server

        yield start
