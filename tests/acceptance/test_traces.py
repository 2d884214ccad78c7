# Calls as a collector gets them: from a real gateway before the scripted upstream, at an HTTP server that keeps them.

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from gateway.settings import Tracing
from tests.support.house import running_house, settings_for
from tests.support.scripted_upstream import ScriptedUpstream

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SECRET = "what was said"


class Collector:
    """Keeps the bodies that are posted to /v1/traces."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        bodies = self.bodies

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                if self.path == "/v1/traces" and self.headers["content-type"] == "application/json":
                    bodies.append(self.rfile.read(int(self.headers["content-length"])))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def spans(self) -> list[dict[str, Any]]:
        """Return every span that came."""
        found = [json.loads(body)["resourceSpans"][0]["scopeSpans"][0]["spans"] for body in self.bodies]
        return [span for spans in found for span in spans]


@pytest.fixture
def collector() -> Iterator[Collector]:
    """A collector."""
    collector = Collector()
    yield collector
    collector.server.shutdown()
    collector.server.server_close()


def test_calls_are_told_to_a_collector(database_url: str, redis_url: str, collector: Collector, tmp_path: Path) -> None:
    """Answered and failed, streamed and whole, in the caller's trace or one of the request's id; a caller that is not
    sampled is left out, and nothing of what was said is told."""
    ask = {"model": "small", "messages": [{"role": "user", "content": SECRET}]}
    with ScriptedUpstream(models=("small", "large")) as upstream:
        upstream.script("500", model="large")
        settings = settings_for(database_url, redis_url, upstream.url, tmp_path, tracing=Tracing(url=collector.url))
        with running_house(settings) as house, house.client() as client:
            mine = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
            inside = client.post("/v1/chat/completions", json=ask | {"stream": True}, headers=mine)
            alone = client.post("/v1/chat/completions", json=ask)
            failed = client.post("/v1/chat/completions", json=ask | {"model": "large"})
            client.post("/v1/chat/completions", json=ask, headers={"traceparent": f"00-{TRACE}-{PARENT}-00"})
            row = house.record_of(alone)
        forwarded = [header for request in upstream.requests for header in request.headers if header == "traceparent"]

    calls = {fact_of(span, "tollgate.request_id"): span for span in collector.spans() if span["kind"] == 2}
    ids = [answer.headers["x-request-id"] for answer in (inside, alone, failed)]
    assert sorted(calls) == sorted(ids)
    assert (calls[ids[0]]["traceId"], calls[ids[0]]["parentSpanId"]) == (TRACE, PARENT)
    assert calls[ids[1]]["traceId"] == ids[1].replace("-", "")
    assert [calls[one]["status"]["code"] for one in ids] == [1, 1, 2]
    assert calls[ids[1]]["name"] == "chat small"
    assert fact_of(calls[ids[1]], "gen_ai.usage.output_tokens") == str(row["output_tokens"])
    assert float(fact_of(calls[ids[1]], "tollgate.cost_usd") or 0) == row["cost_usd"] > 0
    tries = [span for span in collector.spans() if span["parentSpanId"] == calls[ids[2]]["spanId"]]
    assert [fact_of(span, "tollgate.outcome") for span in tries] == ["status_500"]
    assert SECRET.encode() not in b"".join(collector.bodies)
    assert forwarded == []


def fact_of(span: dict[str, Any], key: str) -> str | None:
    """Return an attribute of a span."""
    found = [each["value"] for each in span["attributes"] if each["key"] == key]
    return str(next(iter(found[0].values()))) if found else None
