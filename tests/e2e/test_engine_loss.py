# SPDX-License-Identifier: Apache-2.0
"""An engine that is killed while it serves: everyone is told in the words of their API, and then it serves again."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from scripted import write_scripted_model

ONE_RESTART = """import sys, tokenspeed.cli, tokenspeed.server.supervisor as s
s.RestartPolicy.__init__.__defaults__ = (60.0, 1, 1.0)
sys.exit(tokenspeed.cli.main())"""
"""The server's program, which starts a dead engine once and not four times in a row."""
REPLY = "All work and no play makes a dull day. " * 50
PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses")


@pytest.fixture(scope="module")
def server(start_module_server: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    replies = [("brief", "A short answer."), ("", REPLY)]
    folder = write_scripted_model(tmp_path_factory.mktemp("loss") / "model", replies, step_s=0.02)
    return start_module_server(str(folder), "--load-format", "scripted", "--max-num-seqs", "8")


def children(pid: int) -> list[int]:
    """Child processes of `pid`."""
    listings = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for listing in listings for child in listing.read_text().split()]


def wait_until(holds: Callable[[], bool], timeout_s: float = 240.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, "it did not come to that in time"
        time.sleep(0.02)


def body_of(path: str, text: str, *, stream: bool = False) -> dict[str, object]:
    """A request that takes long, unless `text` asks for the brief answer."""
    body: dict[str, object] = {"max_tokens": 1000, "temperature": 0, "stream": stream}
    if path == "/v1/completions":
        return {**body, "prompt": text}
    if path == "/v1/responses":
        return {**body, "input": text}
    return {**body, "messages": [{"role": "user", "content": text}]}


def kill_engine(server: Any) -> None:
    (engine,) = children(server.process.pid)
    os.kill(engine, signal.SIGKILL)


def serves_again(server: Any) -> bool:
    return bool(server.client.get("/health").status_code == 200 and server.chat("brief").status_code == 200)


def assert_told(path: str, error: dict[str, Any]) -> None:
    """`error` is the whole JSON of an error in the shape of this API."""
    kind = "api_error" if path == "/v1/messages" else "server_error"
    if path == "/v1/messages":
        assert error["type"] == "error"
    else:
        assert error["error"]["code"] == "engine_dead"
    assert error["error"]["type"] == kind
    assert "SIGKILL" in error["error"]["message"] and "send the request again" in error["error"]["message"]


class Stream:
    """One streamed answer, read on a thread."""

    def __init__(self, server: Any, path: str) -> None:
        self.path, self.text = path, ""
        self.has_begun = threading.Event()
        self._server = server

    def read(self) -> None:
        with self._server.client.stream("POST", self.path, json=body_of(self.path, "long", stream=True)) as answer:
            assert answer.status_code == 200
            for piece in answer.iter_text():
                self.text += piece
                self.has_begun.set()

    def events(self) -> list[dict[str, Any]]:
        data = [line.removeprefix("data: ") for line in self.text.splitlines() if line.startswith("data: ")]
        assert data[-1] != "[DONE]", "a broken stream looks whole"
        return [json.loads(item) for item in data]

    def assert_told(self) -> None:
        """It ends in an error frame of this API, and in nothing that looks like an end."""
        events = self.events()
        if self.path != "/v1/responses":
            assert_told(self.path, events[-1])
            names = [event.get("type") for event in events]
            assert "message_stop" not in names and "message_delta" not in names
            return
        told, failed = events[-2:]
        assert told["type"] == "error" and told["code"] == "engine_dead" and "SIGKILL" in told["message"]
        assert failed["type"] == "response.failed" and failed["response"]["status"] == "failed"
        assert "SIGKILL" in failed["response"]["error"]["message"]
        assert [event["sequence_number"] for event in events] == list(range(len(events)))


def test_a_killed_engine_is_told_to_everyone_and_started_again(server: Any) -> None:
    streams = [Stream(server, path) for path in PATHS]
    with ThreadPoolExecutor(16) as pool:
        reading = [pool.submit(stream.read) for stream in streams]
        for stream in streams:
            assert stream.has_begun.wait(30.0)
        whole: list[tuple[str, Future[httpx.Response]]] = [
            (path, pool.submit(server.client.post, path, json=body_of(path, f"long {copy}")))
            for path in PATHS
            for copy in range(2)
        ]
        wait_until(lambda: server.metric("num_requests_running") + server.metric("num_requests_waiting") == 12.0)
        assert server.metric("num_requests_waiting") > 0.0, "some must wait in the queue"
        kill_engine(server)
        for future in reading:
            future.result(30.0)
        answers = [(path, future.result(30.0)) for path, future in whole]
    for stream in streams:
        stream.assert_told()
    for path, answer in answers:
        assert answer.status_code == 503
        assert_told(path, answer.json())
        assert 1 <= int(answer.headers["retry-after"]) <= 60
    meanwhile = server.client.get("/health")
    assert meanwhile.status_code == 503 and "started again" in meanwhile.text
    assert server.client.get("/ready").status_code == 503
    refused = server.chat("brief")
    assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1
    wait_until(lambda: serves_again(server))
    for path in PATHS:
        again = server.client.post(path, json=body_of(path, "brief"))
        assert again.status_code == 200 and "A short answer." in again.text
    assert server.metric("engine_restarts_total") == 1.0
    server.wait_until_idle()
    assert len(children(server.process.pid)) == 1
    assert "Traceback" not in server.log
    assert "the engine ended by SIGKILL" in server.log and "the engine serves again" in server.log


def test_held_pages_and_stored_answers_outlive_no_harm(server: Any) -> None:
    """A session goes on after the loss: its pages are gone, its stored answer is not."""
    first = server.client.post("/v1/responses", json=body_of("/v1/responses", "brief, first " * 10)).json()
    before = server.metric("engine_restarts_total")
    kill_engine(server)
    wait_until(lambda: server.metric("engine_restarts_total") > before and serves_again(server))
    body = {**body_of("/v1/responses", "brief, again"), "previous_response_id": first["id"]}
    second = server.client.post("/v1/responses", json=body)
    assert second.status_code == 200
    assert second.json()["usage"]["input_tokens_details"]["cached_tokens"] < 64
    assert second.json()["usage"]["input_tokens"] > first["usage"]["input_tokens"]


def test_a_signal_while_the_engine_starts_again_ends_in_order(start_server: Any, tmp_path: Path) -> None:
    folder = write_scripted_model(tmp_path / "model", [("", "ok")])
    server = start_server(str(folder), "--load-format", "scripted")
    (engine,) = children(server.process.pid)
    os.kill(engine, signal.SIGKILL)
    wait_until(lambda: any(child != engine for child in children(server.process.pid)))
    assert server.stop(signal.SIGTERM) == 0
    assert "Traceback" not in server.log


def test_under_a_launcher_the_server_ends_with_its_engine(
    start_server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other ranks are the launcher's: it starts all of them again, or none."""
    launched = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    folder = write_scripted_model(tmp_path / "model", [("", REPLY)], step_s=0.02)
    server = start_server(str(folder), "--load-format", "scripted")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(server.chat, "x", max_tokens=1000)
        wait_until(lambda: server.metric("num_requests_running") == 1.0)
        kill_engine(server)
        assert server.process.wait(30.0) == 1
        assert waiting.result(10.0).status_code == 503
    last = server.log.splitlines()[-1]
    assert last.startswith("error: the engine has ended, and the server with it: the engine ended by SIGKILL")
    assert "Traceback" not in server.log


@pytest.mark.slow
def test_an_engine_that_dies_again_and_again_ends_the_server(start_server: Any, tmp_path: Path) -> None:
    folder = write_scripted_model(tmp_path / "model", [("", "ok")])
    server = start_server(str(folder), "--load-format", "scripted")
    for num_restarts in range(5):
        wait_until(lambda seen=num_restarts: server.metric("engine_restarts_total") == seen)  # type: ignore[misc]
        kill_engine(server)
    assert server.process.wait(30.0) == 1
    last = server.log.splitlines()[-1]
    assert last.startswith(
        "error: the engine has ended 5 times in a row, the last time so: the engine ended by SIGKILL"
    )
    assert "Traceback" not in server.log
    assert not children(server.process.pid) if Path(f"/proc/{server.process.pid}/task").exists() else True


def test_an_engine_that_cannot_start_again_ends_the_server(start_server: Any, tmp_path: Path) -> None:
    folder = write_scripted_model(tmp_path / "model", [("", "ok")])
    server = start_server(str(folder), "--load-format", "scripted", "--debug", program=("-c", ONE_RESTART))
    (folder / "script.json").unlink()
    kill_engine(server)
    assert server.process.wait(120.0) == 1
    last = server.log.splitlines()[-1]
    assert last.startswith("error: the engine has ended 2 times in a row, the last time so: the engine cannot start: ")
