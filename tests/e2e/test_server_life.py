# SPDX-License-Identifier: Apache-2.0
"""Clients that leave, and signals, against a real server process."""

from __future__ import annotations

import contextlib
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from scripted import CALLING_TEMPLATE, write_scripted_model

SHORT_GRACE = "import sys, tokenspeed.cli, tokenspeed.server.http as h; h.DRAIN_S = 1; sys.exit(tokenspeed.cli.main())"
"""The server's program, with little time for requests that still run when it is told to stop."""
SHUTTING_DOWN = "the server is shutting down"

LONG_REPLY = "All work and no play makes a dull day. " * 100
LONG = {"max_tokens": 4000, "ignore_eos": True, "temperature": 0}


def long_body(content: str, *, stream: bool) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": content}], "stream": stream, **LONG}


def body_for(path: str, text: str, stream: bool) -> dict[str, Any]:
    """A request that takes long, in the words of the API behind the path."""
    if path == "/v1/responses":
        return {"input": text, "stream": stream, "max_output_tokens": 4000, "ignore_eos": True}
    if path == "/v1/completions":
        return {"prompt": text, "stream": stream, **LONG}
    return dict(long_body(text, stream=stream))


@pytest.fixture(scope="module")
def server(start_module_server: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    replies = [("brief", "A short answer."), ("", LONG_REPLY)]
    folder = write_scripted_model(tmp_path_factory.mktemp("life") / "model", replies, step_s=0.004)
    flags = ("--load-format", "scripted", "--max-num-batched-tokens", "64", "--kv-tokens", "65536")
    return start_module_server(str(folder), *flags)


def test_lc_1_clients_that_leave_free_everything_fifty_times(server: Any) -> None:
    fresh = server.chat("brief, with a prefix " + "y" * 600).json()["choices"][0]["message"]["content"]
    server.wait_until_idle()
    for turn in range(50):
        prefill = "y" * 4000 + str(turn)
        match turn % 3:
            case 0:
                server.hang_up(long_body(f"stream {turn}", stream=True), after_s=0.02, read=True)
            case 1:
                server.hang_up(long_body(f"whole {turn}", stream=False), after_s=0.5 if turn == 1 else 0.05)
            case _:
                server.hang_up(long_body(prefill, stream=turn % 2 == 0), after_s=0.04)
        server.wait_until_idle(2.0)
    again = server.chat("brief, with a prefix " + "y" * 600).json()["choices"][0]["message"]["content"]
    assert again == fresh == "A short answer."
    server.wait_until_idle()


def test_lc_1_a_client_may_leave_in_every_phase(start_server: Any, tmp_path: Path) -> None:
    """Queued, in a chunk of prefill, while text comes, while a call is withheld; streaming and not, in each API."""
    withheld = '<tool_call>{"name": "write", "arguments": {"text": "' + "x" * 3000
    replies = [("withheld", withheld), ("brief", "A short answer."), ("", LONG_REPLY)]
    folder = write_scripted_model(tmp_path / "model", replies, step_s=0.004, template=CALLING_TEMPLATE)
    flags = ("--max-num-seqs", "2", "--max-num-batched-tokens", "32", "--kv-tokens", "32768")
    server = start_server(str(folder), "--load-format", "scripted", *flags)
    tools = [{"type": "function", "function": {"name": "write", "parameters": {"type": "object"}}}]
    for turn, stream in enumerate((True, False)):
        for path in ("/v1/chat/completions", "/v1/messages", "/v1/responses"):
            with contextlib.ExitStack() as stack:
                for blocker in range(2):
                    stack.enter_context(server.asking(long_body(f"in the way {turn} {blocker}", stream=True)))
                server.wait_for("num_requests_running", 2.0)
                with server.asking(body_for(path, f"queued {turn}", stream), path):
                    server.wait_for("num_requests_waiting", 1.0)
                server.wait_for("num_requests_waiting", 0.0)
                assert server.metric("num_requests_running") == 2.0
            server.wait_until_idle(5.0)
            for text in ("y" * 4000, f"decoding {turn}", f"withheld {turn}"):
                generated = server.metric("generation_tokens_total")
                body = body_for(path, text, stream)
                if path == "/v1/chat/completions":
                    body["tools"] = tools
                with server.asking(body, path):
                    server.wait_for("num_requests_running", 1.0)
                    while text[0] != "y" and server.metric("generation_tokens_total") < generated + 70:
                        time.sleep(0.02)
                server.wait_until_idle(5.0)
                assert (server.metric("generation_tokens_total") == generated) == (text[0] == "y")
    assert server.chat("brief").json()["choices"][0]["message"]["content"] == "A short answer."
    assert "Traceback" not in server.log


def test_lc_1_many_clients_that_leave_at_once(server: Any) -> None:
    with ThreadPoolExecutor(16) as pool:
        for kind in range(16):
            body = long_body(f"crowd {kind} " + "z" * 200 * (kind % 3), stream=kind % 2 == 0)
            pool.submit(server.hang_up, body, after_s=0.1 + 0.01 * kind)
    server.wait_until_idle(2.0)
    assert server.chat("brief").json()["choices"][0]["message"]["content"] == "A short answer."


def test_requests_are_logged_in_one_line(server: Any) -> None:
    response = server.chat("brief and logged")
    line = next(line for line in server.log.splitlines() if response.json()["id"] in line)
    for words in ("prompt ", "cached ", "generated 16", "ttft 0.", "tok/s", "finish stop"):
        assert words in line


def test_a_request_that_is_dropped_is_logged_with_what_is_known_of_it(start_server: Any, tmp_path: Path) -> None:
    """While its prompt is computed, and while it waits; alone, and one of several prompts."""
    folder = write_scripted_model(tmp_path / "model", [("", LONG_REPLY)], step_s=0.05)
    flags = ("--max-num-seqs", "1", "--max-num-batched-tokens", "64", "--kv-tokens", "32768")
    server = start_server(str(folder), "--load-format", "scripted", *flags)
    with server.asking({"prompt": "y" * 6000, "max_tokens": 9}, "/v1/completions"):
        server.wait_for("num_requests_running", 1.0)
        with server.asking({"prompt": ["z" * 100, "z" * 200], "max_tokens": 9}, "/v1/completions"):
            server.wait_for("num_requests_waiting", 2.0)
            time.sleep(0.3)
        server.wait_for("num_requests_waiting", 0.0)
    server.wait_until_idle(5.0)
    waited, computed = (line for line in server.log.splitlines() if "finish abort" in line)
    assert re.search(r" prompt 300 cached 0 generated 0 queue 0\.[3-9]\d\d s ttft - ", waited), waited
    assert re.search(r" prompt 6000 cached 0 generated 0 queue 0\.0\d\d s ttft - ", computed), computed


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_server_and_engine_in_order(start_server: Any, tmp_path: Path, number: signal.Signals) -> None:
    folder = write_scripted_model(tmp_path / "model", [("", "ok")], step_s=0.02)
    server = start_server(str(folder), "--load-format", "scripted")
    engine = engine_pid(server.process.pid)
    answers: list[httpx.Response] = []
    caller = threading.Thread(target=lambda: answers.append(server.chat("x", max_tokens=40, ignore_eos=True)))
    caller.start()
    while server.metric("num_requests_running") == 0.0:
        time.sleep(0.01)
    assert server.stop(number) == 0
    caller.join(10.0)
    assert answers[0].json()["usage"]["completion_tokens"] == 40, "a running request may finish"
    assert not Path(f"/proc/{engine}").exists()
    assert "Traceback" not in server.log


def test_a_second_signal_drops_what_still_runs(start_server: Any, tmp_path: Path) -> None:
    folder = write_scripted_model(tmp_path / "model", [("", "ok")], step_s=0.05)
    server = start_server(str(folder), "--load-format", "scripted")
    answers: list[int | str] = []

    def call() -> None:
        try:
            answers.append(server.chat("x", max_tokens=4000, ignore_eos=True).status_code)
        except httpx.HTTPError as error:
            answers.append(type(error).__name__)

    caller = threading.Thread(target=call)
    caller.start()
    while server.metric("num_requests_running") == 0.0:
        time.sleep(0.01)
    server.process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    began = time.monotonic()
    assert server.stop(signal.SIGINT) == 0
    assert time.monotonic() - began < 6.0
    caller.join(10.0)
    assert answers in ([503], ["RemoteProtocolError"], ["ReadError"]), "a dropped request must not look finished"
    assert "Traceback" not in server.log


def read_all(server: Any, path: str, stream: bool, answers: dict[tuple[str, bool], str]) -> None:
    body = body_for(path, f"{path} {stream}", stream)
    with server.client.stream("POST", path, json=body) as got:
        text = "".join(got.iter_text())  # raises where the body has no proper end
    answers[path, stream] = f"{got.status_code} {text}"


@pytest.mark.parametrize(
    ("number", "twice"),
    [
        pytest.param(signal.SIGINT, True, id="a second signal"),
        pytest.param(signal.SIGTERM, False, id="the grace ends"),
        pytest.param(signal.SIGINT, False, id="the grace ends, other signal", marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, True, id="a second signal, other signal", marks=pytest.mark.slow),
    ],
)
def test_what_still_runs_at_the_end_is_told_so(
    start_server: Any, tmp_path: Path, number: signal.Signals, twice: bool
) -> None:
    folder = write_scripted_model(tmp_path / "model", [("", LONG_REPLY)], step_s=0.05)
    program = {} if twice else {"program": ("-c", SHORT_GRACE)}
    server = start_server(str(folder), "--load-format", "scripted", **program)
    paths = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses")
    kinds = [(path, stream) for path in paths for stream in (True, False)]
    answers: dict[tuple[str, bool], str] = {}
    callers = [threading.Thread(target=read_all, args=(server, *kind, answers)) for kind in kinds]
    for caller in callers:
        caller.start()
    server.wait_for("num_requests_running", len(kinds), 10.0)
    began = time.monotonic()
    server.process.send_signal(number)
    if twice:
        time.sleep(0.3)
        server.process.send_signal(number)
    assert server.process.wait(30.0) == 0
    assert time.monotonic() - began < 6.0
    for caller in callers:
        caller.join(10.0)
    assert set(answers) == set(kinds)
    for (_, stream), text in answers.items():
        assert text.startswith("200 " if stream else "503 "), text
        assert SHUTTING_DOWN in (text.strip().splitlines()[-1] if stream else text)
        assert "[DONE]" not in text
    assert "Traceback" not in server.log
    assert "Cancel" not in server.log


def test_a_signal_while_loading_ends_at_once(tmp_path: Path) -> None:
    folder = write_scripted_model(tmp_path / "model", [("", "ok")])
    command = [sys.executable, "-m", "tokenspeed.cli", "serve", str(folder), "--load-format", "scripted", "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not children(process.pid):
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20.0)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert "ready" not in out


def test_two_servers_cannot_have_one_port(server: Any, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tokenspeed.cli", "serve", str(tmp_path / "none"), "--port", str(server.port)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60.0)
    assert done.returncode == 1
    assert f"127.0.0.1:{server.port} is in use" in done.stderr
    assert server.client.get("/health").status_code == 200
    with socket.create_connection(("127.0.0.1", server.port), timeout=5.0):
        pass


def children(pid: int) -> list[int]:
    """Child processes of `pid`."""
    found: list[int] = []
    for listing in Path(f"/proc/{pid}/task").glob("*/children"):
        found += [int(child) for child in listing.read_text().split()]
    return found


def engine_pid(pid: int) -> int:
    """The engine of a server."""
    (engine,) = children(pid)
    return engine
