# What a trace tells of a call, and which calls are traced.

from __future__ import annotations

import pytest
from msgspec.structs import replace

from billing.records import Attempt, Status
from gateway.settings import Tracing
from gateway.telemetry.tracing import MOST_WAITING, Tracer, is_traced, spans_of
from tests.support.factories import make_record

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


def test_parts_lie_within_the_call_one_behind_the_other() -> None:
    """The queue, then each attempt: all children of the call's span, in its trace."""
    whole, *parts = spans_of(RECORD, None)
    times = [(int(part["startTimeUnixNano"]) - 10**12, int(part["endTimeUnixNano"]) - 10**12) for part in parts]

    assert (whole["traceId"], whole["spanId"], whole["parentSpanId"]) == (
        REQUEST.replace("-", ""),
        REQUEST[19:].replace("-", ""),
        "",
    )
    assert [part["name"] for part in parts] == ["queue", "attempt first", "attempt second"]
    assert times == [(0, 20_000_000), (20_000_000, 50_000_000), (50_000_000, 75_000_000)]
    assert {part["parentSpanId"] for part in parts} == {whole["spanId"]}
    assert len({span["spanId"] for span in (whole, *parts)}) == 4
    assert [part.get("status", {}).get("code") for part in parts] == [None, 2, 1]


def test_a_call_stands_in_its_callers_trace() -> None:
    """A traceparent names trace and parent; one that makes no sense is none, as the W3C has it."""
    whole, *parts = spans_of(RECORD, f"00-{TRACE}-{PARENT}-01")

    assert (whole["traceId"], whole["parentSpanId"]) == (TRACE, PARENT)
    assert {part["traceId"] for part in parts} == {TRACE}
    for nonsense in (
        "",
        "00",
        f"ff-{TRACE}-{PARENT}-01",
        f"00-{'0' * 32}-{PARENT}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{PARENT}-01",
    ):
        assert spans_of(RECORD, nonsense)[0]["traceId"] == REQUEST.replace("-", "")


@pytest.mark.parametrize(
    ("flags", "share", "traced"), [("01", 0.0, True), ("00", 1.0, False), (None, 1.0, True), (None, 0.0, False)]
)
def test_the_caller_decides_and_else_the_share(flags: str | None, share: float, traced: bool) -> None:
    """Who is in a trace is sampled as that is; of the others the share."""
    traceparent = None if flags is None else f"00-{TRACE}-{PARENT}-{flags}"

    assert is_traced(traceparent, REQUEST, share) is traced


def test_a_failed_call_is_an_error() -> None:
    """A team that owes nothing got nothing."""
    assert spans_of(replace(RECORD, status=Status.FAILED), None)[0]["status"] == {"code": 2}
    assert spans_of(RECORD, None)[0]["status"] == {"code": 1}


async def test_what_no_collector_takes_is_bounded() -> None:
    """The newest wait, in their order; none of them is waited for."""
    tracer = Tracer(Tracing(url="http://127.0.0.1:9"))
    for number in range(MOST_WAITING + 5):
        tracer._waiting.append((replace(RECORD, queue_ms=float(number)), None))
    await tracer.flush()

    waiting = [record.queue_ms for record, _ in tracer._waiting]
    assert waiting == [float(number) for number in range(5, MOST_WAITING + 5)]
