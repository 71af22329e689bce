# SPDX-License-Identifier: Apache-2.0
"""Requests to an engine and when their tokens came: a prompt of token ids in, times and token ids out.

One level below text: nothing is tokenised or detokenised, so that folders with nothing but a configuration can be
measured. Times are those of a client: they include the way from the engine's process and the event loop's turn.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass

from tokenspeed.core.errors import TokenSpeedError
from tokenspeed.core.request import EngineRequest, FinishReason, SamplingParams, SequenceUpdate, pack_ids
from tokenspeed.llm.engine_client import EngineClient


@dataclass(frozen=True, slots=True)
class Arrival:
    """So many tokens, in seconds of time.perf_counter()."""

    at_s: float
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Timing:
    """One request. submitted_s as in Arrival. cached_len: tokens of the prompt that were in the prefix cache."""

    submitted_s: float
    arrivals: tuple[Arrival, ...]
    token_ids: tuple[int, ...]
    cached_len: int

    @property
    def ttft_s(self) -> float:
        """To the first token."""
        return self.arrivals[0].at_s - self.submitted_s

    @property
    def end_s(self) -> float:
        """When the last token came."""
        return self.arrivals[-1].at_s

    @property
    def decode_tokens_s(self) -> float:
        """Tokens a second after the first arrival."""
        num_tokens = len(self.token_ids) - self.arrivals[0].num_tokens
        return num_tokens / (self.end_s - self.arrivals[0].at_s)


class Streams:
    """Requests to one engine, each with an id of its own."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._serials = itertools.count()

    async def run(self, prompt: Sequence[int], num_tokens: int, temperature: float = 1.0) -> Timing:
        """Generate exactly num_tokens. Raises TokenSpeedError when the request fails."""
        serial = next(self._serials)
        sampling = SamplingParams(max_tokens=num_tokens, temperature=temperature, seed=serial, ignore_eos=True)
        request = EngineRequest(request_id=f"bench-{serial}", token_ids=pack_ids(prompt), sampling=sampling)
        sink = _Sink()
        submitted_s = time.perf_counter()
        self._client.submit(request, sink)
        arrivals: list[Arrival] = []
        token_ids: list[int] = []
        cached_len, reason = 0, None
        while reason is None:
            item = await sink.queue.get()
            if isinstance(item, TokenSpeedError):
                raise item
            new_ids, reason = (item.token_ids, item.finish_reason) if isinstance(item, SequenceUpdate) else (item, None)
            if isinstance(item, SequenceUpdate):
                cached_len = max(cached_len, item.cached_len)
            if len(new_ids):
                arrivals.append(Arrival(time.perf_counter(), len(new_ids)))
                token_ids.extend(new_ids)
        if reason is not FinishReason.LENGTH or len(token_ids) != num_tokens:
            raise TokenSpeedError(f"a request ended after {len(token_ids)} of {num_tokens} tokens: {reason}")
        return Timing(submitted_s, tuple(arrivals), tuple(token_ids), cached_len)


class _Sink:
    """Hands what comes to the task that waits."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[SequenceUpdate | Sequence[int] | TokenSpeedError] = asyncio.Queue()

    def push(self, update: SequenceUpdate) -> None:
        self.queue.put_nowait(update)

    def push_tokens(self, request_id: str, token_ids: Sequence[int]) -> None:
        del request_id
        self.queue.put_nowait(token_ids)

    def fail(self, error: TokenSpeedError) -> None:
        self.queue.put_nowait(error)
