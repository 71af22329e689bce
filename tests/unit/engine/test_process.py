# SPDX-License-Identifier: Apache-2.0
"""Engines are started, owned and ended; importing their owner loads no execution."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tokenspeed.core.config import EngineConfig, ModelConfig
from tokenspeed.core.ipc import FrameBuffer, Shutdown, Start, StartFailed, decode_from_engine, send
from tokenspeed.engine.process import EngineAhead, EngineProcess, InProcessEngine, describe_exit


def read_until_end(sock: socket.socket) -> list[object]:
    frames, messages = FrameBuffer(), []
    sock.settimeout(60.0)
    while data := sock.recv(1 << 16):
        messages.extend(decode_from_engine(body) for body in frames.feed(data))
    return messages


def test_importing_the_face_loads_no_torch() -> None:
    code = (
        "import sys, tokenspeed.llm.async_llm, tokenspeed.llm.llm, tokenspeed.engine.process;"
        "heavy = {'torch', 'tokenspeed.execution', 'tokenspeed.engine.worker'};"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_model_that_is_not_there_is_told_in_one_line() -> None:
    config = EngineConfig(model=ModelConfig(model="/no/such/model.gguf"))
    engine = EngineProcess.spawn(config)
    send(engine.sock, Start(config))
    failure = read_until_end(engine.sock)[-1]
    assert isinstance(failure, StartFailed)
    assert failure.kind == "ModelNotFoundError" and "/no/such/model.gguf" in failure.message
    assert "\n" not in failure.message
    assert engine.wait(10.0) and engine.describe_end() == "with exit code 1"
    engine.stop()


def test_the_child_survives_ctrl_c_and_ends_with_its_parents_stream() -> None:
    engine = EngineProcess.spawn(EngineConfig())
    assert os.getpgid(engine.pid) != os.getpgid(0)  # a terminal's Ctrl-C reaches us alone
    os.kill(engine.pid, signal.SIGINT)
    time.sleep(0.1)
    assert engine.is_alive()
    engine.sock.close()
    assert engine.wait(10.0) and engine.describe_end() == "with exit code 0"


def test_the_child_ends_cleanly_on_sigterm_and_on_shutdown() -> None:
    engine = EngineProcess.spawn(EngineConfig())
    os.kill(engine.pid, signal.SIGTERM)
    assert engine.wait(10.0) and engine.describe_end() == "with exit code 0"
    engine.stop()
    engine = EngineProcess.spawn(EngineConfig())
    send(engine.sock, Shutdown())
    assert engine.wait(10.0) and engine.describe_end() == "with exit code 0"
    engine.stop()


def test_a_child_that_does_not_listen_is_killed() -> None:
    engine = EngineProcess.spawn(EngineConfig())
    os.kill(engine.pid, signal.SIGSTOP)
    engine.stop(grace_s=0.1)
    assert not engine.is_alive() and engine.describe_end().startswith("by SIGKILL")
    engine.stop()


def test_the_socket_is_private_and_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only we may enter the folder while the child connects; afterwards nothing is left of it."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    modes = []
    popen = subprocess.Popen

    def note_modes(*arguments: object, **options: object) -> object:
        modes.extend(stat.S_IMODE(folder.stat().st_mode) for folder in tmp_path.iterdir())
        return popen(*arguments, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(subprocess, "Popen", note_modes)
    engine = EngineProcess.spawn(EngineConfig())
    engine.stop()
    assert modes == [0o700] and not list(tmp_path.iterdir())


def test_a_child_that_began_ahead_is_connected_to_or_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    children: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen
    monkeypatch.setattr(
        subprocess, "Popen", lambda *args, **kwargs: children.append(popen(*args, **kwargs)) or children[-1]
    )
    ahead = EngineAhead(EngineConfig())
    ahead.close()
    assert children[0].returncode == -signal.SIGKILL and not list(tmp_path.iterdir())
    ahead = EngineAhead(EngineConfig())
    engine = ahead.connect()
    ahead.close()
    assert engine.is_alive() and not list(tmp_path.iterdir())
    engine.stop()
    assert engine.describe_end() == "with exit code 0"


def test_a_thread_engine_serves_the_same_stream() -> None:
    served = []

    def serve(sock: socket.socket) -> int:
        served.append(sock.recv(5))
        sock.sendall(b"there")
        return 0

    engine = InProcessEngine(serve)
    engine.sock.sendall(b"hello")
    assert engine.sock.recv(5) == b"there" and served == [b"hello"]
    assert engine.wait(5.0) and engine.describe_end() == "with exit code 0"
    engine.stop()


def test_exits_are_described() -> None:
    assert describe_exit(3) == "with exit code 3"
    assert describe_exit(-11) == "by SIGSEGV"
    assert "out of memory" in describe_exit(-9)
    assert describe_exit(None) == "without an exit code"


def test_an_engine_tells_its_stacks_and_goes_on(capfd: pytest.CaptureFixture[str]) -> None:
    engine = EngineProcess.spawn(EngineConfig())
    told, deadline = "", time.monotonic() + 20.0
    while "_await_start" not in told:  # the first question may meet it a little earlier
        assert time.monotonic() < deadline, told
        engine.tell_stacks()
        time.sleep(0.02)
        told += capfd.readouterr().err
    assert "worker.py" in told
    assert engine.is_alive()
    engine.sock.close()
    assert engine.wait(10.0) and engine.describe_end() == "with exit code 0"
    engine.tell_stacks()  # of one that has gone: nothing
