# Spans on their way to a collector, by OpenTelemetry's SDK: it gathers them, and a thread of its own sends them as OTLP
# over HTTP. The SDK's variables say what else it may be told: OTEL_EXPORTER_OTLP_HEADERS, OTEL_RESOURCE_ATTRIBUTES, ….
# The SDK is the extra `otel`; this is imported where calls are traced, and nowhere else.

from __future__ import annotations

import asyncio
from typing import Any

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import Tracer

EVERY = 1.0  # seconds between two sendings
MOST_WAITING = 16_384  # spans
SEND_WITHIN = 5.0  # seconds
CLOSE_WITHIN = 2.0  # seconds until what has not been taken is given up


class TraceExport:
    """Sends what ``tracer`` makes to the collector at ``url``, or to another ``exporter``. Close it."""

    def __init__(self, url: str, exporter: Any = None) -> None:
        self._exporter = exporter or OTLPSpanExporter(url.rstrip("/") + "/v1/traces", timeout=SEND_WITHIN)
        self.trace_id = 0  # of traces that begin now: a request's, so that an operator finds the one by the other
        ids: Any = RandomIdGenerator()
        ids.generate_trace_id = lambda: self.trace_id
        self._provider = TracerProvider(
            sampler=ALWAYS_ON,  # spans are made of calls that are traced, and of no others
            resource=service(),
            shutdown_on_exit=False,
            id_generator=ids,
        )
        self._provider.add_span_processor(
            BatchSpanProcessor(self._exporter, max_queue_size=MOST_WAITING, schedule_delay_millis=EVERY * 1000)
        )
        self.tracer: Tracer = self._provider.get_tracer("tollgate")

    async def close(self) -> None:
        """Send what is left, as far as it goes in a few seconds."""
        giving_up = asyncio.get_running_loop().call_later(CLOSE_WITHIN, self._exporter.shutdown)
        try:
            await asyncio.to_thread(self._provider.shutdown)
        finally:
            giving_up.cancel()


def service() -> Resource:
    """Return who sends: tollgate, this process of it, unless the SDK's variables say otherwise."""
    return Resource.create({"service.name": "tollgate"}).merge(OTELResourceDetector().detect())
