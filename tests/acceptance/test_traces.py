# Calls and metrics as a collector gets them: from a real gateway before the scripted upstream, at a server of its own.

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from gateway.core.settings import Tracing
from tests.support.house import running_house, settings_for
from tests.support.scripted_upstream import ScriptedUpstream

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="SKIPPED: no extra otel; run `make setup`")

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SECRET = "what was said"
SERVER = Span.SPAN_KIND_SERVER


class Collector:
    """Keeps the bodies that are posted to /v1/traces, and to /v1/metrics."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.metrics: list[bytes] = []
        kept = {"/v1/traces": self.bodies, "/v1/metrics": self.metrics}

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                if self.path in kept and self.headers["content-type"] == "application/x-protobuf":
                    kept[self.path].append(self.rfile.read(int(self.headers["content-length"])))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def spans(self) -> list[Span]:
        """Return every span that came."""
        resources = [each for body in self.bodies for each in ExportTraceServiceRequest.FromString(body).resource_spans]
        return [span for resource in resources for scope in resource.scope_spans for span in scope.spans]

    def streams_of(self, model: str) -> int:
        """Return how many streams of a model the metrics that came last count the first tokens of."""
        (resource,) = ExportMetricsServiceRequest.FromString(self.metrics[-1]).resource_metrics
        metrics = {metric.name: metric for metric in resource.scope_metrics[0].metrics}
        points = metrics["gen_ai.server.time_to_first_token"].histogram.data_points
        return sum(
            point.count for point in points if any(each.value.string_value == model for each in point.attributes)
        )


@pytest.fixture
def collector() -> Iterator[Collector]:
    """A collector."""
    collector = Collector()
    yield collector
    collector.server.shutdown()
    collector.server.server_close()


def test_calls_are_told_to_a_collector(database_url: str, redis_url: str, collector: Collector, tmp_path: Path) -> None:
    """Answered and failed, streamed and whole, in the caller's trace or one of the request's id; a caller that is not
    sampled is left out, and nothing of what was said is told. Metrics are sent there, too."""
    ask = {"model": "small", "messages": [{"role": "user", "content": SECRET}]}
    with ScriptedUpstream(models=("small", "large")) as upstream:
        upstream.script("500", model="large")
        tracing = Tracing(url=collector.url, metrics=True)
        settings = settings_for(database_url, redis_url, upstream.url, tmp_path, tracing=tracing)
        with running_house(settings) as house, house.client() as client:
            mine = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
            inside = client.post("/v1/chat/completions", json=ask | {"stream": True}, headers=mine)
            alone = client.post("/v1/chat/completions", json=ask)
            failed = client.post("/v1/chat/completions", json=ask | {"model": "large"})
            client.post("/v1/chat/completions", json=ask, headers={"traceparent": f"00-{TRACE}-{PARENT}-00"})
            row = house.record_of(alone)
        forwarded = [header for request in upstream.requests for header in request.headers if header == "traceparent"]

    calls = {fact_of(span, "tollgate.request_id"): span for span in collector.spans() if span.kind == SERVER}
    ids = [answer.headers["x-request-id"] for answer in (inside, alone, failed)]
    assert sorted(calls) == sorted(ids)
    assert (calls[ids[0]].trace_id.hex(), calls[ids[0]].parent_span_id.hex()) == (TRACE, PARENT)
    assert calls[ids[1]].trace_id.hex() == ids[1].replace("-", "")
    assert [calls[one].status.code for one in ids] == [Status.STATUS_CODE_OK] * 2 + [Status.STATUS_CODE_ERROR]
    assert calls[ids[1]].name == "chat small"
    assert fact_of(calls[ids[1]], "gen_ai.usage.output_tokens") == str(row["output_tokens"])
    assert float(fact_of(calls[ids[1]], "tollgate.cost_usd")) == row["cost_usd"] > 0
    tries = [span for span in collector.spans() if span.parent_span_id == calls[ids[2]].span_id]
    assert [fact_of(span, "tollgate.outcome") for span in tries] == ["status_500"]
    assert SECRET.encode() not in b"".join(collector.bodies + collector.metrics)
    assert collector.streams_of("small") == 1
    assert forwarded == []


def fact_of(span: Span, key: str) -> str:
    """Return an attribute of a span, as text; an empty one where there is none."""
    found = [each.value for each in span.attributes if each.key == key]
    return str(getattr(found[0], found[0].WhichOneof("value"))) if found else ""
