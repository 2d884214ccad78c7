# Prometheus metrics of a gateway. With several worker processes prometheus-client's multiprocess mode adds them up.

from __future__ import annotations

import os
from functools import lru_cache

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

from billing.records import UsageRecord
from gateway.answering.call import Call
from gateway.answering.hooks import ReplyHook
from router.targets import Target

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
OVERHEAD = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 1)


class Metrics(ReplyHook):
    """Every metric of the gateway, which also count replies."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = self._counter("tollgate_http_requests_total", "Answers by path and status", "path", "status")
        self.request_seconds = Histogram(
            "tollgate_http_request_seconds",
            "Whole time of a request",
            ["path"],
            buckets=SECONDS,
            registry=self.registry,
        )
        self.calls = self._counter(
            "tollgate_calls_total", "Calls that reached an upstream", "team", "model", "endpoint", "status", "reason"
        )
        self.tokens = self._counter("tollgate_tokens_total", "Tokens charged", "team", "model", "kind")
        self.cost = self._counter("tollgate_cost_nanousd_total", "Charged, in billionths of a dollar", "team", "model")
        self.attempts = self._counter("tollgate_attempts_total", "Tries at targets", "target", "outcome")
        self.first_token = Histogram(
            "tollgate_first_token_seconds", "Until the first token", ["model"], buckets=SECONDS, registry=self.registry
        )
        self.overhead = Histogram(
            "tollgate_overhead_seconds",
            "Time until the first token that was ours, not the upstream's",
            buckets=OVERHEAD,
            registry=self.registry,
        )
        self.in_flight = Gauge(
            "tollgate_calls_in_flight", "Calls being answered", registry=self.registry, multiprocess_mode="livesum"
        )
        self.journal_backlog = Gauge(
            "tollgate_journal_backlog",
            "Closed calls that are not in Postgres yet",
            registry=self.registry,
            multiprocess_mode="livesum",
        )

    def watch(self, call: Call, target: Target) -> ReplyHook:
        """Watch a reply: all of them alike, and only how they end."""
        return self

    def close(self, record: UsageRecord) -> None:
        """Count a reply that has ended."""
        team, model = record.team_id, record.model_used
        counter_of(self.calls, team, model, record.endpoint, record.status.value, record.route_reason).inc()
        counter_of(self.tokens, team, model, "input").inc(record.input_tokens)
        counter_of(self.tokens, team, model, "output").inc(record.output_tokens)
        counter_of(self.cost, team, model).inc(record.cost_nanousd)
        for attempt in record.attempts:
            counter_of(self.attempts, attempt.target, attempt.outcome).inc()
        if record.first_token_ms is not None:
            waited = sum(attempt.ms for attempt in record.attempts)
            histogram_of(self.first_token, model).observe(record.first_token_ms / 1000)
            self.overhead.observe(max(0.0, record.first_token_ms - waited) / 1000)

    def render(self) -> bytes:
        """Return everything in Prometheus' text format, of all worker processes together."""
        if "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
            return generate_latest(self.registry)
        registry = CollectorRegistry()
        MultiProcessCollector(registry)
        return generate_latest(registry)

    def _counter(self, name: str, words: str, *labels: str) -> Counter:
        return Counter(name, words, labels, registry=self.registry)


# ``labels()`` checks and locks anew each time; the same few combinations come with every call.


@lru_cache(10_000)
def counter_of(metric: Counter, *labels: str) -> Counter:
    """Return the counter of one combination of labels."""
    return metric.labels(*labels)


@lru_cache(10_000)
def histogram_of(metric: Histogram, *labels: str) -> Histogram:
    """Return the histogram of one combination of labels."""
    return metric.labels(*labels)
