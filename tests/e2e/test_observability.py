# SPDX-License-Identifier: Apache-2.0
"""What a real server tells of itself: the report of a stuck engine, spans at a collector, the live view."""

from __future__ import annotations

import gzip
import re
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from scripted import write_scripted_model
from tokenspeed import cli

SHORT_PATIENCE = """
import sys
from tokenspeed import cli
from tokenspeed.server import app, serve, served
patience = served.Patience(stall_s=1.5)
serve.Patience = app.Patience = lambda: patience
sys.exit(cli.main())
"""
REPORT = "the engine has work and has taken no step for"


def wait_for(holds: Callable[[], bool], what: str, timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def test_a_stuck_engine_is_reported_with_the_stacks_of_both_processes(start_server: Any, tmp_path: Path) -> None:
    """One step takes four seconds, and more than one and a half is a stall here."""
    model = write_scripted_model(tmp_path / "model", [("", "x")], step_s=4.0)
    server = start_server(str(model), "--load-format", "scripted", program=("-c", SHORT_PATIENCE))
    assert REPORT not in server.log, "loading is no stall"
    answers: list[int] = []
    caller = threading.Thread(target=lambda: answers.append(server.chat("hi", max_tokens=1).status_code))
    caller.start()
    wait_for(lambda: server.client.get("/health").status_code == 503, "it stays healthy")
    wait_for(lambda: "tokenspeed/engine/worker.py" in server.log, "no stacks of the engine")
    caller.join(30.0)
    assert answers == [200]
    wait_for(lambda: "the engine goes on" in server.log, "its end is not told")
    assert server.client.get("/health").status_code == 200
    report, engine = server.log.split(REPORT)[1].split("most recent call first", 1)
    assert "thread MainThread:" in report and "tasks:" in report and "server/stalls.py" in report
    assert "engine/step.py" in engine and "in turn" in engine
    assert server.log.count(REPORT) == 1
    assert server.stop() == 0


@pytest.fixture
def collector() -> Iterator[tuple[str, list[tuple[str, bytes]]]]:
    """What takes spans over OTLP/HTTP: its address, and (path, body) of what came."""
    came: list[tuple[str, bytes]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            came.append((self.path, gzip.decompress(body) if body.startswith(b"\x1f\x8b") else body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}", came
        server.shutdown()
        thread.join()


def test_spans_at_a_collector_and_the_live_view_of_a_real_server(
    start_server: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    collector: tuple[str, list[tuple[str, bytes]]],
) -> None:
    collector_url, came = collector
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector_url)
    model = write_scripted_model(tmp_path / "model", [("", "hello")])
    server = start_server(str(model), "--load-format", "scripted", "--served-name", "m", "--api-key", "k")
    trace = "0af7651916cd43dd8448eb211c80319c"
    server.client.headers = {"authorization": "Bearer k", "traceparent": f"00-{trace}-b7ad6b7169203331-01"}
    for system in ("be brief", "be long"):
        messages = [{"role": "system", "content": system}, {"role": "user", "content": "hi"}]
        assert server.chat("", messages=messages, session_id="s-1").status_code == 200

    url = f"http://127.0.0.1:{server.port}"
    assert cli.main(["top", "--url", url, "--api-key", "k", "--interval", "0.1"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"TokenSpeed  m  {url}")
    assert "ended: 2 stop, 0 length, 0 abort, 1 departed prompts" in text
    assert re.search(r"^s-1 +2 +2 +0 ", text, re.MULTILINE)
    assert "  prefix-diverged: message 0, system message changed" in text

    assert server.stop() == 0, "what is queued is sent before the end"
    assert {path for path, _ in came} == {"/v1/traces"}
    spans = b"".join(body for _, body in came)
    for name in ("chat m", "tokenise", "queue", "prefill", "decode", "parse", "gen_ai.usage.input_tokens"):
        assert name.encode() in spans, name
    assert spans.count(bytes.fromhex(trace)) == 2 * 6
