# SPDX-License-Identifier: Apache-2.0
"""AsyncLLM: one model behind an asynchronous interface. Prompts in, streams of outputs out.

Ties the input processor, the engine client and the output processor together. Knows no wire dialect.
"""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import AsyncGenerator, Callable
from functools import partial
from typing import Literal

import msgspec

from tokenspeed.checkpoints import ModelSource, open_model
from tokenspeed.core.config import EngineConfig
from tokenspeed.core.errors import EngineDeadError, OverloadedError, StartError, TokenizerError
from tokenspeed.core.ipc import NUM_RETAINED_MAX, CacheChanges, EngineInfo, EngineStats, Vocabulary
from tokenspeed.core.request import Retention, SamplingParams
from tokenspeed.engine.process import Engine, EngineProcess, InProcessEngine
from tokenspeed.llm.engine_client import EngineClient, ProgressFn
from tokenspeed.llm.grammars import vocabulary_of
from tokenspeed.llm.input_processor import (
    ChatPrompt,
    InputProcessor,
    ProcessedRequest,
    Prompt,
    TextPrompt,
    TokensPrompt,
    default_sampling,
    given_template,
)
from tokenspeed.llm.output_processor import RequestStream
from tokenspeed.llm.outputs import RequestOutput
from tokenspeed.llm.retention import checked_seconds
from tokenspeed.llm.tokenizer import Tokenizer

_INLINE_CHARS_MAX = 16_384
"""Longer prompts are encoded on a thread, so that other streams are not held up."""

EngineKind = Literal["process", "thread"]
Launch = Callable[[], Engine]
"""Gives an engine that has begun."""


class AsyncLLM:
    """A running model. Use `await AsyncLLM.start(config)`; all methods belong to the loop that started it."""

    def __init__(self, config: EngineConfig, source: ModelSource, tokenizer: Tokenizer, client: EngineClient) -> None:
        self.config = config
        self.source = source
        self.tokenizer = tokenizer
        self.input_processor = InputProcessor(source, tokenizer, client.info, config)
        self._client = client
        self._launch: EngineKind = "process"
        self._num_restarts = 0
        self._serials = itertools.count()
        self._retained: dict[str, str] = {}
        self._on_cache: Callable[[CacheChanges | None], None] | None = None
        self._default_params = SamplingParams(**default_sampling(source))  # type: ignore[arg-type]
        self._encoding = asyncio.Semaphore(1)
        self._preparing = asyncio.Lock()
        self._vocabulary: Vocabulary | None = None

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        progress: ProgressFn | None = None,
        *,
        engine: EngineKind = "process",
        launch: Launch | None = None,
    ) -> AsyncLLM:
        """Fetch the model, start its engine (a process of its own, or a thread of ours) and wait until it can serve.
        launch: gives the first engine, where its process began ahead.

        progress(stage, done, total, unit) may be called from another thread. Raises StartError subclasses.
        """
        config.validate()
        given_template(config)  # before anything is loaded
        source = await asyncio.to_thread(open_model, config.model, progress)
        building = asyncio.create_task(asyncio.to_thread(_tokenizer_of, source))
        starting = asyncio.create_task(EngineClient.start(launch or _launcher(config, engine), config, progress))
        tokenizer, client = await _side_by_side(building, starting)
        try:
            llm = cls(config, source, tokenizer, client)
            llm._launch = engine
            return llm
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

    async def wait_death(self) -> EngineDeadError:
        """Why the engine can serve no more, once that is so."""
        return await self._client.wait_death()

    @property
    def num_restarts(self) -> int:
        """Engines that were started in place of one that had died."""
        return self._num_restarts

    @property
    def last_progress_s(self) -> float:
        """time.monotonic() of the engine's last report: soon after each step and, when idle, every second."""
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
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        retain: Retention | None = None,
        timeout_s: float | None = None,
        tells_at_end: bool = False,
    ) -> RequestStream:
        """Check the request and queue it; every refusal is raised here, before the first output. The stream must be
        iterated to its end or closed. Raises RequestError subclasses, OverloadedError, EngineDeadError.

        retain: a request that ends well keeps its pages for the session's next turn; of n sequences the first does.
        timeout_s: so long after it was queued the request ends with an error, in whatever state it is.
        tells_at_end: tokens after the first may come together, at the latest at the end: for RequestStream.whole.
        """
        self._require_serving()
        request_id = request_id or f"req-{uuid.uuid4().hex}"
        process = partial(
            self.input_processor.process,
            prompt,
            params or self._default_params,
            request_id=f"{request_id}.{next(self._serials)}",  # the engine needs ids that never repeat
            priority=priority,
            retain=retain,
            timeout_s=timeout_s,
            tells_at_end=tells_at_end,
        )
        has_grammar = params is not None and params.grammar is not None
        request = await self._process(prompt, process, inline=not has_grammar)
        if request.params.grammar is not None:
            await self.prepare_grammars()
        self._require_serving(len(request.sequences))  # encoding may have taken a while
        if retain is not None:
            self._note_retained(request_id, request.sequences[0].request_id)
        stream = RequestStream(
            request_id, request, self.tokenizer, finish=self._client.finish, cancel=self._client.cancel
        )
        for sequence in request.sequences:
            self._client.submit(sequence, stream)
        return stream

    async def prepare_grammars(self) -> None:
        """Tell the engine what grammars need; the first request that has one does it otherwise, and waits. Raises
        EngineDeadError."""
        if self._client.knows_vocabulary:
            return
        async with self._preparing:
            if self._vocabulary is None:
                eos_ids = self.input_processor.eos_ids
                self._vocabulary = await asyncio.to_thread(vocabulary_of, self.tokenizer, eos_ids)
            self._client.know(self._vocabulary)

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        retain: Retention | None = None,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Outputs as they come. Closing the generator, or cancelling the task that iterates it, cancels the request in
        the engine at once. Takes what `submit` takes and raises what it raises, at the first iteration."""
        stream = await self.submit(
            prompt, params, request_id=request_id, priority=priority, retain=retain, timeout_s=timeout_s
        )
        try:
            async for output in stream:
                yield output
        finally:
            stream.close()

    def retain(self, request_id: str, ttl_s: float) -> None:
        """Keep the pages of a request that was submitted with `retain` for ttl_s seconds from now, in place of its
        own ttl_s: before its end or after it. A request whose pages have gone is left alone. Never waits."""
        ttl_s = checked_seconds(ttl_s, "ttl_s")
        engine_id = self._retained.get(request_id)
        if engine_id is not None:
            self._client.retain(engine_id, ttl_s)

    def release(self, request_id: str) -> None:
        """Let go of the pages of a request that was submitted with `retain`: the session will not go on from it. They
        may still be found through the prefix cache, while it has room for them. Never waits."""
        engine_id = self._retained.pop(request_id, None)
        if engine_id is not None:
            self._client.release(engine_id)

    def watch_cache(self, on_changes: Callable[[CacheChanges | None], None] | None) -> None:
        """Call with what the prefix cache gains and loses from now on; the first message comes soon and is empty. None
        to it says that all has gone, with its engine. None for it ends the watch. The configuration of the cache must
        have events."""
        assert self.config.cache.events, "the engine was started without cache events"
        self._on_cache = on_changes
        self._client.watch_cache(on_changes)

    async def restart(self) -> None:
        """Start an engine in place of the one that has died, of the same size whatever memory is free now; what that
        one ran, held or had cached is lost. Raises the StartError that the new one meets."""
        await self._client.bury()
        config = _same_size(self.config, self.info)
        client = await EngineClient.start(_launcher(config, self._launch), config)
        if _size(client.info) != _size(self.info):
            await client.stop()
            raise StartError(f"the engine came back as another: {_size(client.info)} instead of {_size(self.info)}")
        self._client = client
        self._retained.clear()
        self._num_restarts += 1
        if self._on_cache is not None:
            self._on_cache(None)
            client.watch_cache(self._on_cache)

    def tell_stacks(self) -> None:
        """Let the engine's process write the stacks of its threads to stderr, also where it is stuck."""
        self._client.tell_stacks()

    async def shutdown(self, reason: str = "the engine has been shut down") -> None:
        """End the engine; whoever still waits gets EngineDeadError, with the reason. Idempotent."""
        await self._client.stop(reason)

    def _require_serving(self, num_new: int = 1) -> None:
        if self._client.death is not None:
            raise EngineDeadError(str(self._client.death), self._client.death.retry_after_s)
        limits = self.config.scheduler
        live_max = limits.max_num_waiting + limits.max_num_seqs
        if self.stats.num_waiting >= limits.max_num_waiting or self._client.num_live + num_new > live_max:
            raise OverloadedError(
                f"{limits.max_num_waiting} requests are waiting already; try again later, or raise --max-num-waiting"
            )

    def _note_retained(self, request_id: str, engine_id: str) -> None:
        """As many ids as the engine remembers, the oldest go first."""
        self._retained.pop(request_id, None)
        self._retained[request_id] = engine_id
        while len(self._retained) > NUM_RETAINED_MAX:
            del self._retained[next(iter(self._retained))]

    async def _process(
        self, prompt: Prompt, process: Callable[[], ProcessedRequest], *, inline: bool
    ) -> ProcessedRequest:
        if inline and _num_chars(prompt) <= _INLINE_CHARS_MAX:
            return process()
        async with self._encoding:  # one at a time: tokenizers keep caches
            return await asyncio.to_thread(process)


def _launcher(config: EngineConfig, engine: EngineKind) -> Launch:
    if engine == "thread" and config.parallel.num_ranks == 1:  # one that lost a rank has to be ended from outside
        return InProcessEngine
    return lambda: EngineProcess.spawn(config)


def _tokenizer_of(source: ModelSource) -> Tokenizer:
    """Reads it too, which for a large vocabulary takes as long as opening a model does."""
    if source.tokenizer is None:
        raise TokenizerError(
            f"{source.path}: no tokenizer found; put tokenizer.json beside the weights, or use a GGUF file with one"
        )
    return Tokenizer.from_source(source.tokenizer)


async def _side_by_side(
    building: asyncio.Task[Tokenizer], starting: asyncio.Task[EngineClient]
) -> tuple[Tokenizer, EngineClient]:
    """What both come to: either takes seconds. What goes wrong with one, or here, ends the other."""
    try:
        return await asyncio.gather(building, starting)
    except BaseException:
        building.cancel()
        starting.cancel()
        [client] = await asyncio.gather(starting, return_exceptions=True)
        if isinstance(client, EngineClient):
            await client.stop()
        raise


def _same_size(config: EngineConfig, info: EngineInfo) -> EngineConfig:
    """What was measured once stays as it was: others have been told, and requests checked against it."""
    cache = msgspec.structs.replace(config.cache, kv_tokens=info.num_kv_blocks * info.block_size)
    scheduler = msgspec.structs.replace(config.scheduler, max_num_batched_tokens=info.max_num_batched_tokens)
    return msgspec.structs.replace(config, cache=cache, scheduler=scheduler)


def _size(info: EngineInfo) -> tuple[int, ...]:
    """KV blocks, tokens of a block, context length and vocabulary."""
    return info.num_kv_blocks, info.block_size, info.max_model_len, info.vocab_size


def _num_chars(prompt: Prompt) -> int:
    match prompt:
        case TextPrompt(text):
            return len(text)
        case ChatPrompt(messages):
            return sum(len(str(message.get("content"))) for message in messages)
        case TokensPrompt():
            return 0
