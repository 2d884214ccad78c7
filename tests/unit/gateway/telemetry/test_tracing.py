# What a trace tells of a call, and which calls are traced.

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace
from opentelemetry.trace import StatusCode

from billing.core.records import Attempt, Status, UsageRecord
from gateway.telemetry.tracing import Tracer, is_traced, read_traceparent
from tests.support.factories import make_record

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="SKIPPED: no extra otel; run `make setup`")

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from gateway.telemetry.trace_export import TraceExport

REQUEST = "0192f0c0-1111-7222-8333-444455556666"
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
RECORD = replace(
    make_record(REQUEST),
    created_at=1000.0,
    queue_ms=20.0,
    first_token_ms=75.0,
    total_ms=500.0,
    attempts=(Attempt("first", "timeout", 30.0), Attempt("second", "ok", 25.0)),
)


async def spans_of(record: UsageRecord, traceparent: str | None = None) -> tuple[ReadableSpan, list[ReadableSpan]]:
    """Return the span of a call as a collector would get it, and those within it."""
    kept = InMemorySpanExporter()
    tracer = Tracer(TraceExport("http://nowhere", kept), 1.0)
    tracer.tell(record, read_traceparent(traceparent))
    await tracer.close()
    *parts, whole = kept.get_finished_spans()
    return whole, parts


async def test_parts_lie_within_the_call_one_behind_the_other() -> None:
    """The queue, then each attempt: all children of the call's span, in its trace."""
    whole, parts = await spans_of(RECORD)
    times = [((part.start_time or 0) - 10**12, (part.end_time or 0) - 10**12) for part in parts]

    assert f"{whole.context.trace_id:032x}" == REQUEST.replace("-", "")
    assert whole.parent is None
    assert (whole.start_time, whole.end_time) == (10**12, 10**12 + 500_000_000)
    assert [part.name for part in parts] == ["queue", "attempt first", "attempt second"]
    assert times == [(0, 20_000_000), (20_000_000, 50_000_000), (50_000_000, 75_000_000)]
    assert [part.parent and part.parent.span_id for part in parts] == [whole.context.span_id] * 3
    assert {part.context.trace_id for part in parts} == {whole.context.trace_id}
    assert len({span.context.span_id for span in (whole, *parts)}) == 4
    assert [part.status.status_code for part in parts] == [StatusCode.UNSET, StatusCode.ERROR, StatusCode.OK]


async def test_a_call_stands_in_its_callers_trace() -> None:
    """A traceparent names trace and parent; one that makes no sense is none, as the W3C has it."""
    whole, parts = await spans_of(RECORD, f"00-{TRACE}-{PARENT}-01")

    assert whole.parent is not None
    assert f"{whole.context.trace_id:032x} {whole.parent.span_id:016x}" == f"{TRACE} {PARENT}"
    assert {part.context.trace_id for part in parts} == {whole.context.trace_id}
    for nonsense in (
        "",
        "00",
        f"ff-{TRACE}-{PARENT}-01",
        f"00-{'0' * 32}-{PARENT}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{PARENT}-01",
    ):
        alone, _ = await spans_of(RECORD, nonsense)
        assert f"{alone.context.trace_id:032x}" == REQUEST.replace("-", "")


@pytest.mark.parametrize(
    ("flags", "share", "traced"), [("01", 0.0, True), ("00", 1.0, False), (None, 1.0, True), (None, 0.0, False)]
)
def test_the_caller_decides_and_else_the_share(flags: str | None, share: float, traced: bool) -> None:
    """Who is in a trace is sampled as that is; of the others the share."""
    traceparent = None if flags is None else f"00-{TRACE}-{PARENT}-{flags}"

    assert is_traced(read_traceparent(traceparent), REQUEST, share) is traced


async def test_a_failed_call_is_an_error() -> None:
    """A team that owes nothing got nothing."""
    failed, _ = await spans_of(replace(RECORD, status=Status.FAILED))
    answered, _ = await spans_of(RECORD)

    assert (failed.status.status_code, answered.status.status_code) == (StatusCode.ERROR, StatusCode.OK)


async def test_who_runs_it_names_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is called tollgate, unless OpenTelemetry's own variables say otherwise."""
    usual, _ = await spans_of(RECORD)
    monkeypatch.setenv("OTEL_SERVICE_NAME", "gateway-of-a-team")
    named, _ = await spans_of(RECORD)

    assert usual.resource.attributes["service.name"] == "tollgate"
    assert named.resource.attributes["service.name"] == "gateway-of-a-team"


async def test_no_call_waits_long_for_a_collector_that_is_away() -> None:
    """Closing ends soon where nobody listens, with whatever has not been taken."""
    tracer = Tracer(TraceExport("http://127.0.0.1:9"), 1.0)
    for _ in range(2000):
        tracer.tell(RECORD, read_traceparent(None))

    async with asyncio.timeout(20):
        await tracer.close()
