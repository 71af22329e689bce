# SPDX-License-Identifier: Apache-2.0
"""More requests than the queue holds: what was taken in is finished, the rest is refused at once, nothing is left."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import httpx

from scripted import write_scripted_model

REPLY = "All work and no play makes a dull day."
NUM_RUNNING, NUM_WAITING, NUM_CLIENTS = 4, 8, 200
PATHS = ("/v1/chat/completions", "/v1/messages", "/v1/completions", "/v1/responses")


def engine_of(server: Any) -> int:
    (child,) = [
        int(child)
        for listing in Path(f"/proc/{server.process.pid}/task").glob("*/children")
        for child in listing.read_text().split()
    ]
    return child


def num_open_files(server: Any) -> int:
    return len(list(Path(f"/proc/{server.process.pid}/fd").iterdir()))


def body_of(path: str, client: int) -> dict[str, object]:
    text = f"client {client}"
    prompt = {"/v1/completions": {"prompt": text}, "/v1/responses": {"input": text}}
    messages = {"messages": [{"role": "user", "content": text}]}
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    return {limit: 100, "temperature": 0, "stream": client % 8 >= 4, **prompt.get(path, messages)}


def text_of(path: str, answer: httpx.Response) -> str:
    """What the model said, streamed or not."""
    if "text/event-stream" not in answer.headers["content-type"]:
        body = answer.json()
        if path == "/v1/messages":
            return str(body["content"][0]["text"])
        if path == "/v1/responses":
            return str(body["output"][0]["content"][0]["text"])
        (choice,) = body["choices"]
        return str(choice["text"] if path == "/v1/completions" else choice["message"]["content"])
    data = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    events = [json.loads(item) for item in data if item != "[DONE]"]
    if path == "/v1/messages":
        assert events[-1]["type"] == "message_stop"
        return "".join(event["delta"]["text"] for event in events if event["type"] == "content_block_delta")
    if path == "/v1/responses":
        assert events[-1]["type"] == "response.completed"
        return "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    assert data[-1] == "[DONE]"
    choices = [choice for event in events for choice in event["choices"]]
    return "".join(c["text"] if path == "/v1/completions" else c["delta"].get("content") or "" for c in choices)


def assert_refused(path: str, answer: httpx.Response) -> None:
    error = answer.json()["error"]
    if path == "/v1/messages":
        assert (answer.status_code, error["type"]) == (529, "overloaded_error")
        assert answer.json()["type"] == "error"
    else:
        assert (answer.status_code, error["type"], error["code"]) == (429, "rate_limit_error", "overloaded")
    assert f"{NUM_WAITING} requests are waiting" in error["message"]
    assert int(answer.headers["retry-after"]) >= 1
    assert answer.headers["content-type"] == "application/json" and answer.headers["x-request-id"]


async def burst(server: Any, engine: int) -> list[tuple[str, httpx.Response]]:
    """All clients at once, while the engine stands still: it goes on when all refusals are there."""
    limits = httpx.Limits(max_connections=NUM_CLIENTS, max_keepalive_connections=0)
    address = f"http://127.0.0.1:{server.port}"
    async with httpx.AsyncClient(base_url=address, timeout=120.0, limits=limits) as client:
        paths = [PATHS[index % len(PATHS)] for index in range(NUM_CLIENTS)]
        os.kill(engine, signal.SIGSTOP)
        try:
            calls = {
                asyncio.create_task(client.post(path, json=body_of(path, index))): path
                for index, path in enumerate(paths)
            }
            refused: set[asyncio.Task[httpx.Response]] = set()
            pending = set(calls)
            while len(pending) > NUM_RUNNING + NUM_WAITING:
                done, pending = await asyncio.wait(pending, timeout=60.0, return_when=asyncio.FIRST_COMPLETED)
                assert done, f"{len(pending)} clients wait for an engine that stands still"
                refused |= done
            for call in refused:
                assert_refused(calls[call], call.result())
        finally:
            os.kill(engine, signal.SIGCONT)
        await asyncio.gather(*pending)
    return [(calls[call], call.result()) for call in pending]


def test_a_burst_beyond_the_queue(start_server: Any, tmp_path: Path) -> None:
    folder = write_scripted_model(tmp_path / "model", [("", REPLY)], step_s=0.002)
    limits = ("--max-num-seqs", str(NUM_RUNNING), "--max-num-waiting", str(NUM_WAITING))
    server = start_server(str(folder), "--load-format", "scripted", "--kv-tokens", "4096", *limits)
    assert server.chat("warm up").status_code == 200
    server.client.close()
    server.client = httpx.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=60.0)
    num_files = num_open_files(server)
    for _ in range(2):
        taken = asyncio.run(burst(server, engine_of(server)))
        assert len(taken) == NUM_RUNNING + NUM_WAITING
        assert [text_of(path, answer) for path, answer in taken] == [REPLY] * len(taken)
        server.wait_until_idle()
    assert server.chat("after").json()["choices"][0]["message"]["content"] == REPLY
    assert num_open_files(server) <= num_files + 1, "connections are left open"
    assert "Traceback" not in server.log
