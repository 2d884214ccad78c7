# The kinds of metric that a gateway has, rows of the tables that name them, and how they follow what is counted
# elsewhere. With several worker processes prometheus-client's multiprocess mode adds them up.

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence, Set
from functools import lru_cache, partial
from typing import Generic, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client import values as stored
from prometheus_client.multiprocess import MultiProcessCollector

ALL, WORST, LEAST = "livesum", "livemax", "livemin"  # what a gauge shows: their sum, the largest, the smallest

Labels = tuple[str, ...]
M = TypeVar("M")
H = TypeVar("H", bound=Histogram)


class Meters(CollectorRegistry):
    """A registry of metrics."""

    def __init__(self) -> None:
        super().__init__()
        disable_created_metrics()  # a second series for each counter and histogram, which is not used
        if stored.ValueClass is stored.MutexValue:  # else worker processes share them
            stored.ValueClass = PlainValue

    def render(self) -> bytes:
        """Return everything in Prometheus' text format, of all worker processes together."""
        if "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
            return generate_latest(self)
        registry = CollectorRegistry()
        MultiProcessCollector(registry)
        return generate_latest(registry)


class PlainValue(stored.MutexValue):
    """A number that is counted without a lock, which costs twice what counting does: the event loop's thread counts."""

    def inc(self, amount: float) -> None:
        """Add to it."""
        self._value += amount


class Row(Generic[M]):
    """A metric in a table, which is a class: ``make_rows`` makes it for each object. Labels are parted by spaces."""

    def __init__(self, kind: Callable[..., M], name: str, words: str, labels: str = "", **told: object) -> None:
        self._make = partial(kind, name, words, labels.split(), **told)

    def __get__(self, table: object, of: type | None = None) -> M:
        raise AttributeError("make_rows makes it")  # and then that stands before this

    def make(self, meters: Meters) -> M:
        """Return the metric, in this registry."""
        return self._make(registry=meters)


def counter(name: str, words: str, labels: str = "") -> Row[Counter]:
    """Return the row of a counter."""
    return Row(PlainCounter, name, words, labels)


def histogram(name: str, words: str, labels: str = "", *, buckets: Sequence[float]) -> Row[WholeHistogram]:
    """Return the row of a histogram with these upper bounds."""
    return Row(WholeHistogram, name, words, labels, buckets=buckets)


def gauge(name: str, words: str, labels: str = "", *, of: str) -> Row[Gauge]:
    """Return the row of a gauge, ``of`` ALL worker processes, the WORST of them, or the LEAST."""
    return Row(Gauge, name, words, labels, multiprocess_mode=of)


def levels(name: str, words: str, labels: str, *, of: str) -> Row[Levels]:
    """Return the row of a gauge with labels, which shows what is the case elsewhere."""
    return Row(Levels, name, words, labels, multiprocess_mode=of)


def make_rows(table: object, meters: Meters) -> None:
    """Make the metrics of the rows of an object's class, in their order."""
    for name, row in vars(type(table)).items():
        if isinstance(row, Row):
            vars(table)[name] = row.make(meters)


class PlainCounter(Counter):
    """A counter without examples, which no caller asks whether it lacks labels."""

    def inc(self, amount: float = 1, exemplar: dict[str, str] | None = None) -> None:
        """Count so many more. Raises AttributeError where labels are missing."""
        assert amount >= 0, "a counter only rises"
        self._value.inc(amount)


class WholeHistogram(Histogram):
    """A histogram that takes in what was counted by its buckets elsewhere, and finds one by halving."""

    def observe(self, amount: float, exemplar: dict[str, str] | None = None) -> None:
        """Count an observation; of examples there are none."""
        self._sum.inc(amount)
        self._buckets[bisect_left(self._upper_bounds, amount)].inc(1)

    def add(self, counts: Sequence[int], total: float) -> None:
        """Add as many observations to each bucket, of ``total`` in sum; the last is above every bound."""
        for bucket, count in zip(self._buckets, counts, strict=True):
            if count:
                bucket.inc(count)
        self._sum.inc(total)


# ``labels()`` checks and locks anew each time; the same few combinations come with every call.


@lru_cache(10_000)
def counter_of(metric: Counter, *labels: str) -> Counter:
    """Return the counter of one combination of labels."""
    return metric.labels(*labels)


@lru_cache(10_000)
def histogram_of(metric: H, *labels: str) -> H:
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


class Levels(Gauge):
    """A gauge with labels that shows what is the case elsewhere. What it is told of no more shows 0."""

    _shown: Set[Labels] = frozenset()

    def show(self, levels: Iterable[tuple[Labels, float]]) -> None:
        """Show these and no others."""
        gone, shown = self._shown, set[Labels]()
        for labels, level in levels:
            self.labels(*labels).set(level)
            shown.add(labels)
        for labels in gone - shown:
            self.labels(*labels).set(0)
        self._shown = shown
