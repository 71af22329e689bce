# SPDX-License-Identifier: Apache-2.0
"""What /metrics said at one moment, and what happened between two moments: rates and quantiles.

Knows the text format and our names; knows no HTTP and no terminal.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

_PREFIX = "tokenspeed:"


@dataclass(frozen=True, slots=True)
class Buckets:
    """A histogram. counts: by upper bound, how many values were at most that; ascending, the last bound is infinite."""

    counts: tuple[tuple[float, float], ...] = ()

    @property
    def count(self) -> float:
        """How many values there were."""
        return self.counts[-1][1] if self.counts else 0.0

    def since(self, earlier: Buckets) -> Buckets:
        """What came after `earlier`; all of it where the server began anew since then."""
        before = dict(earlier.counts)
        if self.count < earlier.count:
            return self
        return Buckets(tuple((bound, count - before.get(bound, 0.0)) for bound, count in self.counts))

    def quantile(self, share: float) -> float | None:
        """The value that `share` of all values do not exceed, taken as evenly spread within a bucket; the largest
        finite bound at most. None where there were none."""
        if self.count <= 0:
            return None
        wanted, lower, below = share * self.count, 0.0, 0.0
        for bound, count in self.counts:
            if count >= wanted and count > below:
                if math.isinf(bound):
                    return lower
                return lower + (bound - lower) * max(wanted - below, 0.0) / (count - below)
            lower, below = bound, count
        return lower


@dataclass(frozen=True, slots=True)
class Reading:
    """at_s: when, on any clock of seconds. values: by name without prefix, summed over labels; of a labelled counter
    also by label value, as `name{value}`."""

    at_s: float
    model: str
    values: dict[str, float] = field(default_factory=dict)
    histograms: dict[str, Buckets] = field(default_factory=dict)

    def value(self, name: str) -> float:
        """0 where there is none."""
        return self.values.get(name, 0.0)

    def buckets(self, name: str) -> Buckets:
        """Empty where nothing was observed yet."""
        return self.histograms.get(name, Buckets())

    def rate(self, name: str, earlier: Reading) -> float:
        """How fast a counter grew since `earlier`, a second."""
        grown, took_s = self.value(name) - earlier.value(name), self.at_s - earlier.at_s
        return max(grown, 0.0) / took_s if took_s > 0.0 else 0.0


def read_metrics(text: str, at_s: float) -> Reading:
    """What the text of /metrics says. ValueError where it is not the text of such a server."""
    values: dict[str, float] = {}
    bounds: dict[str, dict[float, float]] = {}
    model = ""
    for family in text_string_to_metric_families(text):
        if not family.name.startswith(_PREFIX):
            continue
        for sample in family.samples:
            name = sample.name.removeprefix(_PREFIX)
            model = sample.labels.get("model_name", model)
            if name.endswith("_bucket"):
                known = bounds.setdefault(name.removesuffix("_bucket"), {})
                bound = float(sample.labels["le"])
                known[bound] = known.get(bound, 0.0) + sample.value
            else:
                for key in _keys(name, sample.labels):
                    values[key] = values.get(key, 0.0) + sample.value
    if not values:
        raise ValueError("there are no metrics of ours")
    histograms = {name: Buckets(tuple(sorted(counts.items()))) for name, counts in bounds.items()}
    return Reading(at_s, model, values, histograms)


def _keys(name: str, labels: dict[str, str]) -> Iterable[str]:
    yield name
    if "finished_reason" in labels:
        yield f"{name}{{{labels['finished_reason']}}}"
