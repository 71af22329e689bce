# SPDX-License-Identifier: Apache-2.0
"""Metrics: names that dashboards know, values that are what happened."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from tokenspeed.core.ipc import EngineStats
from tokenspeed.observability.logging import RequestSummary
from tokenspeed.observability.metrics import Metrics, PoolSize

CONTRACT = (
    "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "time_to_first_token_seconds",
    "inter_token_latency_seconds", "e2e_request_latency_seconds", "prefix_cache_queries", "prefix_cache_hits",
    "prompt_tokens", "generation_tokens", "num_preemptions", "request_success", "request_prompt_tokens",
    "request_generation_tokens", "request_decode_time_seconds", "request_params_n", "request_params_max_tokens",
    "cache_config_info",
)  # fmt: skip


def values(metrics: Metrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
    }


def test_every_name_of_the_contract_is_there_twice() -> None:
    metrics = Metrics("m", PoolSize(64, 16), EngineStats)
    families = {family.name for family in text_string_to_metric_families(metrics.render().decode())}
    for name in CONTRACT:
        assert {f"tokenspeed:{name}", f"vllm:{name}"} <= families, name


def test_engine_counters_are_read_at_the_scrape() -> None:
    stats = EngineStats()
    metrics = Metrics("m", PoolSize(64, 16), lambda: stats)
    stats = EngineStats(
        num_running=3, num_waiting=2, num_held=5, used_blocks=16, prompt_tokens=100, generated_tokens=7,
        host_used_blocks=8, host_total_blocks=9, loaded_tokens=96, stored_blocks=11,
    )  # fmt: skip
    got, labels = values(metrics), (("engine", "0"), ("model_name", "m"))
    assert got["vllm:num_requests_running", labels] == 3
    assert got["vllm:num_requests_waiting", labels] == 2
    assert got["vllm:num_requests_held", labels] == 5
    assert got["vllm:kv_cache_usage_perc", labels] == 0.25
    assert got["tokenspeed:kv_cache_host_used_blocks", labels] == 8
    assert got["tokenspeed:kv_cache_host_total_blocks", labels] == 9
    assert got["tokenspeed:kv_cache_loaded_tokens_total", labels] == 96
    assert got["tokenspeed:kv_cache_stored_blocks_total", labels] == 11
    assert got["tokenspeed:prompt_tokens_total", labels] == 100
    assert got["vllm:generation_tokens_total", labels] == 7
    info = (("block_size", "16"), ("engine", "0"), ("model_name", "m"), ("num_gpu_blocks", "64"))
    assert got["vllm:cache_config_info", info] == 1


def test_request_times_go_into_histograms() -> None:
    metrics = Metrics("m", PoolSize(64, 16), EngineStats)
    metrics.observe_start(2, 50)
    metrics.observe_first_token(0.2)
    metrics.observe_tokens(4, 0.4)
    metrics.observe_end(RequestSummary("r", 10, 4, 6, 0.2, 0.5, 0.9, ("stop", "length")))
    got, labels = values(metrics), (("engine", "0"), ("model_name", "m"))
    assert got["vllm:time_to_first_token_seconds_sum", labels] == 0.2
    assert got["vllm:inter_token_latency_seconds_count", labels] == 4
    assert abs(got["tokenspeed:inter_token_latency_seconds_sum", labels] - 0.4) < 1e-9
    assert got["vllm:e2e_request_latency_seconds_sum", labels] == 0.9
    assert got["vllm:request_prompt_tokens_sum", labels] == 10
    for reason in ("stop", "length"):
        ended = (("engine", "0"), ("finished_reason", reason), ("model_name", "m"))
        assert got["vllm:request_success_total", ended] == 1


def test_two_models_do_not_share_a_registry() -> None:
    first, second = (Metrics(name, PoolSize(1, 16), EngineStats) for name in ("a", "b"))
    first.observe_first_token(1.0)
    assert b'model_name="a"' not in second.render()
