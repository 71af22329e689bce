# SPDX-License-Identifier: Apache-2.0
"""Start an engine, own it, end it: as a process of its own, or on a thread of ours.

Knows how an engine is started and ended, not what is said to it: callers speak core.ipc over `sock`. The worker is
named, never imported from here, so that importing this module loads no execution.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, Protocol

from tokenspeed.core.config import EngineConfig, calm_own_threads, child_environment
from tokenspeed.core.errors import StartError
from tokenspeed.observability.stacks import STACKS_SIGNAL

WORKER_MODULE = "tokenspeed.engine.worker"
CONNECT_TIMEOUT_S = 120.0
STOP_GRACE_S = 5.0


class Engine(Protocol):
    """An engine that we own. `sock` is our end of the stream."""

    @property
    def sock(self) -> socket.socket: ...

    def is_alive(self) -> bool:
        """False once it has ended."""
        ...

    def describe_end(self) -> str:
        """How it ended, for a user's eyes."""
        ...

    def wait(self, timeout_s: float) -> bool:
        """Wait for its end; False when it is still there after timeout_s."""
        ...

    def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        """End it: close the stream, wait grace_s, then by force. Idempotent."""
        ...

    def tell_stacks(self) -> None:
        """Let a process of its own write the stacks of its threads to stderr, also where it is stuck."""
        ...


class EngineProcess:
    """`python -m tokenspeed.engine.worker` as a child, in its own process group so that Ctrl-C is ours to handle."""

    def __init__(self, process: subprocess.Popen[bytes], sock: socket.socket) -> None:
        self._process = process
        self.sock = sock

    @classmethod
    def spawn(cls, config: EngineConfig) -> EngineProcess:
        """Start the child and wait until it has connected. Raises StartError when it dies first."""
        with contextlib.closing(EngineAhead(config)) as ahead:
            return ahead.connect()

    @property
    def pid(self) -> int:
        """Process id of the child."""
        return self._process.pid

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def describe_end(self) -> str:
        return describe_exit(self._process.poll())

    def wait(self, timeout_s: float) -> bool:
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        _hang_up(self.sock)
        if self.wait(grace_s):
            return
        self._process.terminate()
        if not self.wait(min(grace_s, 2.0)):
            self._process.kill()
            self._process.wait()

    def tell_stacks(self) -> None:
        if self.is_alive():
            self._process.send_signal(STACKS_SIGNAL)  # answered since before it connected


class EngineAhead:
    """A child that begins before all is known that it will be told, and loads meanwhile what every engine needs. Close
    it in any case: one that was not connected to is ended."""

    def __init__(self, config: EngineConfig) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="tokenspeed-"))  # mode 0700: nobody else may connect
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._is_connected = False
        try:
            path = self._folder / "engine.sock"
            self._listener.bind(str(path))
            self._listener.listen(1)
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", WORKER_MODULE, "--socket", str(path)],
                env=child_environment(config.device.num_threads),
                stdin=subprocess.DEVNULL,
                process_group=0,
            )
        except BaseException:
            self._forget()
            raise

    def connect(self) -> EngineProcess:
        """The engine, once. Raises StartError when the child dies first."""
        assert not self._is_connected, "connected to already"
        engine = EngineProcess(self._process, _accept(self._listener, self._process))
        self._is_connected = True
        return engine

    def close(self) -> None:
        self._forget()
        if not self._is_connected:
            self._process.kill()
            self._process.wait()

    def _forget(self) -> None:
        self._listener.close()
        shutil.rmtree(self._folder, ignore_errors=True)


class InProcessEngine:
    """The same worker on a daemon thread over a socket pair. `serve` stands in for the worker in tests."""

    def __init__(self, serve: Callable[[socket.socket], int] | None = None) -> None:
        self.sock, theirs = socket.socketpair()
        self._exit_code: int | None = None
        self._thread = threading.Thread(target=self._run, args=(serve, theirs), name="tokenspeed-engine", daemon=True)
        self._thread.start()

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def describe_end(self) -> str:
        return describe_exit(self._exit_code)

    def wait(self, timeout_s: float) -> bool:
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        _hang_up(self.sock)
        self.wait(grace_s)  # a thread cannot be forced; it ends with its current step

    def tell_stacks(self) -> None:
        """Its thread is one of ours."""

    def _run(self, serve: Callable[[socket.socket], int] | None, sock: socket.socket) -> None:
        if serve is None:
            calm_own_threads()
            serve = importlib.import_module(WORKER_MODULE).serve
        try:
            self._exit_code = serve(sock)
        finally:
            sock.close()


def describe_exit(code: int | None) -> str:
    """An exit code in words: signals by name."""
    if code is None:
        return "without an exit code"
    if code >= 0:
        return f"with exit code {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    hint = " (killed; the machine may be out of memory)" if -code == signal.SIGKILL else ""
    return f"by {name}{hint}"


def leave(code: int) -> NoReturn:
    """End this process, whatever its other threads wait for."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _accept(listener: socket.socket, process: subprocess.Popen[bytes]) -> socket.socket:
    """The child's connection. Ends the child when it does not come in time."""
    listener.settimeout(0.1)
    deadline = time.monotonic() + CONNECT_TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            sock, _ = listener.accept()
        except TimeoutError:
            if process.poll() is not None:
                end = describe_exit(process.returncode)
                raise StartError(f"the engine process ended {end} before it began") from None
            continue
        sock.setblocking(True)
        return sock
    process.kill()
    process.wait()
    raise StartError(f"the engine process did not begin within {CONNECT_TIMEOUT_S:.0f} s")


def _hang_up(sock: socket.socket) -> None:
    """Let the other side see the end of the stream, also where a copy of the descriptor is open elsewhere."""
    with contextlib.suppress(OSError):  # it may have gone already
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()
