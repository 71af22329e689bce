# SPDX-License-Identifier: Apache-2.0
"""The face without HTTP: a program without an event loop of its own streams answers from a running model.

Knows no terminal, no arguments and no wire dialect.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import Future
from types import TracebackType
from typing import Any, TypeVar

from tokenspeed.core.config import EngineConfig
from tokenspeed.core.request import SamplingParams
from tokenspeed.llm.async_llm import AsyncLLM
from tokenspeed.llm.input_processor import Prompt
from tokenspeed.llm.outputs import RequestOutput

T = TypeVar("T")
ProgressFn = Callable[[str, int, int, str], None]


class StreamingLLM:
    """A running model whose outputs are iterated. To be used as a context manager; one thread at a time."""

    def __init__(self, config: EngineConfig, progress: ProgressFn | None = None) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="llm", daemon=True)
        self._thread.start()
        try:
            self.llm = self._run(AsyncLLM.start(config, progress))
        except BaseException:
            self._end_loop()
            raise

    def __enter__(self) -> StreamingLLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def stream(self, prompt: Prompt, params: SamplingParams) -> Generator[RequestOutput, None, None]:
        """Outputs as they come. Closing the generator, or an interrupt while it waits, cancels the request."""
        outputs: queue.Queue[RequestOutput | None] = queue.Queue()
        pump = asyncio.run_coroutine_threadsafe(self._pump(prompt, params, outputs), self._loop)
        try:
            while (output := outputs.get()) is not None:
                yield output
            pump.result()
        finally:
            pump.cancel()

    def close(self) -> None:
        """End the engine and the loop."""
        self._run(self.llm.shutdown())
        self._end_loop()

    async def _pump(self, prompt: Prompt, params: SamplingParams, outputs: queue.Queue[RequestOutput | None]) -> None:
        try:
            async for output in self.llm.generate(prompt, params):
                outputs.put(output)
        finally:
            outputs.put(None)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        future: Future[T] = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _end_loop(self) -> None:
        asyncio.run_coroutine_threadsafe(_end_tasks(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _end_tasks() -> None:
    """Cancel what still runs, so that nothing is left behind when the loop stops."""
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
