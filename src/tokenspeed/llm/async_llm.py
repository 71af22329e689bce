# SPDX-License-Identifier: Apache-2.0
"""AsyncLLM: one model behind an asynchronous interface. Prompts in, streams of outputs out.

Ties the input processor, the engine client and the output processor together. Knows no wire dialect.
"""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import AsyncGenerator, Callable
from typing import Literal

from tokenspeed.checkpoints import ModelSource, open_model
from tokenspeed.core.config import EngineConfig
from tokenspeed.core.errors import EngineDeadError, OverloadedError, TokenizerError
from tokenspeed.core.ipc import EngineInfo, EngineStats
from tokenspeed.core.request import SamplingParams
from tokenspeed.engine.process import Engine, EngineProcess, InProcessEngine
from tokenspeed.llm.engine_client import EngineClient, ProgressFn
from tokenspeed.llm.input_processor import (
    ChatPrompt,
    InputProcessor,
    ProcessedRequest,
    Prompt,
    TextPrompt,
    TokensPrompt,
    default_sampling,
)
from tokenspeed.llm.output_processor import RequestStream
from tokenspeed.llm.outputs import RequestOutput
from tokenspeed.llm.tokenizer import Tokenizer

_INLINE_CHARS_MAX = 16_384
"""Longer prompts are encoded on a thread, so that other streams are not held up."""

EngineKind = Literal["process", "thread"]


class AsyncLLM:
    """A running model. Use `await AsyncLLM.start(config)`; all methods belong to the loop that started it."""

    def __init__(self, config: EngineConfig, source: ModelSource, tokenizer: Tokenizer, client: EngineClient) -> None:
        self.config = config
        self.source = source
        self.tokenizer = tokenizer
        self.input_processor = InputProcessor(source, tokenizer, client.info, config)
        self._client = client
        self._serials = itertools.count()
        self._default_params = SamplingParams(**default_sampling(source))  # type: ignore[arg-type]
        self._encoding = asyncio.Semaphore(1)

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        progress: ProgressFn | None = None,
        *,
        engine: EngineKind = "process",
    ) -> AsyncLLM:
        """Fetch the model, start its engine (a process of its own, or a thread of ours) and wait until it can serve.

        progress(stage, done, total, unit) may be called from another thread. Raises StartError subclasses.
        """
        config.validate()
        source = await asyncio.to_thread(open_model, config.model, progress)
        if source.tokenizer is None:
            raise TokenizerError(
                f"{source.path}: no tokenizer found; put tokenizer.json beside the weights, or use a GGUF file with one"
            )
        tokenizer = await asyncio.to_thread(Tokenizer.from_source, source.tokenizer)
        client = await EngineClient.start(_launcher(config, engine), config, progress)
        try:
            return cls(config, source, tokenizer, client)
        except BaseException:
            await client.stop()
            raise

    @property
    def info(self) -> EngineInfo:
        """What the engine is: device, KV capacity, context length, kernels."""
        return self._client.info

    @property
    def stats(self) -> EngineStats:
        """The engine's counters after its last step."""
        return self._client.stats

    @property
    def is_alive(self) -> bool:
        """False once the engine has ended."""
        return self._client.is_alive

    @property
    def death(self) -> EngineDeadError | None:
        """Why the engine can serve no more."""
        return self._client.death

    @property
    def last_progress_s(self) -> float:
        """time.monotonic() of the engine's last report: after each step and, when idle, every second."""
        return self._client.last_progress_s

    @property
    def num_live(self) -> int:
        """Sequences that the engine works on or queues for us."""
        return self._client.num_live

    @property
    def default_params(self) -> SamplingParams:
        """The model's own sampling defaults."""
        return self._default_params

    async def submit(
        self, prompt: Prompt, params: SamplingParams | None = None, *, request_id: str | None = None, priority: int = 0
    ) -> RequestStream:
        """Check the request and queue it; every refusal is raised here, before the first output. The stream must be
        iterated to its end or closed. Raises RequestError subclasses, OverloadedError, EngineDeadError."""
        self._require_serving()
        request_id = request_id or f"req-{uuid.uuid4().hex}"
        engine_id = f"{request_id}.{next(self._serials)}"  # the engine needs ids that never repeat
        request = await self._process(prompt, params or self._default_params, engine_id, priority)
        self._require_serving()  # encoding may have taken a while
        stream = RequestStream(
            request_id, request, self.tokenizer, finish=self._client.finish, cancel=self._client.cancel
        )
        for sequence in request.sequences:
            self._client.submit(sequence, stream)
        return stream

    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, *, request_id: str | None = None, priority: int = 0
    ) -> AsyncGenerator[RequestOutput, None]:
        """Outputs as they come. Closing the generator, or cancelling the task that iterates it, cancels the request in
        the engine at once. Raises what `submit` raises, at the first iteration."""
        stream = await self.submit(prompt, params, request_id=request_id, priority=priority)
        try:
            async for output in stream:
                yield output
        finally:
            stream.close()

    async def shutdown(self) -> None:
        """End the engine; whoever still waits gets EngineDeadError. Idempotent."""
        await self._client.stop()

    def _require_serving(self) -> None:
        if self._client.death is not None:
            raise EngineDeadError(str(self._client.death))
        limits = self.config.scheduler
        live_max = limits.max_num_waiting + limits.max_num_seqs
        if self.stats.num_waiting >= limits.max_num_waiting or self._client.num_live >= live_max:
            raise OverloadedError(
                f"{limits.max_num_waiting} requests are waiting already; try again later, or raise --max-num-waiting"
            )

    async def _process(
        self, prompt: Prompt, params: SamplingParams, request_id: str, priority: int
    ) -> ProcessedRequest:
        def process() -> ProcessedRequest:
            return self.input_processor.process(prompt, params, request_id=request_id, priority=priority)

        if _num_chars(prompt) <= _INLINE_CHARS_MAX:
            return process()
        async with self._encoding:  # one at a time: tokenizers keep caches
            return await asyncio.to_thread(process)


def _launcher(config: EngineConfig, engine: EngineKind) -> Callable[[], Engine]:
    if engine == "thread":
        return InProcessEngine
    return lambda: EngineProcess.spawn(config)


def _num_chars(prompt: Prompt) -> int:
    match prompt:
        case TextPrompt(text):
            return len(text)
        case ChatPrompt(messages):
            return sum(len(str(message.get("content"))) for message in messages)
        case TokensPrompt():
            return 0
