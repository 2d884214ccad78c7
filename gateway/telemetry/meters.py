# The kinds of metric that a gateway has, and how they follow what is counted elsewhere. With several worker processes
# prometheus-client's multiprocess mode adds them up.

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from functools import lru_cache

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

Labels = tuple[str, ...]


class Meters(CollectorRegistry):
    """A registry that makes what it holds."""

    def __init__(self) -> None:
        super().__init__()
        disable_created_metrics()  # a second series for each counter and histogram, which is not used

    def counter(self, name: str, words: str, *labels: str) -> Counter:
        """Return a counter."""
        return Counter(name, words, labels, registry=self)

    def histogram(self, name: str, words: str, buckets: Sequence[float], *labels: str) -> Histogram:
        """Return a histogram with these upper bounds."""
        return Histogram(name, words, labels, buckets=buckets, registry=self)

    def gauge_of_all(self, name: str, words: str, *labels: str) -> Gauge:
        """Return a gauge that shows the sum over all worker processes."""
        return Gauge(name, words, labels, registry=self, multiprocess_mode="livesum")

    def gauge_of_worst(self, name: str, words: str, *labels: str) -> Gauge:
        """Return a gauge that shows the largest of all worker processes."""
        return Gauge(name, words, labels, registry=self, multiprocess_mode="livemax")

    def gauge_of_least(self, name: str, words: str, *labels: str) -> Gauge:
        """Return a gauge that shows the smallest of all worker processes."""
        return Gauge(name, words, labels, registry=self, multiprocess_mode="livemin")

    def render(self) -> bytes:
        """Return everything in Prometheus' text format, of all worker processes together."""
        if "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
            return generate_latest(self)
        registry = CollectorRegistry()
        MultiProcessCollector(registry)
        return generate_latest(registry)


# ``labels()`` checks and locks anew each time; the same few combinations come with every call.


@lru_cache(10_000)
def counter_of(metric: Counter, *labels: str) -> Counter:
    """Return the counter of one combination of labels."""
    return metric.labels(*labels)


@lru_cache(10_000)
def histogram_of(metric: Histogram, *labels: str) -> Histogram:
    """Return the histogram of one combination of labels."""
    return metric.labels(*labels)


class Rises:
    """Counters that follow counts kept elsewhere."""

    def __init__(self) -> None:
        self._seen: dict[tuple[Counter, Labels], int] = {}

    def follow(self, counter: Counter, count: int, *labels: str) -> None:
        """Add to the counter what ``count`` has risen since it was last told; one that fell has begun anew."""
        seen = self._seen.get((counter, labels), 0)
        child = counter_of(counter, *labels) if labels else counter
        child.inc(count - seen if count >= seen else count)
        self._seen[counter, labels] = count


class Levels:
    """A gauge with labels that shows what is the case elsewhere. What it is told of no more shows 0."""

    def __init__(self, gauge: Gauge) -> None:
        self._gauge = gauge
        self._shown: set[Labels] = set()

    def show(self, levels: Iterable[tuple[Labels, float]]) -> None:
        """Show these and no others."""
        gone, self._shown = self._shown, set()
        for labels, level in levels:
            self._gauge.labels(*labels).set(level)
            self._shown.add(labels)
        for labels in gone - self._shown:
            self._gauge.labels(*labels).set(0)
