# SPDX-License-Identifier: Apache-2.0
"""Ten thousand requests of every kind: neither the server nor its engine grows, and nothing is left behind."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import httpx
import pytest

from scripted import CALLING_TEMPLATE, spoken_call, write_scripted_model

NUM_REQUESTS, NUM_WARM, NUM_CLIENTS = 10_000, 2_000, 24
PAGE_BYTES = 4096
NUM_TEXTS = 60  # caches of texts and sessions are bounded, and full of these before anything is measured
GROWTH_BYTES_MAX = 12 << 20  # stored responses among it
REPLIES = [
    ("use the tool", spoken_call("look", at="there", thought="Hm.")),
    ("be long", "All work and no play makes a dull day. " * 20),
    ("", "A short answer."),
]
TOOL = {
    "name": "look",
    "description": "Looks.",
    "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
}
CHAT, TEXT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES


def engine_of(server: Any) -> int:
    listings = Path(f"/proc/{server.process.pid}/task").glob("*/children")
    (child,) = [int(child) for listing in listings for child in listing.read_text().split()]
    return child


def request_of(index: int, random_: random.Random) -> tuple[str, dict[str, Any], int]:
    """(path, body, status that is right)."""
    text = ("use the tool", "be long", "be brief")[index % 3] + f" {index % NUM_TEXTS} " + "x" * (index % NUM_TEXTS)
    path = random_.choice((CHAT, CHAT, TEXT, MESSAGES, RESPONSES))
    limit = "max_output_tokens" if path == RESPONSES else "max_tokens"
    body: dict[str, Any] = {limit: random_.choice((4, 16, 64)), "temperature": 0, "stream": random_.random() < 0.5}
    if path == TEXT:
        body |= {"prompt": [text] * random_.choice((1, 1, 3)), "n": random_.choice((1, 1, 2))}
    elif path == RESPONSES:
        body |= {"input": text, "store": random_.random() < 0.5, "tools": [{"type": "function", **TOOL}]}
    else:
        body |= {"messages": [{"role": "user", "content": text}]}
    if path == CHAT:
        body |= {"n": random_.choice((1, 1, 2)), "tools": [{"type": "function", "function": TOOL}]}
        body |= random_.choice(({}, {}, {"logprobs": True, "top_logprobs": 2}, {"stop": ["play"]}))
    if random_.random() < 0.1:
        bad: dict[str, Any] = random_.choice(({"temperature": -1}, {"stream": "yes"}, {limit: -5}, {"top_p": 7}))
        return path, body | bad, 400
    return path, body, 200


def wait_until_quiet(server: Any) -> None:
    """Nothing runs or waits; pages of sessions that wait for results may be held."""
    for name in ("num_requests_running", "num_requests_waiting"):
        server.wait_for(name, 0.0)


async def client(address: str, indices: range, seed: int) -> None:
    """One client's requests, a tenth of which it does not wait for."""
    random_ = random.Random(seed)
    async with httpx.AsyncClient(base_url=address, timeout=120.0) as session:
        for index in indices:
            path, body, status = request_of(index, random_)
            if status == 200 and random_.random() < 0.1:
                async with session.stream("POST", path, json={**body, "stream": True}) as answer:
                    async for _ in answer.aiter_bytes():
                        break  # the connection is closed in the middle of the stream
                continue
            answer = await session.post(path, json=body)
            assert answer.status_code == status, (path, body, answer.text)


async def load(server: Any, first: int, number: int) -> None:
    share = number // NUM_CLIENTS
    address = f"http://127.0.0.1:{server.port}"
    starts = [first + place * share for place in range(NUM_CLIENTS)]
    await asyncio.gather(*(client(address, range(start, start + share), start) for start in starts))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_ten_thousand_requests_leave_no_trace(start_server: Any, tmp_path: Path) -> None:
    folder = write_scripted_model(tmp_path / "model", REPLIES, template=CALLING_TEMPLATE)
    flags = ("--load-format", "scripted", "--kv-tokens", "16384", "--max-num-seqs", "32")
    server = start_server(str(folder), *flags)
    engine, seen = engine_of(server), []
    asyncio.run(load(server, 0, NUM_WARM))
    for part in range(4):
        wait_until_quiet(server)
        seen.append((resident_bytes(server.process.pid), resident_bytes(engine)))
        asyncio.run(load(server, NUM_WARM + part * NUM_REQUESTS // 4, NUM_REQUESTS // 4))
    wait_until_quiet(server)
    seen.append((resident_bytes(server.process.pid), resident_bytes(engine)))
    figures = ", ".join(f"{api >> 10} + {core >> 10} KiB" for api, core in seen)
    print(f"server + engine, resident after the warm-up and each quarter: {figures}")  # for pytest -s
    for before, after in zip(seen[0], seen[-1], strict=True):
        assert after - before < GROWTH_BYTES_MAX, figures
    assert server.metric("engine_restarts_total") == 0.0 and "Traceback" not in server.log
    assert server.chat("be brief").json()["choices"][0]["message"]["content"] == "A short answer."
