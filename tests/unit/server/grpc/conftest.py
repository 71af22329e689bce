# SPDX-License-Identifier: Apache-2.0
"""A real gRPC server on loopback over the real AsyncLLM, with a fake engine behind it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import grpc
import pytest
from smg_grpc_proto import tokenspeed_scheduler_pb2 as pb2
from smg_grpc_proto import tokenspeed_scheduler_pb2_grpc as pb2_grpc

from fakes import FakeSource, FakeWorker, byte_tokenizer
from tokenspeed.core.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, ServerConfig
from tokenspeed.core.ipc import Cancel, Submit
from tokenspeed.engine.process import InProcessEngine
from tokenspeed.llm.async_llm import AsyncLLM
from tokenspeed.llm.engine_client import EngineClient
from tokenspeed.server.app import create_app
from tokenspeed.server.grpc.listener import GrpcListener

MODEL_NAME = "fake-model"


class Worker:
    """One server and a client of it; the server's event loop runs on a thread. cache: the engine's."""

    def __init__(self, engine: FakeWorker, source: FakeSource, server: ServerConfig, cache: CacheConfig) -> None:
        self.engine = engine
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.llm, self.listener = self.run(self._start(source, server, cache))
        self.channel = grpc.insecure_channel(f"127.0.0.1:{self.listener.port}")
        self.stub = pb2_grpc.TokenSpeedSchedulerStub(self.channel)

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """The result of `work` on the server's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30.0)

    def generate(self, prompt: str = "hi", *, stream: bool = False, sampling: Any = None, **fields: Any) -> Any:
        """The call: greedy, of at most eight tokens unless `sampling` says otherwise."""
        params = pb2.SamplingParams(**{"temperature": 0.0, "max_new_tokens": 8, **(sampling or {})})
        tokenized = pb2.TokenizedInput(input_ids=list(prompt.encode()), original_text=prompt)
        fields = {"request_id": "r", "tokenized": tokenized, **fields}
        return self.stub.Generate(pb2.GenerateRequest(sampling_params=params, stream=stream, **fields), timeout=30)

    def complete(self, prompt: str = "hi", **fields: Any) -> Any:
        """The one last message of a call that does not stream."""
        (answer,) = self.generate(prompt, **fields)
        assert answer.request_id == "r"
        return answer.complete

    def submits(self) -> list[Submit]:
        """What the engine was asked so far."""
        return [message for message in self.engine.received if isinstance(message, Submit)]

    def cancels(self) -> list[str]:
        """Requests that the engine was told to drop."""
        return [message.request_id for message in self.engine.received if isinstance(message, Cancel)]

    def close(self) -> None:
        self.channel.close()
        self.run(self.listener.stop(0.1))
        self.run(self.llm.shutdown())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5.0)
        self._loop.close()

    async def _start(
        self, source: FakeSource, server: ServerConfig, cache: CacheConfig
    ) -> tuple[AsyncLLM, GrpcListener]:
        model, limits = ModelConfig(model=MODEL_NAME), SchedulerConfig(max_num_waiting=4)
        config = EngineConfig(model=model, scheduler=limits, cache=cache)
        client = await EngineClient.start(lambda: InProcessEngine(self.engine), config)
        llm = AsyncLLM(config, source, byte_tokenizer(), client)
        served = create_app(llm, server).state.served
        return llm, await GrpcListener.start(served, "127.0.0.1", 0)


StartWorker = Callable[..., Worker]


@pytest.fixture
def start_worker() -> Iterator[StartWorker]:
    """Starts servers that end with the test."""
    with contextlib.ExitStack() as stack:

        def start_one(
            engine: FakeWorker | None = None,
            source: FakeSource | None = None,
            server: ServerConfig | None = None,
            cache: CacheConfig | None = None,
        ) -> Worker:
            worker = Worker(
                engine or FakeWorker(),
                source or FakeSource(),
                server or ServerConfig(),
                cache or CacheConfig(events=True),
            )
            stack.callback(worker.close)
            return worker

        yield start_one


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    """One server for tests that leave no traces. The fake model says a, b, c … at places 0, 1, 2 …"""
    shared = Worker(FakeWorker(), FakeSource(), ServerConfig(), CacheConfig(events=True))
    yield shared
    shared.close()
