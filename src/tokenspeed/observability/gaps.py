# SPDX-License-Identifier: Apache-2.0
"""A Prometheus histogram of one time series that is cheap to add to, for what happens once a token. Takes no lock: it
belongs to one event loop, which also reads it. Knows no unit.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class Gaps(Collector):
    """Counts by upper bound, as prometheus_client.Histogram exports them."""

    def __init__(
        self, name: str, text: str, labels: Sequence[str], values: Sequence[str], bounds: Sequence[float]
    ) -> None:
        self._name, self._text, self._labels, self._values = name, text, labels, values
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """The same value so many times."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def collect(self) -> Iterator[Metric]:
        """The one family."""
        family = HistogramMetricFamily(self._name, self._text, labels=self._labels)
        bounds = [*map(floatToGoString, self._bounds), "+Inf"]
        family.add_metric(self._values, list(zip(bounds, accumulate(self._counts), strict=True)), self._sum)
        yield family
