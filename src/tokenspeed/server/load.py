# SPDX-License-Identifier: Apache-2.0
"""How busy the engine is, in the numbers that routers weigh. Knows no wire."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from tokenspeed.server.served import ServedLLM

_RATE_WINDOW_S = 1.0


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """At one moment. Used tokens are those that live and held requests hold; what is only cached counts as free.
    gen_throughput: tokens a second, over the last second or so."""

    num_running_reqs: int
    num_waiting_reqs: int
    num_total_reqs: int
    num_used_tokens: int
    max_total_num_tokens: int
    max_running_requests: int
    token_usage: float
    gen_throughput: float
    cache_hit_rate: float
    utilization: float


class LoadMeter:
    """Reads the engine's counters; a rate is the change since an earlier reading."""

    def __init__(self, llm: ServedLLM, now_s: Callable[[], float] = time.monotonic) -> None:
        self._llm = llm
        self._now_s = now_s
        self._since_s, self._num_tokens = now_s(), llm.stats.generated_tokens
        self._rate = 0.0

    @property
    def num_kv_tokens(self) -> int:
        """What the KV pool holds, over all partitions."""
        info = self._llm.info
        return info.num_kv_blocks * info.block_size * self._llm.config.parallel.dp_attention

    def read(self) -> Load:
        """The load now."""
        stats, info = self._llm.stats, self._llm.info
        num_used, num_kv = stats.used_blocks * info.block_size, self.num_kv_tokens
        num_seats = info.max_num_seqs * self._llm.config.parallel.dp_attention
        asked, hit = stats.prefix_query_tokens, stats.prefix_hit_tokens
        return Load(
            num_running_reqs=stats.num_running,
            num_waiting_reqs=stats.num_waiting,
            num_total_reqs=stats.num_running + stats.num_waiting,
            num_used_tokens=num_used,
            max_total_num_tokens=num_kv,
            max_running_requests=num_seats,
            token_usage=num_used / num_kv,
            gen_throughput=self._throughput(),
            cache_hit_rate=hit / asked if asked else 0.0,
            utilization=stats.num_running / num_seats,
        )

    def _throughput(self) -> float:
        now_s, num_tokens = self._now_s(), self._llm.stats.generated_tokens
        passed_s = now_s - self._since_s
        if passed_s >= _RATE_WINDOW_S:
            self._rate = max(num_tokens - self._num_tokens, 0) / passed_s  # an engine started anew counts from 0
            self._since_s, self._num_tokens = now_s, num_tokens
        return self._rate
