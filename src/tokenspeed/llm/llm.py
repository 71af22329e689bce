# SPDX-License-Identifier: Apache-2.0
"""LLM: offline batches from a plain script or a notebook. The engine runs on a thread of this process.

A private event loop on its own thread drives AsyncLLM, so that a caller with a running loop is served as well. Knows
nothing beyond AsyncLLM.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import difflib
import threading
import weakref
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self, TypeVar

import msgspec
from tqdm import tqdm

from tokenspeed.core.config import (
    DEFAULT_MODEL,
    CacheConfig,
    DeviceConfig,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
)
from tokenspeed.core.errors import ConfigError, InvalidRequestError, TokenSpeedError
from tokenspeed.core.ipc import EngineInfo
from tokenspeed.core.request import Retention, SamplingParams
from tokenspeed.llm.async_llm import AsyncLLM, EngineKind
from tokenspeed.llm.engine_client import ProgressFn
from tokenspeed.llm.input_processor import ChatPrompt, Prompt, TextPrompt, TokensPrompt
from tokenspeed.llm.outputs import RequestOutput
from tokenspeed.llm.tokenizer import Tokenizer

T = TypeVar("T")
Message = Mapping[str, object]
PromptLike = str | Prompt | Sequence[int]

_PARTS: Mapping[str, type[msgspec.Struct]] = {
    "model": ModelConfig,
    "cache": CacheConfig,
    "scheduler": SchedulerConfig,
    "device": DeviceConfig,
    "parallel": ParallelConfig,
}


def engine_config(**options: object) -> EngineConfig:
    """A configuration from flat options: the fields of ModelConfig, CacheConfig, SchedulerConfig, DeviceConfig and
    ParallelConfig, and debug. Raises ConfigError for an unknown name, a wrong type or a value out of range."""
    options = dict(options)
    debug = options.pop("debug", False)
    parts: dict[str, dict[str, object]] = {part: {} for part in _PARTS}
    for name, value in options.items():
        parts[_part_of(name)][name] = value
    try:
        return msgspec.convert({**parts, "debug": debug}, EngineConfig).validate()
    except msgspec.ValidationError as error:
        raise ConfigError(f"wrong option: {error}") from None


def _part_of(option: str) -> str:
    names: list[str] = []
    for part, kind in _PARTS.items():
        names.extend(kind.__struct_fields__)
        if option in kind.__struct_fields__:
            return part
    near = difflib.get_close_matches(option, names, n=1)
    hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(names)}, debug"
    raise ConfigError(f"unknown option {option!r}: {hint}")


class LLM:
    """A model for offline use. Blocking; may be used from several threads. Close it, or use it in a `with` statement.

    with LLM("smollm2-135m") as llm:
        print(llm.generate("The capital of France is")[0].outputs[0].text)
    """

    def __init__(
        self,
        model: str = DEFAULT_MODEL,
        *,
        progress: ProgressFn | None = None,
        engine: EngineKind = "thread",
        **options: object,
    ) -> None:
        config = engine_config(model=model, **options)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tokenspeed-llm", daemon=True)
        self._thread.start()
        self._stop_loop = weakref.finalize(self, _stop_loop, self._loop, self._thread)
        try:
            self._llm = self._run(AsyncLLM.start(config, progress, engine=engine))
        except BaseException:
            self._stop_loop()
            raise
        # Runs at interpreter exit too, before the daemon threads are torn down.
        self._finalizer = weakref.finalize(self, _shut_down, self._llm, self._loop, self._thread)

    @property
    def info(self) -> EngineInfo:
        """What the engine is: device, KV capacity, context length, kernels."""
        return self._llm.info

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._llm.tokenizer

    def generate(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        retain: Retention | Sequence[Retention | None] | None = None,
        timeout_s: float | None = None,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Whole outputs, one a prompt, in order. A prompt is text, token ids or one of llm.input_processor's types;
        params are one for all, one for each, or the model's defaults; retain is one for each. Raises RequestError
        subclasses: one wrong prompt refuses the batch. For retain and timeout_s see AsyncLLM.submit."""
        return self._generate(self._works(_prompts(prompts), params, retain, timeout_s), use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Message] | None = None,
        template_kwargs: Mapping[str, object] | None = None,
        retain: Retention | Sequence[Retention | None] | None = None,
        timeout_s: float | None = None,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """As generate, for one conversation or a list of them."""
        prompts = [
            ChatPrompt(conversation, tools=tools, template_kwargs=template_kwargs or {})
            for conversation in _conversations(messages)
        ]
        return self._generate(self._works(prompts, params, retain, timeout_s), use_tqdm)

    def close(self) -> None:
        """End the engine. Idempotent."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _works(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        retain: Retention | Sequence[Retention | None] | None,
        timeout_s: float | None,
    ) -> list[_Work]:
        each_params = _params_for_each(params, len(prompts), self._llm.default_params)
        each_retain = _retain_for_each(retain, len(prompts))
        return [_Work(*each, timeout_s) for each in zip(prompts, each_params, each_retain, strict=True)]

    def _generate(self, works: Sequence[_Work], use_tqdm: bool) -> list[RequestOutput]:
        with tqdm(total=len(works), desc="Prompts", unit="prompt", disable=not use_tqdm) as bar:
            return self._run(_generate_all(self._llm, works, bar))

    def _run(self, work: Coroutine[object, object, T]) -> T:
        """Run on the private loop and wait; Ctrl-C cancels the work there."""
        if self._loop.is_closed():
            work.close()
            raise ConfigError("this LLM has been closed; make a new one")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise


@dataclass(frozen=True, slots=True)
class _Work:
    """One prompt of a batch and how it is served."""

    prompt: Prompt
    params: SamplingParams
    retain: Retention | None
    timeout_s: float | None


async def _generate_all(llm: AsyncLLM, works: Sequence[_Work], bar: tqdm[None]) -> list[RequestOutput]:
    """All prompts, as many at a time as the queue takes. The first error cancels the rest."""
    n_max = max((work.params.n for work in works), default=1)
    room = asyncio.Semaphore(max(1, llm.config.scheduler.max_num_waiting // n_max))

    async def one(work: _Work) -> RequestOutput:
        async with room:
            output = await _whole(llm, work)
        bar.update(1)
        return output

    tasks = [asyncio.create_task(one(work)) for work in works]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _whole(llm: AsyncLLM, work: _Work) -> RequestOutput:
    stream = await llm.submit(work.prompt, work.params, retain=work.retain, timeout_s=work.timeout_s, tells_at_end=True)
    try:
        return await stream.whole()
    finally:
        stream.close()


def _prompts(given: PromptLike | Sequence[PromptLike]) -> list[Prompt]:
    """A list of prompts from one or many. A list of ints is one prompt of token ids."""
    if isinstance(given, (str, TextPrompt, TokensPrompt, ChatPrompt)):
        return [_prompt(given)]
    if given and all(isinstance(item, int) for item in given):
        return [TokensPrompt(given)]  # type: ignore[arg-type]
    return [_prompt(item) for item in given]  # type: ignore[arg-type]


def _prompt(given: PromptLike) -> Prompt:
    if isinstance(given, str):
        return TextPrompt(given)
    if isinstance(given, (TextPrompt, TokensPrompt, ChatPrompt)):
        return given
    return TokensPrompt(given)


def _conversations(messages: Sequence[Message] | Sequence[Sequence[Message]]) -> list[Sequence[Message]]:
    if messages and isinstance(messages[0], Mapping):
        return [messages]  # type: ignore[list-item]
    return list(messages)  # type: ignore[arg-type]


def _params_for_each(
    params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int, default: SamplingParams
) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or default] * num_prompts
    if len(params) != num_prompts:
        raise InvalidRequestError(
            f"{len(params)} params for {num_prompts} prompts; give one, or one for each", "params"
        )
    return list(params)


def _retain_for_each(retain: Retention | Sequence[Retention | None] | None, num_prompts: int) -> list[Retention | None]:
    """A session has one turn at a time: one retention is for one prompt."""
    if retain is None:
        return [None] * num_prompts
    each: list[Retention | None] = [retain] if isinstance(retain, Retention) else list(retain)
    if len(each) != num_prompts:
        raise InvalidRequestError(f"{len(each)} retentions for {num_prompts} prompts; give one for each", "retain")
    return each


def _shut_down(llm: AsyncLLM, loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    if loop.is_running():
        stopping = asyncio.run_coroutine_threadsafe(llm.shutdown(), loop)
        with contextlib.suppress(concurrent.futures.TimeoutError, TokenSpeedError):
            stopping.result(timeout=30.0)
    _stop_loop(loop, thread)


def _stop_loop(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    if loop.is_running():
        loop.call_soon_threadsafe(loop.stop)
        thread.join(5.0)
    if not loop.is_closed() and not loop.is_running():
        loop.close()
