# SPDX-License-Identifier: Apache-2.0
"""A real HTTP server on loopback over the real AsyncLLM, with a fake engine behind it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import httpx
import pytest
import uvicorn

from fakes import FakeSource, FakeWorker, byte_tokenizer, engine_info
from tokenspeed.core.config import EngineConfig, ModelConfig, SchedulerConfig, ServerConfig
from tokenspeed.core.ipc import Cancel, Submit
from tokenspeed.engine.process import InProcessEngine
from tokenspeed.llm.async_llm import AsyncLLM
from tokenspeed.llm.engine_client import EngineClient
from tokenspeed.observability.tracing import Tracer
from tokenspeed.server.app import create_app
from tokenspeed.server.served import Patience

MODEL_NAME = "fake-model"


class Loopback:
    """One server; its event loop runs on a thread."""

    def __init__(
        self,
        worker: FakeWorker,
        source: FakeSource,
        server: ServerConfig,
        patience: Patience,
        tracer: Tracer | None = None,
    ) -> None:
        self.worker, self.source = worker, source
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.llm: AsyncLLM = self.run(self._start_llm())
        self.app = create_app(self.llm, server, patience=patience, tracer=tracer)
        config = uvicorn.Config(
            self.app, host="127.0.0.1", port=0, log_config=None, lifespan="off",
            timeout_graceful_shutdown=1,
        )  # fmt: skip
        self._http = uvicorn.Server(config)
        self._serving = asyncio.run_coroutine_threadsafe(self._http._serve(), self._loop)
        wait_until(lambda: self._http.started)
        port = self._http.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.client = httpx.Client(base_url=self.url, timeout=30.0)

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """The result of `work` on the server's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30.0)

    def submits(self) -> list[Submit]:
        """What the engine was asked so far."""
        return [message for message in self.worker.received if isinstance(message, Submit)]

    def cancels(self) -> list[str]:
        """Requests that the engine was told to drop."""
        return [message.request_id for message in self.worker.received if isinstance(message, Cancel)]

    def chat(self, **fields: object) -> httpx.Response:
        """A chat with one short user message and greedy sampling, unless `fields` say otherwise."""
        body = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0, "max_tokens": 8, **fields}
        return self.client.post("/v1/chat/completions", json=body)

    def complete(self, **fields: object) -> httpx.Response:
        """A completion of a short prompt and greedy sampling, unless `fields` say otherwise."""
        body = {"prompt": "ab", "temperature": 0, "max_tokens": 8, **fields}
        return self.client.post("/v1/completions", json=body)

    def close(self) -> None:
        self.client.close()
        self._http.should_exit = True
        with contextlib.suppress(Exception):
            self._serving.result(10.0)
        self.run(self.llm.shutdown())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5.0)
        self._loop.close()

    async def _start_llm(self) -> AsyncLLM:
        config = EngineConfig(model=ModelConfig(model=MODEL_NAME), scheduler=SchedulerConfig(max_num_waiting=4))
        client = await EngineClient.start(lambda: InProcessEngine(self.worker), config)
        return AsyncLLM(config, self.source, byte_tokenizer(), client)


def wait_until(holds: Callable[[], bool], timeout_s: float = 5.0) -> None:
    """Poll until `holds`; fails after timeout_s."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, "it did not come to that in time"
        time.sleep(0.005)


StartLoopback = Callable[..., Loopback]


@pytest.fixture
def start() -> Iterator[StartLoopback]:
    """Starts servers that end with the test."""
    with _starting() as start_one:
        yield start_one


@pytest.fixture(scope="module")
def start_module() -> Iterator[StartLoopback]:
    """Starts servers that end with the tests of the module."""
    with _starting() as start_one:
        yield start_one


@contextlib.contextmanager
def _starting() -> Iterator[StartLoopback]:
    with contextlib.ExitStack() as stack:

        def start_one(
            worker: FakeWorker | None = None,
            source: FakeSource | None = None,
            server: ServerConfig | None = None,
            patience: Patience | None = None,
            tracer: Tracer | None = None,
        ) -> Loopback:
            loopback = Loopback(
                worker or FakeWorker(info=engine_info()),
                source or FakeSource(),
                server or ServerConfig(),
                patience or Patience(),
                tracer,
            )
            stack.callback(loopback.close)
            return loopback

        yield start_one


@pytest.fixture(scope="module")
def shared() -> Iterator[Loopback]:
    """One server for tests that leave no traces. The fake model says a, b, c … at places 0, 1, 2 …"""
    loopback = Loopback(FakeWorker(info=engine_info()), FakeSource(), ServerConfig(), Patience())
    yield loopback
    loopback.close()


def frames(text: str) -> list[str]:
    """The data of each event of a stream."""
    return [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
