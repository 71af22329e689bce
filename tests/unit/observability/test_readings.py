# SPDX-License-Identifier: Apache-2.0
"""Readings of /metrics: sums over labels, rates between two, quantiles of what came between."""

from __future__ import annotations

import math

import pytest

from tokenspeed.core.ipc import EngineStats
from tokenspeed.observability.logging import RequestSummary
from tokenspeed.observability.metrics import Metrics, PoolSize
from tokenspeed.observability.readings import Buckets, read_metrics

INF = math.inf


def test_our_own_text_is_read_back() -> None:
    stats = EngineStats(num_running=3, used_blocks=16, generated_tokens=100)
    metrics = Metrics("m", PoolSize(64, 16), lambda: stats)
    earlier = read_metrics(metrics.render().decode(), 10.0)
    metrics.observe_first_token(0.2)
    metrics.observe_end(RequestSummary("r", 10, 4, 6, 0.2, 0.5, 0.9, ("stop", "length")))
    stats = EngineStats(num_running=3, used_blocks=16, generated_tokens=300)
    now = read_metrics(metrics.render().decode(), 14.0)
    assert now.model == "m"
    assert (now.value("num_requests_running"), now.value("kv_cache_usage_perc")) == (3, 0.25)
    assert now.value("request_success_total") == 2
    assert now.value("request_success_total{stop}") == 1
    assert now.value("no_such_name") == 0
    assert now.rate("generation_tokens_total", earlier) == 50.0
    assert now.rate("generation_tokens_total", now) == 0.0
    assert earlier.rate("generation_tokens_total", now) == 0.0, "the server began anew"
    assert now.buckets("time_to_first_token_seconds").count == 1
    assert earlier.buckets("time_to_first_token_seconds").count == 0
    assert now.buckets("iteration_tokens_total").count == 0


@pytest.mark.parametrize("text", ["", "<html>hello</html>", "up 1\n", 'vllm:num_requests_running{engine="0"} 1\n'])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError):
        read_metrics(text, 0.0)


@pytest.mark.parametrize(
    ("share", "expected"), [(0.05, 0.05), (0.1, 0.1), (0.5, 0.5), (0.55, 0.55), (0.75, 1.5), (0.9, 2.0), (0.99, 2.0)]
)
def test_a_quantile_lies_within_its_bucket(share: float, expected: float) -> None:
    """Ten values up to 0.1, 50 up to 0.5 …, of a hundred; ten are above every finite bound."""
    buckets = Buckets(((0.1, 10), (0.5, 50), (1.0, 100 * 0.6 + 0), (2.0, 90), (INF, 100)))
    assert buckets.quantile(share) == pytest.approx(expected, abs=0.26)
    lower = max((bound for bound, count in buckets.counts if count < share * 100), default=0.0)
    upper = min(bound for bound, count in buckets.counts if count >= share * 100)
    assert lower <= (buckets.quantile(share) or 0.0) <= upper


def test_quantiles_of_nothing_and_of_one_bucket() -> None:
    assert Buckets().quantile(0.5) is None
    assert Buckets(((1.0, 0), (INF, 0))).quantile(0.5) is None
    assert Buckets(((1.0, 4), (INF, 4))).quantile(0.5) == 0.5
    assert Buckets(((1.0, 0), (INF, 4))).quantile(0.5) == 1.0, "above every finite bound"
    assert Buckets(((1.0, 0), (2.0, 4), (3.0, 4), (INF, 4))).quantile(1.0) == 2.0


def test_what_came_since_an_earlier_reading() -> None:
    earlier, now = Buckets(((1.0, 2), (INF, 3))), Buckets(((1.0, 2), (INF, 7)))
    assert now.since(earlier) == Buckets(((1.0, 0), (INF, 4)))
    assert now.since(Buckets()) == now
    assert earlier.since(now) == earlier, "the server began anew"
