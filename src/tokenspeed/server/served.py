# SPDX-License-Identifier: Apache-2.0
"""What the endpoints need of a running model, and what they share. Knows no wire dialect."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from tokenspeed.checkpoints import ModelSource
from tokenspeed.core.config import EngineConfig, ServerConfig
from tokenspeed.core.ipc import CacheChanges, EngineInfo, EngineStats
from tokenspeed.core.request import Retention, SamplingParams
from tokenspeed.llm.input_processor import Prompt, TextCodec
from tokenspeed.llm.outputs import RequestOutput, RequestTimes
from tokenspeed.observability.metrics import Metrics
from tokenspeed.observability.tracing import Tracer
from tokenspeed.server.session_book import SessionBook


class TokenCodec(TextCodec, Protocol):
    """Text to ids and back, and what one token stands for."""

    def token_bytes(self, token_id: int) -> bytes: ...
    def engine_json(self) -> str:
        """A tokenizer.json of what encodes the text; decoding and what surrounds a text are left out."""
        ...


class PromptEncoder(Protocol):
    """Prompts to ids. template_text: the chat template."""

    template_text: str | None

    def reply_opening(self, template_kwargs: Mapping[str, object]) -> str:
        """The end of what is rendered before a reply."""
        ...

    def encode(self, prompt: Prompt) -> list[int]:
        """Raises InvalidRequestError."""
        ...


class OutputStream(Protocol):
    """Outputs as they come; closing it cancels the request. times: what has happened so far."""

    @property
    def num_prompt_tokens(self) -> int: ...

    @property
    def times(self) -> RequestTimes: ...

    def __aiter__(self) -> OutputStream: ...

    async def __anext__(self) -> RequestOutput: ...

    async def aclose(self) -> None: ...

    async def wait_for_text(self) -> str | None:
        """The text that is new, where nothing else is, after waiting for news; it stays new. Else None: iterate."""
        ...

    def take_text(self) -> int:
        """What wait_for_text returned is taken. Returns the number of tokens so far."""
        ...


class ServedLLM(Protocol):
    """A running model, as llm.AsyncLLM is one. last_progress_s: monotonic time of the engine's last sign of life."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def config(self) -> EngineConfig: ...

    @property
    def tokenizer(self) -> TokenCodec: ...

    @property
    def input_processor(self) -> PromptEncoder: ...

    @property
    def source(self) -> ModelSource: ...

    @property
    def stats(self) -> EngineStats: ...

    @property
    def is_alive(self) -> bool: ...

    @property
    def num_restarts(self) -> int: ...

    @property
    def num_live(self) -> int:
        """Sequences that were sent to the engine and have not ended."""
        ...

    @property
    def last_progress_s(self) -> float: ...

    async def submit(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        retain: Retention | None = None,
    ) -> OutputStream:
        """A request that is checked and queued."""
        ...

    def watch_cache(self, on_changes: Callable[[CacheChanges | None], None] | None) -> None:
        """Call with what the prefix cache gains and loses; None ends it."""
        ...

    def release(self, request_id: str) -> None:
        """The pages that a request asked to keep are not waited for."""
        ...


@dataclass(frozen=True, slots=True)
class Patience:
    """ping_s: a stream silent for so long sends a comment. stall_s: an engine with work and without progress for so
    long is unhealthy."""

    ping_s: float = 5.0
    stall_s: float = 120.0


@dataclass(frozen=True, slots=True)
class Served:
    """One served model and how it is served. created: Unix time at which serving began. dialect: the name of the parser
    that reads its replies. sessions: what is remembered of those that it serves. tracer: where spans of
    requests go."""

    llm: ServedLLM
    config: ServerConfig
    model_name: str
    metrics: Metrics
    created: int
    dialect: str
    patience: Patience = Patience()
    sessions: SessionBook = field(default_factory=SessionBook)
    tracer: Tracer | None = None
