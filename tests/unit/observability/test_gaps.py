# SPDX-License-Identifier: Apache-2.0
"""The cheap histogram says what the library's own would say."""

from __future__ import annotations

import random

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.exposition import generate_latest

from tokenspeed.observability.gaps import Gaps

BOUNDS = (0.001, 0.0025, 0.5, 1.0, 10.0)
LABELS, VALUES = ("model_name", "engine"), ("m", "0")


def lines(registry: CollectorRegistry) -> list[str]:
    return [line for line in generate_latest(registry).decode().splitlines() if "_created" not in line]


def test_it_is_exported_as_a_histogram() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    gaps = Gaps("gap_seconds", "Between", LABELS, VALUES, BOUNDS)
    ours.register(gaps)
    histogram = Histogram("gap_seconds", "Between", LABELS, buckets=BOUNDS, registry=theirs).labels(*VALUES)
    assert lines(ours) == lines(theirs), "before anything was seen"
    rng = random.Random(5)
    for _ in range(500):
        value, times = rng.choice((*BOUNDS, rng.uniform(0.0, 20.0))), rng.randint(1, 4)
        gaps.observe(value, times)
        for _ in range(times):
            histogram.observe(value)
    counts = [line for line in lines(ours) if "_sum" not in line]
    assert counts == [line for line in lines(theirs) if "_sum" not in line]
    (ours_sum,) = (line for line in lines(ours) if "_sum" in line)
    (theirs_sum,) = (line for line in lines(theirs) if "_sum" in line)
    assert abs(float(ours_sum.split()[-1]) - float(theirs_sum.split()[-1])) < 1e-6
