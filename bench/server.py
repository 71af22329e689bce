# SPDX-License-Identifier: Apache-2.0
"""What the API process costs: streams, a long prompt and the stream to the engine, without a model.

The HTTP server runs as it is served, in a process of its own, pinned to one core. This process, on another core, is
both its engine (frames over a real socket) and its clients (raw sockets, of which bytes are counted). Costs are CPU
time of the API process, so that they do not depend on what else the machine does. In a stream run the next step is
sent only when each client has the event of the last one: events are never merged, and one that waited for a later step
would end the run. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import inspect
import json
import json.decoder
import os
import select
import socket
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import uvicorn

import server_stages
from server_engine import StandIn
from tokenspeed.checkpoints import open_model
from tokenspeed.core.config import EngineConfig, LoadFormat, ModelConfig, SchedulerConfig, ServerConfig
from tokenspeed.llm.async_llm import AsyncLLM
from tokenspeed.llm.engine_client import EngineClient
from tokenspeed.llm.tokenizer import Tokenizer
from tokenspeed.server import http
from tokenspeed.server.app import create_app
from tokenspeed.server.serve import bind

MODEL = "smollm2-135m"
DIALECT = "hermes"
WAIT_S_MAX = 60.0
SWEEP_S = 0.0005
BARS = {"events_per_cpu_s": 30_000, "tokens_per_cpu_s": 100_000, "warm_prompt_ms": 5.0, "ipc_us": 30.0}
TOOL = {
    "type": "function",
    "function": {
        "name": "read_file",
        "description": "Read a file",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
    },
}


def engine_config(model: str) -> EngineConfig:
    """As a user would have it, for many requests. Of the model only its tokenizer and template are used; the folder of
    a scripted model will do."""
    load_format: LoadFormat = "scripted" if Path(model).is_dir() else "auto"
    named = ModelConfig(model=model, load_format=load_format)
    return EngineConfig(model=named, scheduler=SchedulerConfig(max_num_seqs=1024))


class _Connected:
    """An engine that runs elsewhere; see tokenspeed.engine.process.Engine."""

    def __init__(self, path: str) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.connect(path)

    def is_alive(self) -> bool:
        return True

    def describe_end(self) -> str:
        return "with the benchmark"

    def wait(self, timeout_s: float) -> bool:
        return True

    def stop(self, grace_s: float = 0.0) -> None:
        self.sock.close()

    def tell_stacks(self) -> None:
        """It has none to tell."""


def api_process(path: str, core: int, model: str) -> None:
    """The server, for as long as its engine is there. Says its port."""
    os.sched_setaffinity(0, {core})
    http.run(_serve_api(path, engine_config(model)))


async def _serve_api(path: str, config: EngineConfig) -> None:
    source = open_model(config.model, None)
    source.script = None  # its engine is not here
    assert source.tokenizer is not None
    client = await EngineClient.start(lambda: _Connected(path), config)
    llm = AsyncLLM(config, source, Tokenizer.from_source(source.tokenizer), client)
    with bind("127.0.0.1", 0) as sock:
        sock.listen(2048)
        print(sock.getsockname()[1], flush=True)
        server = uvicorn.Server(http.http_config(create_app(llm, ServerConfig(tool_call_parser=DIALECT))))
        serving = asyncio.ensure_future(server.serve(sockets=[sock]))
        while llm.is_alive:
            await asyncio.sleep(0.1)
        server.force_exit = server.should_exit = True
        await serving
    await llm.shutdown()


@dataclass(frozen=True, slots=True)
class Api:
    """The API process as this one sees it."""

    process: subprocess.Popen[str]
    port: int
    engine: StandIn

    def cpu_s(self) -> float:
        """CPU time of all its threads so far."""
        return time.clock_gettime((~self.process.pid << 3) | 2)

    def system_s(self) -> float:
        """What of that the kernel has spent on its behalf, in units of a clock tick."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return int(fields[12]) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def api(cores: Sequence[int], model: str = MODEL) -> Iterator[Api]:
    """A server on the first core; this process goes to the last one."""
    os.sched_setaffinity(0, {cores[-1]})
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        path = str(Path(folder) / "engine.sock")
        listener.bind(path)
        listener.listen(1)
        command = [sys.executable, __file__, "--api", path, "--core", str(cores[0]), "--model", model]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            listener.settimeout(WAIT_S_MAX)
            engine = StandIn(listener.accept()[0])
            assert process.stdout is not None
            yield Api(process, int(process.stdout.readline()), engine)
            engine.close()
            process.wait(WAIT_S_MAX)
        finally:
            process.kill()
            process.wait()


class Clients:
    """Connections that each read one streamed answer. Events are counted by the empty line that ends each."""

    def __init__(self, port: int, path: str, bodies: Sequence[bytes]) -> None:
        self._poll = select.epoll()
        self._socks: dict[int, socket.socket] = {}
        self.num_events: dict[int, int] = {}
        self.num_bytes = 0
        self._cut: set[int] = set()
        for body in bodies:
            sock = socket.create_connection(("127.0.0.1", port))
            sock.setblocking(True)
            head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
            sock.sendall(f"{head}\r\n\r\n".encode() + body)
            self._socks[sock.fileno()] = sock
            self.num_events[sock.fileno()] = 0
            self._poll.register(sock.fileno(), select.EPOLLIN)

    def read(self, num_events: int) -> None:
        """Until so many events more have come."""
        deadline = time.monotonic() + WAIT_S_MAX
        while num_events > 0:
            assert time.monotonic() < deadline, f"{num_events} events did not come"
            time.sleep(SWEEP_S)  # a client that waits in the kernel makes each write of the server a wake-up
            for fileno, _ in self._poll.poll(0.0):
                num_events -= self._read(fileno)
        assert num_events == 0, f"{-num_events} events too many"

    def _read(self, fileno: int) -> int:
        data = self._socks[fileno].recv(1 << 18)
        assert data, "the server has closed a stream"
        found = data.count(b"\n\n") + (fileno in self._cut and data.startswith(b"\n"))
        self._cut.discard(fileno)
        if data.endswith(b"\n") and not data.endswith(b"\n\n"):
            self._cut.add(fileno)
        self.num_bytes += len(data)
        self.num_events[fileno] += found
        return found

    def close(self) -> None:
        for sock in self._socks.values():
            sock.close()
        self._poll.close()


def spoken(tokenizer: Tokenizer) -> list[int]:
    """Tokens of source code, of those only that a parser hands on at once: each is an event of its own."""
    ids = tokenizer.encode(inspect.getsource(json.decoder), add_special_tokens=False)
    texts = [tokenizer.token_text(token_id) for token_id in ids]
    return [
        token_id for token_id, text in zip(ids, texts, strict=True) if text == text.rstrip() and not {*"`<{["} & {*text}
    ]


@dataclass(frozen=True, slots=True)
class StreamRun:
    """Costs of a run. A step is one update of every stream."""

    num_events: int
    num_tokens: int
    num_bytes: int
    cpu_s: float
    system_s: float
    wall_s: float

    def line(self, name: str) -> str:
        """For the eye."""
        us = self.cpu_s / self.num_events * 1e6
        return (
            f"{name:<34} {us:6.1f} µs an event ({self.system_s / self.cpu_s:4.0%} kernel) "
            f"{self.num_events / self.cpu_s:9,.0f} events  {self.num_tokens / self.cpu_s:9,.0f} tokens a CPU second  "
            f"{self.num_events / self.wall_s:8,.0f} events/s elapsed"
        )


def stream_body(index: int, **fields: object) -> bytes:
    """A chat of a coding agent."""
    messages = [
        {"role": "system", "content": "You write code."},
        {"role": "user", "content": f"Change file {index}."},
    ]
    body = {"model": MODEL, "messages": messages, "tools": [TOOL], "stream": True, "ignore_eos": True}
    return json.dumps({**body, "max_tokens": 100_000, **fields}).encode()


def run_streams(
    api: Api,
    ids: Sequence[int],
    *,
    num_streams: int,
    num_steps: int,
    num_tokens: int,
    warm_up: int = 20,
    **fields: object,
) -> StreamRun:
    """num_steps steps of num_tokens tokens for each stream, after a few that warm up."""
    clients = Clients(api.port, "/v1/chat/completions", [stream_body(i, **fields) for i in range(num_streams)])
    engine = api.engine
    engine.take(num_streams)
    steps = [engine.step_frame(ids, step, num_tokens) for step in range(warm_up + num_steps)]
    gc.collect()
    gc.disable()
    for step, frame in enumerate(steps):
        if step == warm_up:
            start = (api.cpu_s(), api.system_s(), time.perf_counter(), clients.num_bytes)
        engine.send(frame)
        clients.read(num_streams * (2 if step == 0 else 1))  # the role comes with the first
    run = StreamRun(
        num_events=num_streams * num_steps,
        num_tokens=num_streams * num_steps * num_tokens,
        num_bytes=clients.num_bytes - start[3],
        cpu_s=api.cpu_s() - start[0],
        system_s=api.system_s() - start[1],
        wall_s=time.perf_counter() - start[2],
    )
    gc.enable()
    assert len(set(clients.num_events.values())) == 1, "the streams are not in step"
    engine.send(engine.end_frame())
    clients.read(2 * num_streams)  # how it ended, and [DONE]
    clients.close()
    engine.forget()
    return run


def run_prompts(api: Api, tokenizer: Tokenizer, num_tokens: int, num_turns: int) -> dict[str, float]:
    """A session of num_tokens tokens that grows by a turn: from the last byte of the request to the engine's Submit,
    and from the engine's first token to the client. The first turn is cold, the median of the others is warm."""
    source = inspect.getsource(argparse) + inspect.getsource(textwrap)
    content = ""
    while len(tokenizer.encode(content, add_special_tokens=False)) < num_tokens:
        content += source
    ids = tokenizer.encode(content, add_special_tokens=False)[:num_tokens]
    pieces = [tokenizer.decode(ids[start : start + 2000]) for start in range(0, num_tokens, 2000)]
    messages = [{"role": ("user", "assistant")[index % 2], "content": piece} for index, piece in enumerate(pieces)]
    inward, outward = [], []
    for turn in range(num_turns):
        messages = [*messages, {"role": "user", "content": f"Now change function {turn}."}]
        body = stream_body(0, messages=messages)
        clients = Clients(api.port, "/v1/chat/completions", [body])
        start = time.perf_counter()
        api.engine.take(1)
        inward.append((time.perf_counter() - start) * 1e3)
        assert api.engine.prompt_len() >= num_tokens, api.engine.prompt_len()
        frame = api.engine.step_frame([260], 0, 1)
        start = time.perf_counter()
        api.engine.send(frame)
        clients.read(2)
        outward.append((time.perf_counter() - start) * 1e3)
        api.engine.send(api.engine.end_frame())
        clients.read(2)
        clients.close()
        api.engine.forget()
        messages = [*messages, {"role": "assistant", "content": "Done."}]
    return {
        "cold_prompt_ms": inward[0],
        "warm_prompt_ms": statistics.median(inward[1:]),
        "first_event_ms": statistics.median(outward[1:]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3, help="the best counts: others only add")
    parser.add_argument("--prompt-tokens", type=int, default=50_000, help="0 leaves this part out")
    parser.add_argument("--model", default=MODEL, help="whose tokenizer and template are used")
    parser.add_argument("--api", metavar="SOCKET", help=argparse.SUPPRESS)
    parser.add_argument("--core", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.api:
        api_process(options.api, options.core, options.model)
        return
    cores = sorted(os.sched_getaffinity(0))
    source = open_model(engine_config(options.model).model, None)
    assert source.tokenizer is not None
    tokenizer = Tokenizer.from_source(source.tokenizer)
    ids = spoken(tokenizer)
    print(f"{options.streams} streams, {options.steps} steps, best of {options.rounds} rounds", flush=True)
    results: dict[str, float] = {}
    with api(cores, options.model) as served:
        for num_tokens, name in ((1, "one token an event"), (4, "four tokens an event")):
            runs = [
                run_streams(served, ids, num_streams=options.streams, num_steps=options.steps, num_tokens=num_tokens)
                for _ in range(options.rounds)
            ]
            best = min(runs, key=lambda run: run.cpu_s)
            print(best.line(name), flush=True)
            if num_tokens == 1:
                single = best
                results["events_per_cpu_s"] = best.num_events / best.cpu_s
            results["tokens_per_cpu_s"] = best.num_tokens / best.cpu_s
        prompts = run_prompts(served, tokenizer, options.prompt_tokens, 8) if options.prompt_tokens else {}
    results |= prompts
    if prompts:
        print(
            f"{options.prompt_tokens:,} tokens of prompt: {prompts['cold_prompt_ms']:.1f} ms cold, "
            f"{prompts['warm_prompt_ms']:.1f} ms warm to the engine; {prompts['first_event_ms']:.2f} ms from its first "
            "token to the client"
        )
    results |= server_stages.ipc(num_requests=128)
    sides = f"{results['ipc_engine_us']:.1f} µs in the engine, {results['ipc_api_us']:.1f} µs in the API process"
    print(f"a step of 128 requests over IPC: {sides}")
    stages = server_stages.stages(tokenizer, ids, DIALECT, TOOL, options.streams)
    total_us = single.cpu_s / single.num_events * 1e6
    stop_us, loop_ns = server_stages.stop_us(tokenizer, ids), server_stages.loop_ns()
    print(
        f"where {total_us:.2f} µs go (two stop strings would add {stop_us:.2f}; an empty loop: {loop_ns:.0f} ns a turn)"
    )
    results["loop_ns"] = loop_ns
    for name, cost_us in (*stages.items(), ("the loop, tasks, HTTP framing", total_us - sum(stages.values()))):
        print(f"  {name:<34} {cost_us:6.2f} µs an event {cost_us / total_us:5.0%}")
    print(json.dumps({name: round(value, 3) for name, value in results.items()} | {"bars": BARS}))


if __name__ == "__main__":
    main()
