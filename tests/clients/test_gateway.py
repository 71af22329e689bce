# SPDX-License-Identifier: Apache-2.0
"""SMG before the server, over gRPC and over HTTP: every API answered through it, and Claude Code's task done.

Over gRPC the gateway renders, tokenizes, detokenizes and parses by itself, with the tokenizer that the server hands it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from clients import agents
from clients.conftest import CONTEXT_LENGTH, MODEL, Place, program
from clients.test_claude_code import run_claude_code
from clients.wire import Relay
from e2e.conftest import ServerProcess
from scripted import CALLING_TEMPLATE, spoken_call, write_scripted_model

pytestmark = pytest.mark.clients

HELLO = "Hello there, friend."
LONG = "on and on " * 2000
TEMPLATE = CALLING_TEMPLATE.replace("<tool_call>{", "<tool_call>\n{").replace('"</tool_call>"', '"\n</tool_call>"')
"""The gateway's parser of calls wants them on lines of their own."""
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
SYMPHONY = ("--parser", "symphony", "--tool-call-parser", "qwen", "--reasoning-parser", "qwen3")
LEGACY = ("--tool-call-parser", "qwen")
"""The gateway's two ways to read replies. The first reads them rightly in any pieces, but gives the calls of each reply
of /v1/messages the same ids, which Claude Code does not bear. The second, with a reasoning parser, loses text when
marks come in pieces, as they do from a vocabulary of bytes."""
START_S_MAX = 60.0


def call_of(name: str, **arguments: object) -> str:
    """A reply that calls, as TEMPLATE has it."""
    return (
        spoken_call(name, **arguments).replace("<tool_call>", "<tool_call>\n").replace("</tool_call>", "\n</tool_call>")
    )


class Server:
    """The server on both ports, with a scripted model."""

    def __init__(self, folder: Path, replies: Sequence[tuple[str, str]]) -> None:
        model = write_scripted_model(folder, replies, context_length=CONTEXT_LENGTH, template=TEMPLATE)
        flags = ("--load-format", "scripted", "--served-name", MODEL, "--kv-tokens", str(2 * CONTEXT_LENGTH))
        self.process = ServerProcess(str(model), *flags, "--grpc-port", "0")
        found = re.search(r"gRPC\s+(grpc://\S+)", self.process.banner)
        assert found, self.process.banner
        self.urls = {"grpc": found[1], "http": f"http://127.0.0.1:{self.process.port}"}


class Gateway:
    """A running SMG with one worker. Ends it on close."""

    def __init__(self, folder: Path, worker: str, policy: str, parsers: Sequence[str] = SYMPHONY) -> None:
        self._log = folder / "gateway.log"
        self.port, metrics_port = free_port(), free_port()
        command = [
            str(program("python", "bin", "smg")), "launch", "--host", "127.0.0.1", "--port", str(self.port),
            "--worker-urls", worker, "--policy", policy, *parsers,
            "--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port),
            *(("--backend", "tokenspeed") if worker.startswith("grpc") else ()),
        ]  # fmt: skip
        variables = {"HOME": str(folder), "PATH": os.environ["PATH"], "HF_HUB_OFFLINE": "1"}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command, cwd=folder, env=variables, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=60.0)
        self._metrics_url = f"http://127.0.0.1:{metrics_port}/metrics"
        self._wait_for_worker()

    def post(self, path: str, **body: object) -> Any:
        """The answer."""
        response = self.client.post(path, json={"model": MODEL, **body})
        assert response.status_code == 200, f"{response.text}\n{self.log}"
        return response.json()

    def events(self, path: str, **body: object) -> list[dict[str, Any]]:
        """The data of each event of a streamed answer."""
        response = self.client.post(path, json={"model": MODEL, "stream": True, **body})
        assert response.status_code == 200, f"{response.text}\n{self.log}"
        return [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels."""
        lines = httpx.get(self._metrics_url, timeout=10.0).text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if re.match(rf"{name}({{| )", line))

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")[-4000:]

    def close(self) -> None:
        self.client.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _wait_for_worker(self) -> None:
        deadline = time.monotonic() + START_S_MAX
        while True:
            with contextlib.suppress(httpx.TransportError):
                asked = self.client.post("/v1/completions", json={"model": MODEL, "prompt": "?", "max_tokens": 1})
                if asked.status_code in (200, 400):  # 400: by the server, whose script knows no answer
                    return
            if self._process.poll() is not None or time.monotonic() > deadline:
                story = self.log
                self.close()
                raise AssertionError(f"the gateway did not find its worker:\n{story}")
            time.sleep(0.2)


def free_port() -> int:
    """One that was free a moment ago."""
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as sock:
        port: int = sock.getsockname()[1]
        return port


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    weather = call_of("get_weather", thought="Look.", text="Let me see.", city="Oslo")
    replies = [("sunny", "Go out."), ("weather", weather), ("on and on", LONG), ("", HELLO)]
    started = Server(tmp_path_factory.mktemp("gateway") / "model", replies)
    yield started
    started.process.close()


@pytest.fixture(
    scope="module",
    params=[("grpc", "round_robin"), ("grpc", "cache_aware"), ("http", "cache_aware")],
    ids=["grpc", "grpc-cache-aware", "http"],
)
def gateway(
    request: pytest.FixtureRequest, server: Server, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Gateway]:
    scheme, policy = request.param
    started = Gateway(tmp_path_factory.mktemp("home"), server.urls[scheme], policy)
    yield started
    started.close()


def user(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


def test_a_gateway_knows_what_the_server_holds_cached(server: Server, tmp_path: Path) -> None:
    """As it happens, and after it was started anew: all of it, and each block below its parent."""
    for name in ("first", "second"):
        home = tmp_path / name
        home.mkdir()
        with contextlib.closing(Gateway(home, server.urls["grpc"], "cache_aware")) as gateway:
            for turn in range(3):
                gateway.post("/v1/chat/completions", messages=user(f"{name}, a long question " * (4 + turn)))
            server.process.wait_until_idle()  # and nothing is held: this test comes before those of tools
            num_cached = server.process.metric("kv_cache_cached_blocks")
            assert num_cached > 10
            wait_until_told(gateway, num_cached)
            assert gateway.metric("smg_kv_event_resyncs_total") == 1, "the state that it began with"
            assert gateway.metric("smg_kv_event_parentless_blocks_total") == 0
            assert gateway.metric("smg_kv_event_gaps_total") == 0


def wait_until_told(gateway: Gateway, num_blocks: float) -> None:
    """Of so many blocks, in the state or since; nothing is evicted here."""
    deadline = time.monotonic() + 30.0
    while (told := gateway.metric("smg_kv_event_blocks_total")) != num_blocks:
        assert time.monotonic() < deadline, f"the gateway was told of {told} blocks of {num_blocks}"
        time.sleep(0.1)


def test_every_api_is_answered(gateway: Gateway) -> None:
    chat = gateway.post("/v1/chat/completions", messages=user("hi"), temperature=0)
    assert chat["choices"][0]["message"]["content"] == HELLO
    assert chat["choices"][0]["finish_reason"] == "stop"
    assert chat["usage"]["completion_tokens"] == len(HELLO) + 1
    completion = gateway.post("/v1/completions", prompt="hi", max_tokens=9)
    assert completion["choices"][0]["text"] == HELLO[:9]
    assert completion["choices"][0]["finish_reason"] == "length"
    message = gateway.post("/v1/messages", messages=user("hi"), max_tokens=64)
    assert message["content"] == [{"type": "text", "text": HELLO}]
    assert message["stop_reason"] == "end_turn"
    response = gateway.post("/v1/responses", input="hi")
    assert response["status"] == "completed"
    assert response["output"][-1]["content"][0]["text"] == HELLO


def test_every_api_streams(gateway: Gateway) -> None:
    chunks = gateway.events("/v1/chat/completions", messages=user("hi"), n=2)
    for index in (0, 1):
        choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        assert "".join(choice["delta"].get("content") or "" for choice in choices) == HELLO
        assert choices[-1]["finish_reason"] == "stop"
    pieces = gateway.events("/v1/completions", prompt="hi", max_tokens=9)
    assert "".join(choice["text"] for piece in pieces for choice in piece["choices"]) == HELLO[:9]
    events = gateway.events("/v1/messages", messages=user("hi"), max_tokens=64)
    assert "".join(e["delta"].get("text", "") for e in events if e["type"] == "content_block_delta") == HELLO
    assert events[-1]["type"] == "message_stop"
    events = gateway.events("/v1/responses", input="hi")
    assert "".join(e["delta"] for e in events if e["type"] == "response.output_text.delta") == HELLO
    assert events[-1]["type"] == "response.completed"


def test_a_tool_is_called_and_its_result_goes_back(gateway: Gateway) -> None:
    function = {"name": "get_weather", "description": "The weather", "parameters": PARAMETERS}
    tools = [{"type": "function", "function": function}]
    asked = user("weather?")
    choice = gateway.post("/v1/chat/completions", messages=asked, tools=tools)["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Let me see."
    (call,) = choice["message"]["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("get_weather", {"city": "Oslo"})
    chunks = gateway.events("/v1/chat/completions", messages=asked, tools=tools)
    deltas = [d for chunk in chunks for c in chunk["choices"] for d in c["delta"].get("tool_calls") or []]
    assert json.loads("".join(delta["function"].get("arguments") or "" for delta in deltas)) == {"city": "Oslo"}
    result = {"role": "tool", "tool_call_id": call["id"], "content": "sunny"}
    said = {key: choice["message"][key] for key in ("role", "content", "tool_calls", "reasoning_content")}
    answer = gateway.post("/v1/chat/completions", messages=[*asked, said, result], tools=tools)
    assert answer["choices"][0]["message"]["content"] == "Go out."
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    own = [{"name": "get_weather", "description": "The weather", "input_schema": PARAMETERS}]
    message = gateway.post("/v1/messages", messages=asked, tools=own, max_tokens=500)
    assert message["stop_reason"] == "tool_use"
    (use,) = [block for block in message["content"] if block["type"] == "tool_use"]
    assert (use["name"], use["input"]) == ("get_weather", {"city": "Oslo"})


def test_a_refusal_reaches_the_client_and_harms_no_one(gateway: Gateway) -> None:
    too_long = {"model": MODEL, "messages": user("a" * CONTEXT_LENGTH)}
    assert gateway.client.post("/v1/chat/completions", json=too_long).status_code == 400
    unfit = {"model": MODEL, "messages": user("hi"), "stop": [str(number) for number in range(17)]}
    assert gateway.client.post("/v1/chat/completions", json=unfit).status_code == 400
    assert gateway.post("/v1/chat/completions", messages=user("hi"))["choices"][0]["message"]["content"] == HELLO


def test_a_client_that_leaves_frees_the_engine(gateway: Gateway, server: Server) -> None:
    body = {"model": MODEL, "stream": True, "messages": user("on and on"), "max_tokens": len(LONG)}
    with gateway.client.stream("POST", "/v1/chat/completions", json=body) as response:
        lines = response.iter_lines()  # kept: the client leaves when it is let go
        next(lines)
        assert server.process.metric("num_requests_running") == 1
    deadline = time.monotonic() + 30.0
    while server.process.metric("num_requests_running") > 0:
        assert time.monotonic() < deadline, "the server goes on"
    assert server.process.metric("generation_tokens_total") < len(LONG)


class GatewayPlace(Place):
    """A place whose requests pass through the gateway, and over gRPC behind it."""

    def __init__(self, folder: Path, replies: Sequence[tuple[str, str]]) -> None:
        self.home, self.work = folder / "home", folder / "work"
        for made in (self.home, self.work, folder / "gateway"):
            made.mkdir()
        server = Server(folder / "model", replies)
        self._server = server.process
        self._gateway = Gateway(folder / "gateway", server.urls["grpc"], "cache_aware", LEGACY)
        self._relay = Relay(self._gateway.port)
        self.url = self._relay.url

    def close(self) -> None:
        super().close()
        self._gateway.close()


def test_claude_code_works_through_the_gateway(tmp_path: Path) -> None:
    note = str(tmp_path / "work" / "note.txt")
    replies = agents.replies(
        call_of("Read", text="Let me look.", file_path=note), call_of("Bash", command=agents.WRITE)
    )
    with contextlib.closing(GatewayPlace(tmp_path, replies)) as here:
        agents.lay_out(here.work)
        answer = run_claude_code(here)
        assert answer["result"] == agents.DONE, here.story()
        assert (here.work / "answer.txt").read_text().strip() == agents.SECRET
