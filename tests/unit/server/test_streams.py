# SPDX-License-Identifier: Apache-2.0
"""What happens when a client leaves, an engine dies, a queue is full, or nothing comes for a while."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from typing import Any

import httpx
import pytest

from fakes import FakeWorker, engine_info
from tokenspeed.server.served import Patience

LONG = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 400, "ignore_eos": True, "temperature": 0}


def wait_until(holds: Any, timeout_s: float = 5.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, "it did not come to that in time"
        time.sleep(0.005)


class Gate:
    """The pace of a fake engine: `step_s` a step, and it stands still while closed."""

    def __init__(self, step_s: float = 0.0) -> None:
        self.open = threading.Event()
        self.open.set()
        self.step_s = step_s

    def __call__(self) -> None:
        time.sleep(self.step_s)
        self.open.wait(10.0)


def paced(step_s: float = 0.005) -> tuple[FakeWorker, Gate]:
    gate = Gate(step_s)
    worker = FakeWorker(info=engine_info())
    worker.runner.pace = gate
    return worker, gate


def post_and_hang_up(url: str, path: str, body: dict[str, object], *, read: bool, wait_s: float = 0.05) -> None:
    """Send a request, read a little of the answer or none, and close the socket."""
    host, port = url.removeprefix("http://").split(":")
    data = json.dumps(body).encode()
    with contextlib.closing(socket.create_connection((host, int(port)), timeout=10.0)) as sock:
        head = (
            f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
        )
        sock.sendall(head.encode() + data)
        if read:
            assert sock.recv(4096).startswith(b"HTTP/1.1 200")
        time.sleep(wait_s)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_client_that_leaves_is_cancelled(start: Any, stream: bool, path: str) -> None:
    worker, _ = paced()
    server = start(worker=worker)
    body = {**LONG, "stream": stream} if "chat" in path else {"prompt": "x", "max_tokens": 400, "stream": stream}
    post_and_hang_up(server.url, path, body, read=stream)
    wait_until(lambda: server.cancels())
    wait_until(lambda: server.llm.num_live == 0)
    assert server.cancels() == [submit.request.request_id for submit in server.submits()]
    assert server.chat(max_tokens=2).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_before_the_first_token_is_cancelled(start: Any, stream: bool) -> None:
    worker, gate = paced()
    gate.open.clear()
    server = start(worker=worker)
    post_and_hang_up(server.url, "/v1/chat/completions", {**LONG, "stream": stream}, read=False)
    wait_until(lambda: server.llm.num_live == 0)
    gate.open.set()
    wait_until(lambda: len(server.cancels()) == 1)


def test_all_prompts_of_a_request_are_cancelled(start: Any) -> None:
    worker, _ = paced()
    server = start(worker=worker)
    body = {"prompt": ["a", "b", "c"], "n": 2, "max_tokens": 400, "stream": True}
    post_and_hang_up(server.url, "/v1/completions", body, read=True)
    wait_until(lambda: len(server.cancels()) == 6)
    assert sorted(server.cancels()) == sorted(submit.request.request_id for submit in server.submits())


def test_a_silent_stream_sends_comments(start: Any) -> None:
    worker, gate = paced()
    gate.open.clear()
    server = start(worker=worker, patience=Patience(ping_s=0.05))
    with server.client.stream("POST", "/v1/chat/completions", json={**LONG, "max_tokens": 3, "stream": True}) as got:
        lines = got.iter_lines()
        assert next(line for line in lines if line) == ": ping"
        gate.open.set()
        rest = [line for line in lines if line and line != ": ping"]
    assert rest[-1] == "data: [DONE]"
    assert json.loads(rest[0].removeprefix("data: "))["choices"][0]["delta"]["role"] == "assistant"


def test_a_lively_stream_sends_no_comments(start: Any) -> None:
    worker, _ = paced(0.01)
    server = start(worker=worker, patience=Patience(ping_s=0.2))
    response = server.client.post("/v1/chat/completions", json={**LONG, "max_tokens": 60, "stream": True})
    assert ": ping" not in response.text


def test_an_engine_that_dies_breaks_the_stream_visibly(start: Any) -> None:
    worker, _ = paced()
    server = start(worker=worker)
    body = {**LONG, "stream": True, "stream_options": {"include_usage": True}}
    with server.client.stream("POST", "/v1/chat/completions", json=body) as got:
        lines = got.iter_lines()
        next(line for line in lines if "content" in line)
        worker.crash.set()
        rest = [line for line in lines if line]
    assert "data: [DONE]" not in rest
    last = json.loads(rest[-1].removeprefix("data: "))
    assert last["error"]["code"] == "engine_dead"
    assert all("usage" not in line or '"usage":null' in line for line in rest)
    refused = server.chat()
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_dead")
    health = server.client.get("/health")
    assert health.status_code == 503
    assert "has ended" in health.text
    assert server.client.get("/ready").status_code == 503


def test_a_fault_in_mid_stream_is_an_error_frame(start: Any) -> None:
    worker, _ = paced(0.02)
    server = start(worker=worker)
    with server.client.stream(
        "POST", "/v1/completions", json={"prompt": "a", "max_tokens": 400, "stream": True}
    ) as got:
        lines = got.iter_lines()
        next(line for line in lines if line)
        worker.runner.faulty = frozenset(submit.request.request_id for submit in server.submits())
        rest = [line for line in lines if line]
    assert "data: [DONE]" not in rest
    assert json.loads(rest[-1].removeprefix("data: "))["error"]["code"] == "generation_failed"
    worker.runner.faulty = frozenset()
    assert server.chat().status_code == 200, "only that request ended"


def test_a_full_queue_answers_429(start: Any) -> None:
    worker, gate = paced()
    gate.open.clear()
    server = start(worker=worker)
    waiting = [threading.Thread(target=server.chat, kwargs={"n": count}, daemon=True) for count in (60, 8)]
    for thread in waiting:
        thread.start()
    wait_until(lambda: server.llm.num_live == 68)
    for stream in (False, True):
        response = server.chat(stream=stream)
        assert response.status_code == 429
        assert int(response.headers["retry-after"]) >= 1
        assert response.json()["error"]["code"] == "overloaded"
    assert server.client.get("/health").status_code == 200, "busy is not sick"
    gate.open.set()
    for thread in waiting:
        thread.join(20.0)
    assert server.chat().status_code == 200


def test_an_engine_without_progress_is_unhealthy(start: Any) -> None:
    worker, gate = paced(0.0)
    server = start(worker=worker, patience=Patience(stall_s=0.3))
    gate.step_s = 0.01
    caller = threading.Thread(target=lambda: server.chat(max_tokens=300), daemon=True)
    caller.start()
    wait_until(lambda: server.llm.stats.num_running == 1)
    assert server.client.get("/health").status_code == 200
    gate.open.clear()
    wait_until(lambda: server.client.get("/health").status_code == 503)
    gate.open.set()
    wait_until(lambda: server.client.get("/health").status_code == 200)
    caller.join(20.0)


def test_two_streams_do_not_disturb_each_other(start: Any) -> None:
    worker, _ = paced(0.002)
    server = start(worker=worker)
    texts: list[str] = []

    def read() -> None:
        response = httpx.post(f"{server.url}/v1/chat/completions", json={**LONG, "max_tokens": 30, "stream": True})
        data = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: {")]
        texts.append("".join(json.loads(item)["choices"][0]["delta"].get("content", "") for item in data))

    threads = [threading.Thread(target=read) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20.0)
    assert texts == ["abcdefghijklmnopqrstuvwxyzabcd"] * 8
