# SPDX-License-Identifier: Apache-2.0
"""`top` and `sessions` against servers that are there, are something else, or are not there."""

from __future__ import annotations

import contextlib
import os
import pty
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import msgspec
import pytest

from tokenspeed import cli
from tokenspeed.core.ipc import EngineStats
from tokenspeed.observability.metrics import Metrics, PoolSize
from tokenspeed.server.session_list import SessionCard, SessionList

CARD = SessionCard(
    session="s-1", requests=3, turns=2, running=1, prompt_tokens=200, cached_tokens=100, generated_tokens=50,
    context_tokens=90, first_seen=0.0, last_seen=1.0, held_until=None, output_tokens_per_s=None, finish_reason="stop",
    prefix=None,
)  # fmt: skip
GOOD = {
    "/metrics": Metrics("some-model", PoolSize(8, 16), lambda: EngineStats(num_running=1)).render(),
    "/sessions": msgspec.json.encode(SessionList(now=2.0, data=[CARD])),
}


@contextlib.contextmanager
def serving(pages: dict[str, bytes], key: str | None = None) -> Iterator[str]:
    """A server that has these pages, and its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_known = key is None or self.path == "/metrics" or self.headers["authorization"] == f"Bearer {key}"
            self.send_response((200 if self.path in pages else 404) if is_known else 401)
            self.end_headers()
            if is_known:
                self.wfile.write(pages.get(self.path, b""))

        def log_message(self, *_: object) -> None:
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_sessions_prints_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(GOOD) as url:
        assert cli.main(["sessions", "--url", url]) == 0
    header, row = capsys.readouterr().out.splitlines()
    assert header.split()[:3] == ["SESSION", "REQ", "TURNS"]
    assert row.split()[:3] == ["s-1", "3", "2"]


def test_top_prints_one_picture_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(GOOD) as url:
        assert cli.main(["top", "--url", url.removeprefix("http://") + "/", "--interval", "0.1"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"TokenSpeed  some-model  {url}  ")
    assert "\x1b" not in text and "s-1" in text and text.count("TokenSpeed") == 1


def test_a_key_is_sent_where_it_is_given(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(GOOD, key="k") as url:
        assert cli.main(["sessions", "--url", url, "--api-key", "k"]) == 0
        for command in (["sessions", "--api-key", "wrong"], ["top", "--interval", "0.1"]):
            capsys.readouterr()
            assert cli.main([*command, "--url", url]) == 1
            error = capsys.readouterr().err
            assert error.count("\n") == 1 and "pass --api-key KEY" in error


@pytest.mark.parametrize("pages", [{}, {"/metrics": b"up 1\n", "/sessions": b"{}"}, {"/metrics": b"<html>"}])
@pytest.mark.parametrize("command", ["sessions", "top"])
def test_another_server_is_said_to_be_one(
    pages: dict[str, bytes], command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(pages) as url:
        assert cli.main([command, "--url", url]) == 1
    assert capsys.readouterr().err == f"error: {url} is not a TokenSpeed server of this version; name one with --url\n"


@pytest.mark.parametrize("command", ["sessions", "top"])
def test_nobody_there_is_one_line(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        assert cli.main([command, "--url", url]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert error.startswith(f"error: no server answers at {url} (") and "`tokenspeed serve`" in error


def test_a_server_that_hangs_up_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=lambda: server.accept()[0].close())
        thread.start()
        assert cli.main(["sessions", "--url", f"http://127.0.0.1:{server.getsockname()[1]}"]) == 1
        thread.join()
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("url", ["ftp://h", "http://", "http://a b/", "http://h:port"])
def test_an_address_that_cannot_be_is_one_line(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["sessions", "--url", url]) == 1
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("interval", ["0", "-1", "nan"])
def test_an_interval_is_at_least_a_tenth_of_a_second(interval: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["top", "--interval", interval]) == 1
    assert "--interval" in capsys.readouterr().err


def _on_a_terminal(url: str) -> tuple[subprocess.Popen[bytes], int]:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "tokenspeed.cli", "top", "--url", url, "--interval", "0.1"]
    child = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=subprocess.PIPE)
    os.close(theirs)
    return child, ours


def _read_pictures(terminal: int, count: int) -> bytes:
    seen = b""
    while seen.count(b"TokenSpeed") < count:
        seen += os.read(terminal, 1 << 16)
    return seen


@pytest.fixture
def interrupts() -> Iterator[None]:
    """Children can be interrupted, also where the whole run ignores it, as jobs in the background do."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interrupts")
def test_on_a_terminal_it_draws_again_and_ctrl_c_ends_it() -> None:
    with serving(GOOD) as url:
        child, terminal = _on_a_terminal(url)
        seen = _read_pictures(terminal, 3)
        child.send_signal(signal.SIGINT)
        with contextlib.suppress(OSError):  # the end of a terminal is an error
            while part := os.read(terminal, 1 << 16):
                seen += part
        _, error = child.communicate(timeout=20.0)
    os.close(terminal)
    assert (child.returncode, error) == (0, b"")
    assert seen.startswith(b"\x1b[?25l") and seen.rstrip().endswith(b"\x1b[?25h"), "the cursor comes back"
    assert seen.count(b"\x1b[H") >= 3


def test_a_server_that_goes_ends_the_picture_with_one_line() -> None:
    with serving(GOOD) as url:
        child, terminal = _on_a_terminal(url)
        _read_pictures(terminal, 1)
    seen = b""
    with contextlib.suppress(OSError):
        while part := os.read(terminal, 1 << 16):
            seen += part
    _, error = child.communicate(timeout=20.0)
    os.close(terminal)
    assert child.returncode == 1
    assert error.startswith(b"error: no server answers at ") and error.count(b"\n") == 1
    assert seen.rstrip().endswith(b"\x1b[?25h")
