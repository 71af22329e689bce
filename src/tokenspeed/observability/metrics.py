# SPDX-License-Identifier: Apache-2.0
"""Prometheus metrics in a registry of their own. Each is exported as `tokenspeed:NAME` and, so that existing
dashboards and autoscalers work, as `vllm:NAME`, some also under a name that vLLM had before. Knows counters and
durations; knows no HTTP and no engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from tokenspeed.core.ipc import STEP_TOKEN_BOUNDS, EngineStats
from tokenspeed.observability.gaps import Gaps
from tokenspeed.observability.logging import RequestSummary

PREFIXES = ("tokenspeed", "vllm")
OLD_NAMES = {
    "inter_token_latency_seconds": "time_per_output_token_seconds",
    "kv_cache_usage_perc": "gpu_cache_usage_perc",
}
"""What dashboards of older vLLM releases ask for, by today's name; under the vllm prefix only."""
CONTENT_TYPE = CONTENT_TYPE_LATEST
_LABELS = ("model_name", "engine")
_LATENCY_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 120.0, 300.0, 1200.0)
_TOKEN_LATENCY_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 10.0)
_TOKENS = tuple(float(10**power * digit) for power in range(6) for digit in (1, 2, 5))
_COUNTS = (1.0, 2.0, 5.0, 10.0, 20.0)
_KNOWN_REASONS = {"tool_calls": "stop"}
_REASONS = ("stop", "length", "abort", "error")


@dataclass(frozen=True, slots=True)
class PoolSize:
    """The KV pool: blocks and tokens a block."""

    num_blocks: int
    block_size: int


class Metrics:
    """All metrics of one served model. `read_stats` is called at each scrape and must not block."""

    def __init__(
        self,
        model_name: str,
        pool: PoolSize,
        read_stats: Callable[[], EngineStats],
        engine: str = "0",
        read_restarts: Callable[[], int] = lambda: 0,
    ):
        self._labels = (model_name, engine)
        self._ttft = _histogram("time_to_first_token_seconds", "Arrival to first token", _LATENCY_S)
        gaps = ("inter_token_latency_seconds", "Between tokens")
        self._inter_token = Gaps(*gaps, _LABELS, self._labels, _TOKEN_LATENCY_S)
        self._e2e = _histogram("e2e_request_latency_seconds", "Arrival to end", _LATENCY_S)
        self._queue = _histogram("request_queue_time_seconds", "In the engine, before its first step", _LATENCY_S)
        self._prefill = _histogram("request_prefill_time_seconds", "First step to first token", _LATENCY_S)
        self._decode = _histogram("request_decode_time_seconds", "First token to last", _LATENCY_S)
        self._inference = _histogram("request_inference_time_seconds", "First step to last token", _LATENCY_S)
        self._prompt = _histogram("request_prompt_tokens", "Prompt tokens of a request", _TOKENS)
        self._generated = _histogram("request_generation_tokens", "Generated tokens of a request", _TOKENS)
        self._n = _histogram("request_params_n", "Completions asked for", _COUNTS)
        self._max_tokens = _histogram("request_params_max_tokens", "max_tokens asked for", _TOKENS)
        self._diverged = Counter(
            "prefix_diverged", "Requests whose prompt did not go on from its session's", _LABELS, registry=None
        )
        self._success = Counter(
            "request_success", "Completions by how they ended", (*_LABELS, "finished_reason"), registry=None
        )
        self._diverged.labels(*self._labels)  # 0 is a figure too
        for reason in _REASONS:
            self._success.labels(*self._labels, reason)
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(_BothNames(self._request_metrics()))
        self.registry.register(_BothNames([_EngineGauges(self._labels, pool, read_stats, read_restarts)]))

    def observe_start(self, n: int, max_tokens: int | None) -> None:
        """A request came in."""
        self._n.labels(*self._labels).observe(n)
        if max_tokens is not None:
            self._max_tokens.labels(*self._labels).observe(max_tokens)

    def observe_first_token(self, ttft_s: float) -> None:
        """The first token of a request came ttft_s after its arrival."""
        self._ttft.labels(*self._labels).observe(ttft_s)

    def observe_tokens(self, num_tokens: int, elapsed_s: float) -> None:
        """num_tokens more tokens of one completion came elapsed_s after the ones before."""
        self._inter_token.observe(elapsed_s / num_tokens, num_tokens)

    def observe_end(self, summary: RequestSummary) -> None:
        """A request ended, in whatever way."""
        labels = self._labels
        self._e2e.labels(*labels).observe(summary.total_s)
        self._prompt.labels(*labels).observe(summary.num_prompt)
        self._generated.labels(*labels).observe(summary.num_generated)
        if summary.queue_s is not None:
            self._queue.labels(*labels).observe(summary.queue_s)
        if summary.prefill_s is not None:
            self._prefill.labels(*labels).observe(summary.prefill_s)
        if summary.decode_s is not None:
            self._decode.labels(*labels).observe(summary.decode_s)
        if summary.prefill_s is not None and summary.decode_s is not None:
            self._inference.labels(*labels).observe(summary.prefill_s + summary.decode_s)
        if summary.prefix is not None:
            self._diverged.labels(*labels).inc()
        for reason in summary.finish_reasons:
            self._success.labels(*labels, _KNOWN_REASONS.get(reason, reason)).inc()

    def render(self) -> bytes:
        """The exposition text, see CONTENT_TYPE."""
        return generate_latest(self.registry)

    def _request_metrics(self) -> list[Collector]:
        return [
            self._ttft, self._inter_token, self._e2e, self._queue, self._prefill, self._decode, self._inference,
            self._prompt, self._generated, self._n, self._max_tokens, self._diverged, self._success,
        ]  # fmt: skip


class _BothNames(Collector):
    """Exports what `sources` collect once under each prefix."""

    def __init__(self, sources: Sequence[Collector]) -> None:
        self._sources = sources

    def collect(self) -> Iterator[Metric]:
        for source in self._sources:
            for metric in source.collect():
                for prefix in PREFIXES:
                    yield _renamed(metric, f"{prefix}:{metric.name}")
                if metric.name in OLD_NAMES:
                    yield _renamed(metric, f"vllm:{OLD_NAMES[metric.name]}")


class _EngineGauges(Collector):
    """The engine's counters and gauges, read at the scrape."""

    def __init__(
        self,
        labels: tuple[str, str],
        pool: PoolSize,
        read_stats: Callable[[], EngineStats],
        read_restarts: Callable[[], int],
    ) -> None:
        self._labels, self._pool, self._read_stats, self._read_restarts = labels, pool, read_stats, read_restarts

    def collect(self) -> Iterator[Metric]:
        stats = self._read_stats()
        usage = stats.used_blocks / max(self._pool.num_blocks, 1)
        yield self._gauge("num_requests_running", "Requests that run", stats.num_running)
        yield self._gauge("num_requests_waiting", "Requests that wait", stats.num_waiting)
        yield self._gauge("num_requests_held", "Ended requests whose blocks wait for their session", stats.num_held)
        yield self._gauge("kv_cache_usage_perc", "Share of the KV pool that live and held requests hold, 0 to 1", usage)
        yield self._gauge("kv_cache_used_blocks", "Blocks that live and held requests hold", stats.used_blocks)
        yield self._gauge("kv_cache_cached_blocks", "Blocks kept for prefix hits", stats.cached_blocks)
        yield self._gauge("kv_cache_host_used_blocks", "Blocks kept in the host tier", stats.host_used_blocks)
        yield self._gauge("kv_cache_host_total_blocks", "Blocks that the host tier holds", stats.host_total_blocks)
        yield self._counter("kv_cache_stored_blocks", "Blocks copied to the host tier", stats.stored_blocks)
        yield self._counter("kv_cache_loaded_tokens", "Prompt tokens from the host tier", stats.loaded_tokens)
        yield self._counter("prefix_cache_queries", "Prompt tokens looked up", stats.prefix_query_tokens)
        yield self._counter("prefix_cache_hits", "Prompt tokens found in the cache", stats.prefix_hit_tokens)
        yield self._counter("prompt_tokens", "Prompt tokens taken in", stats.prompt_tokens)
        yield self._counter("generation_tokens", "Tokens generated", stats.generated_tokens)
        yield self._counter("num_preemptions", "Requests put back to the queue", stats.num_preemptions)
        yield self._counter("num_steps", "Engine steps", stats.num_steps)
        yield self._counter("engine_restarts", "Engines started in place of a dead one", self._read_restarts())
        yield self._step_sizes(stats)
        info = GaugeMetricFamily("cache_config_info", "The KV pool", labels=(*_LABELS, "block_size", "num_gpu_blocks"))
        info.add_metric((*self._labels, str(self._pool.block_size), str(self._pool.num_blocks)), 1)
        yield info

    def _step_sizes(self, stats: EngineStats) -> Metric:
        family = HistogramMetricFamily("iteration_tokens_total", "Tokens that a step computes", labels=_LABELS)
        counts = stats.step_tokens or (0,) * (len(STEP_TOKEN_BOUNDS) + 1)
        bounds = (*(str(float(bound)) for bound in STEP_TOKEN_BOUNDS), "+Inf")
        buckets = list(zip(bounds, accumulate(counts), strict=True))
        family.add_metric(self._labels, buckets, stats.num_step_tokens)
        return family

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=_LABELS)
        family.add_metric(self._labels, value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=_LABELS)
        family.add_metric(self._labels, value)
        return family


def _histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
    return Histogram(name, text, _LABELS, buckets=buckets, registry=None)


def _renamed(metric: Metric, name: str) -> Metric:
    copy = Metric(name, metric.documentation, metric.type, metric.unit)
    copy.samples = [
        Sample(
            name + sample.name.removeprefix(metric.name), sample.labels, sample.value, sample.timestamp, sample.exemplar
        )
        for sample in metric.samples
        if not sample.name.endswith("_created")
    ]
    return copy
