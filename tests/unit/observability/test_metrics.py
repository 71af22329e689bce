# SPDX-License-Identifier: Apache-2.0
"""Metrics: names that dashboards know, values that are what happened."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from tokenspeed.core.ipc import EngineStats
from tokenspeed.observability.logging import RequestSummary
from tokenspeed.observability.metrics import OLD_NAMES, Metrics, PoolSize

CONTRACT = {
    "num_requests_running": "gauge", "num_requests_waiting": "gauge", "kv_cache_usage_perc": "gauge",
    "cache_config_info": "gauge", "prompt_tokens": "counter", "generation_tokens": "counter",
    "request_success": "counter", "prefix_cache_queries": "counter", "prefix_cache_hits": "counter",
    "num_preemptions": "counter", "time_to_first_token_seconds": "histogram",
    "inter_token_latency_seconds": "histogram", "e2e_request_latency_seconds": "histogram",
    "request_queue_time_seconds": "histogram", "request_prefill_time_seconds": "histogram",
    "request_decode_time_seconds": "histogram", "request_inference_time_seconds": "histogram",
    "request_prompt_tokens": "histogram", "request_generation_tokens": "histogram",
    "request_params_max_tokens": "histogram", "request_params_n": "histogram", "iteration_tokens_total": "histogram",
}  # fmt: skip
OLD = {"time_per_output_token_seconds": "histogram", "gpu_cache_usage_perc": "gauge"}
BUSY = EngineStats(num_steps=3, step_tokens=(1, 0, 0, 0, 0, 2, *(0,) * 10), num_step_tokens=50)
SUMMARY = RequestSummary("r", 10, 4, 6, 0.2, 0.5, 0.9, ("stop", "length"), 0.01, 0.04, 0.15)


def values(metrics: Metrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
    }


def served() -> Metrics:
    """After one request."""
    metrics = Metrics("m", PoolSize(64, 16), lambda: BUSY)
    metrics.observe_start(2, 50)
    metrics.observe_first_token(0.2)
    metrics.observe_tokens(4, 0.4)
    metrics.observe_end(SUMMARY)
    return metrics


def test_every_name_of_the_contract_is_there_twice_and_what_it_should_be() -> None:
    families = {family.name: family for family in text_string_to_metric_families(served().render().decode())}
    for name, kind in CONTRACT.items():
        for prefix in ("tokenspeed", "vllm"):
            family = families[f"{prefix}:{name}"]
            assert family.type == kind, name
            assert family.samples, name
            assert all(sample.labels["model_name"] == "m" for sample in family.samples), name
            assert all(sample.labels["engine"] == "0" for sample in family.samples), name
    for name, kind in OLD.items():
        assert families[f"vllm:{name}"].type == kind
        assert f"tokenspeed:{name}" not in families


def test_an_old_name_has_the_values_of_the_new_one() -> None:
    got = values(served())
    for new, old in OLD_NAMES.items():
        pairs = [(name, labels) for name, labels in got if name.startswith(f"vllm:{new}")]
        assert pairs
        for name, labels in pairs:
            assert got[name.replace(new, old), labels] == got[name, labels]


def test_a_histogram_of_the_engine_adds_up() -> None:
    got, labels = values(served()), (("engine", "0"), ("model_name", "m"))
    assert got["vllm:iteration_tokens_total_count", labels] == 3
    assert got["vllm:iteration_tokens_total_sum", labels] == 50
    buckets = {
        dict(labels)["le"]: value
        for (name, labels), value in got.items()
        if name == "vllm:iteration_tokens_total_bucket"
    }
    assert (buckets["1.0"], buckets["16.0"], buckets["32.0"], buckets["+Inf"]) == (1, 1, 3, 3)
    idle = values(Metrics("m", PoolSize(64, 16), EngineStats))
    assert idle["vllm:iteration_tokens_total_count", labels] == 0


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
    got, labels = values(served()), (("engine", "0"), ("model_name", "m"))
    sums = {
        "time_to_first_token": 0.2, "inter_token_latency": 0.4, "e2e_request_latency": 0.9, "request_queue_time": 0.04,
        "request_prefill_time": 0.15, "request_decode_time": 0.5, "request_inference_time": 0.65,
    }  # fmt: skip
    for name, expected in sums.items():
        assert abs(got[f"vllm:{name}_seconds_sum", labels] - expected) < 1e-9, name
    assert got["vllm:inter_token_latency_seconds_count", labels] == 4
    assert got["vllm:request_prompt_tokens_sum", labels] == 10
    assert got["vllm:request_params_n_sum", labels] == 2
    for reason in ("stop", "length"):
        ended = (("engine", "0"), ("finished_reason", reason), ("model_name", "m"))
        assert got["vllm:request_success_total", ended] == 1


def test_what_never_happened_is_not_counted() -> None:
    metrics = Metrics("m", PoolSize(64, 16), EngineStats)
    metrics.observe_end(RequestSummary("r", 0, 0, 0, None, None, 0.5, ("abort",)))
    got, labels = values(metrics), (("engine", "0"), ("model_name", "m"))
    for name in ("queue", "prefill", "decode", "inference"):
        assert (f"vllm:request_{name}_time_seconds_count", labels) not in got
    assert got["vllm:e2e_request_latency_seconds_count", labels] == 1


def test_calls_are_a_stop_and_a_departed_prompt_is_counted() -> None:
    metrics = Metrics("m", PoolSize(64, 16), EngineStats)
    told = "prefix-diverged: message 1, edited"
    metrics.observe_end(RequestSummary("r", 1, 0, 6, 0.2, 0.5, 0.9, ("tool_calls",), prefix=told))
    metrics.observe_end(RequestSummary("r", 1, 0, 6, 0.2, 0.5, 0.9, ("stop",)))
    got, labels = values(metrics), (("engine", "0"), ("model_name", "m"))
    assert got["vllm:request_success_total", (("engine", "0"), ("finished_reason", "stop"), ("model_name", "m"))] == 2
    assert got["tokenspeed:prefix_diverged_total", labels] == 1


def test_two_models_do_not_share_a_registry() -> None:
    first, second = (Metrics(name, PoolSize(1, 16), EngineStats) for name in ("a", "b"))
    first.observe_first_token(1.0)
    assert b'model_name="a"' not in second.render()


def test_what_has_not_happened_yet_is_a_zero() -> None:
    got = values(Metrics("m", PoolSize(1, 16), EngineStats))
    labels = (("engine", "0"), ("model_name", "m"))
    assert got["tokenspeed:prefix_diverged_total", labels] == 0
    for reason in ("stop", "length", "abort", "error"):
        ended = (("engine", "0"), ("finished_reason", reason), ("model_name", "m"))
        assert got["vllm:request_success_total", ended] == 0
