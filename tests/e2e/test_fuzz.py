# SPDX-License-Identifier: Apache-2.0
"""Thousands of requests that no client means: none is the server's fault, each is answered in the shape of its dialect,
and nothing of them stays behind."""

from __future__ import annotations

import http.client
import json
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from fuzz import Sent, made
from scripted import write_scripted_model

SEED = 2026
NUM_CLIENTS = 4
ENDS = ("data: [DONE]", '"type":"message_stop"', '"type":"response.completed"', '"type":"response.incomplete"')


@pytest.fixture
def server(start_server: Any, tmp_path: Path) -> Any:
    folder = write_scripted_model(tmp_path / "model", [("", "Well said.")], context_length=2048)
    return start_server(
        str(folder), "--load-format", "scripted", "--served-name", "scripted", "--tool-call-parser", "hermes"
    )


class Client:
    """One connection, opened again when the server closes it."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120.0)

    def send(self, sent: Sent) -> tuple[int, str, str]:
        """(status, content type, text)."""
        try:
            return self._send(sent)
        except (http.client.RemoteDisconnected, ConnectionError):  # it had been idle for too long
            self._connection.close()
            return self._send(sent)

    def _send(self, sent: Sent) -> tuple[int, str, str]:
        try:
            self._connection.request(sent.method, sent.path, sent.content, sent.headers)
            response = self._connection.getresponse()
            text = response.read().decode()
        except http.client.IncompleteRead as error:
            raise AssertionError(f"half an answer: {error!r}") from error
        return response.status, response.headers.get("content-type", ""), text

    def close(self) -> None:
        self._connection.close()


def check(sent: Sent, status: int, kind: str, text: str) -> None:
    """Fails where an answer is none."""
    assert status < 500, text
    if status == 200 and kind.startswith("text/event-stream"):
        events = [line for line in text.splitlines() if line.startswith("data: ")]
        assert events and any(end in events[-1] for end in ENDS), text[-300:]
        return
    assert kind == "application/json"
    answer = json.loads(text)
    if status == 200:
        return
    assert status in (400, 404, 405, 413, 429, 529)
    error = answer["error"]
    if sent.path.startswith("/v1/messages"):
        assert set(answer) >= {"type", "error"}
        assert answer["type"] == "error"
        assert set(error) >= {"type", "message"}
    else:
        assert set(error) == {"message", "type", "param", "code"}
    assert error["message"] and error["message"].isprintable(), repr(error["message"])


def ask(client: Client, number: int) -> int:
    """The status of the answer to the request of that number, which is shown where the answer is none."""
    sent = made(SEED, number)
    try:
        answer = client.send(sent)
        check(sent, *answer)
    except (AssertionError, OSError, ValueError, KeyError, TypeError, http.client.HTTPException) as error:
        shown = f"{sent.method} {sent.path} {sent.headers} {sent.content[:600]!r}"
        pytest.fail(f"request {number} of seed {SEED} ({', '.join(sent.what)}): {error}\n{shown}")
    return answer[0]


def fuzz(server: Any, num_requests: int) -> Counter[int]:
    """How many requests got which status."""

    def run(first: int) -> Counter[int]:
        statuses = Counter[int]()
        with closing(Client(server.port)) as client:
            for number in range(first, num_requests, NUM_CLIENTS):
                statuses[ask(client, number)] += 1
        return statuses

    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        return sum(pool.map(run, range(NUM_CLIENTS)), Counter[int]())


def check_left_behind(server: Any) -> None:
    """Nothing runs, waits or holds memory; nothing was logged as a fault; requests are answered."""
    server.wait_until_idle(10.0)
    assert "Traceback" not in server.log
    assert server.chat("are you there").json()["choices"][0]["message"]["content"] == "Well said."


def test_a_thousand_requests_that_no_client_means(server: Any) -> None:
    statuses = fuzz(server, 1_000)
    assert statuses[200] > 100, statuses
    assert statuses[400] > 100, statuses
    check_left_behind(server)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ten_thousand_requests_that_no_client_means(server: Any) -> None:
    print(sorted(fuzz(server, 10_000).items()))
    check_left_behind(server)
