# Metrics on their way to a collector, as OTLP over HTTP: what the registry for Prometheus holds, every minute. So both
# show the same figures, and a call costs the same whether they are sent or not. OpenTelemetry's SDK writes and sends
# them; it is the extra `otel`, and this is imported where metrics are sent, and nowhere else.

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Iterable, Iterator
from time import time_ns
from typing import Any

import structlog
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from prometheus_client import Metric as Family

from gateway.telemetry.metrics import Metrics
from gateway.telemetry.trace_export import CLOSE_WITHIN, SEND_WITHIN, service

CUMULATIVE = AggregationTemporality.CUMULATIVE
EVERY = 60.0  # seconds, unless OTEL_METRIC_EXPORT_INTERVAL (milliseconds) says otherwise
CONVENTIONS = {  # names as Prometheus has them: those of the conventions, which have no unit in them
    "gen_ai_client_token_usage": ("gen_ai.client.token.usage", "{token}"),
    "gen_ai_client_operation_duration_seconds": ("gen_ai.client.operation.duration", "s"),
    "gen_ai_client_operation_time_per_output_chunk_seconds": ("gen_ai.client.operation.time_per_output_chunk", "s"),
    "gen_ai_server_time_to_first_token_seconds": ("gen_ai.server.time_to_first_token", "s"),
    "gen_ai_server_time_per_output_token_seconds": ("gen_ai.server.time_per_output_token", "s"),
}
ATTRIBUTES = {
    name.replace(".", "_"): name
    for name in (
        *("gen_ai.operation.name", "gen_ai.provider.name", "gen_ai.request.model", "gen_ai.response.model"),
        *("gen_ai.token.type", "error.type"),
    )
}

log = structlog.get_logger(__name__)


class MetricsExport:
    """Sends what this process counts in ``metrics`` to the collector at ``url``, or to an ``exporter``. Close it."""

    def __init__(self, metrics: Metrics, url: str, exporter: Any = None) -> None:
        self._metrics = metrics
        self._exporter = exporter or OTLPMetricExporter(url.rstrip("/") + "/v1/metrics", timeout=SEND_WITHIN)
        self._resource = service()
        self._since = time_ns()
        self._every = _interval(os.environ.get("OTEL_METRIC_EXPORT_INTERVAL"))

    async def run(self) -> None:
        """Send from time to time, for ever. What a collector does not take is told the next time: figures only grow."""
        while True:
            await asyncio.sleep(self._every)
            await self.send()

    async def send(self) -> None:
        """Send what is counted by now, beside the loop that serves callers."""
        self._metrics.refresh()
        await asyncio.to_thread(self._send)

    async def close(self) -> None:
        """Send what is counted at the end, as far as it goes in a few seconds."""
        giving_up = asyncio.get_running_loop().call_later(CLOSE_WITHIN, self._exporter.shutdown)
        try:
            await self.send()
        finally:
            giving_up.cancel()

    def _send(self) -> None:
        now = time_ns()
        families = self._metrics.registry.collect()
        told = [metric for family in families if (metric := self._metric_of(family, now)) is not None]
        scope = ScopeMetrics(InstrumentationScope("tollgate"), told, "")
        self._exporter.export(MetricsData([ResourceMetrics(self._resource, [scope], "")]))

    def _metric_of(self, family: Family, now: int) -> Metric | None:
        """Return a family of series as OpenTelemetry has it; None where nothing was counted."""
        name, unit = CONVENTIONS.get(family.name, (family.name, "s" if family.name.endswith("_seconds") else ""))
        data: Sum | Gauge | Histogram
        if family.type == "histogram":
            data = Histogram(list(self._histograms(family, now)), CUMULATIVE)
        else:
            points = [
                NumberDataPoint(_attributes(sample.labels), self._since, now, sample.value) for sample in family.samples
            ]
            data = Sum(points, CUMULATIVE, is_monotonic=True) if family.type == "counter" else Gauge(points)
        suffix = "_total" if family.type == "counter" else ""
        return Metric(name + suffix, family.documentation, unit, data) if data.data_points else None

    def _histograms(self, family: Family, now: int) -> Iterator[HistogramDataPoint]:
        series: dict[tuple[tuple[str, str], ...], list[Any]] = {}
        for sample in family.samples:
            labels = tuple((name, value) for name, value in sample.labels.items() if name != "le")
            series.setdefault(labels, []).append(sample)
        for labels, samples in series.items():
            buckets = [(float(one.labels["le"]), int(one.value)) for one in samples if one.name.endswith("_bucket")]
            total = next(one.value for one in samples if one.name.endswith("_sum"))
            counts = list(_differences(count for _, count in buckets))
            bounds = [bound for bound, _ in buckets if bound != math.inf]
            unknown: Any = None  # the least and the largest
            yield HistogramDataPoint(
                _attributes(dict(labels)), self._since, now, buckets[-1][1], total, counts, bounds, unknown, unknown
            )


def _interval(milliseconds: str | None) -> float:
    """Return the seconds between two sendings; of a value that makes no sense the usual ones, as the SDK does."""
    if not milliseconds:
        return EVERY
    if milliseconds.isdecimal() and int(milliseconds) > 0:
        return int(milliseconds) / 1000
    log.warning("otel_metric_export_interval_ignored", found=milliseconds[:20], expected="milliseconds, such as 60000")
    return EVERY


def _attributes(labels: dict[str, str]) -> dict[str, str]:
    """Return labels under the conventions' names; an empty one is none."""
    return {ATTRIBUTES.get(name, name): value for name, value in labels.items() if value}


def _differences(counts: Iterable[int]) -> Iterator[int]:
    """Return what each bucket holds by itself: Prometheus has them one within the other."""
    before = 0
    for count in counts:
        yield count - before
        before = count
