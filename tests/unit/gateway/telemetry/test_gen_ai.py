# What is counted under the names of OpenTelemetry's conventions, and what a collector gets of it.

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from billing.core.records import CACHED, Attempt, Status, UsageRecord
from gateway.telemetry.gen_ai import MOST_SERIES, OTHERS
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.pace import Pace
from tests.support.factories import make_record

REQUEST = "0192f0c0-1111-7222-8333-444455556666"
RECORD = make_record(
    REQUEST, queue_ms=500.0, total_ms=2500.0, output_tokens=5, attempts=(Attempt("openai", "ok", 300.0),)
)
WHO = (
    'gen_ai_operation_name="chat",gen_ai_provider_name="openai",'
    'gen_ai_request_model="auto",gen_ai_response_model="gpt-4o"'
)


def pace_of(*waits: float) -> Pace:
    """Return the pace of a stream whose first token took 0.3 s, and its further chunks so long."""
    pace = Pace(0.3)
    pace.grow()
    for seconds in waits:
        pace.wait(seconds)
        pace.grow()
    return pace


def counted(record: UsageRecord, pace: Pace | None = None) -> set[str]:
    """Return the sums, counts and buckets that a scrape shows after one call."""
    metrics = Metrics()
    metrics.gen_ai.count(record, pace)
    return {line for line in metrics.render().decode().splitlines() if line.startswith("gen_ai_")}


def test_a_stream_is_counted_under_the_names_of_the_conventions() -> None:
    """Tokens by their kind, the operation without its wait for a turn, the first token, the gaps and their mean."""
    shown = counted(RECORD, pace_of(0.1, 0.3, 0.4))
    chunks, per_token = "gen_ai_client_operation_time_per_output_chunk_seconds", "gen_ai_server_time_per_output_token"

    assert shown >= {
        f'gen_ai_client_token_usage_sum{{{WHO},gen_ai_token_type="input"}} 100.0',
        f'gen_ai_client_token_usage_sum{{{WHO},gen_ai_token_type="output"}} 5.0',
        f'gen_ai_client_operation_duration_seconds_sum{{error_type="",{WHO}}} 2.0',
        f"gen_ai_server_time_to_first_token_seconds_sum{{{WHO}}} 0.3",
        f"{per_token}_seconds_sum{{{WHO}}} 0.2",
        f"{chunks}_count{{{WHO}}} 3.0",
        f"{chunks}_sum{{{WHO}}} 0.8",
        f'{chunks}_bucket{{{WHO},le="0.08"}} 0.0',
        f'{chunks}_bucket{{{WHO},le="0.16"}} 1.0',
        f'{chunks}_bucket{{{WHO},le="0.32"}} 2.0',
        f'{chunks}_bucket{{{WHO},le="0.64"}} 3.0',
    }


def test_a_whole_answer_has_no_gaps() -> None:
    """Nobody knows when its first token came: only tokens and the time of all of it are counted."""
    shown = counted(RECORD)

    assert any(line.startswith("gen_ai_client_operation_duration_seconds_count") for line in shown)
    assert not [line for line in shown if "first_token" in line or "per_output" in line]


@pytest.mark.parametrize(
    ("status", "outcome", "error"),
    [
        (Status.FAILED, "status_500", "status_500"),
        (Status.INTERRUPTED, "reset", "reset"),
        (Status.INTERRUPTED, "ok", "interrupted"),
    ],
)
def test_an_operation_that_failed_names_its_error(status: Status, outcome: str, error: str) -> None:
    """The word of the attempt, or that its client left; what is not owed is no tokens, what is not whole no speed."""
    shown = counted(replace(RECORD, status=status, attempts=(Attempt("t", outcome, 1.0),)), pace_of(0.1))

    assert f'gen_ai_client_operation_duration_seconds_count{{error_type="{error}",{WHO}}} 1.0' in shown
    assert any("token_usage" in line for line in shown) is (status is Status.INTERRUPTED)
    assert not [line for line in shown if line.startswith("gen_ai_server")]


def test_an_answer_of_the_cache_asks_no_provider() -> None:
    """It counts for nobody's speed."""
    assert counted(replace(RECORD, attempts=(Attempt("t", CACHED, 0.0),))) == set()


def test_series_are_bounded() -> None:
    """Names beyond the most are counted together, those that were there before go on."""
    metrics = Metrics()
    for number in range(MOST_SERIES + 5):
        metrics.gen_ai.count(replace(RECORD, model_asked=f"m{number}", attempts=()))
    metrics.gen_ai.count(replace(RECORD, model_asked="m0", attempts=()))
    text = metrics.render().decode()
    counts = [
        line for line in text.splitlines() if line.startswith("gen_ai_client_token_usage_count") and "input" in line
    ]

    assert len(counts) == MOST_SERIES + 1
    assert [line.split()[-1] for line in counts if OTHERS in line] == ["5.0"]
    assert [line.split()[-1] for line in counts if '"m0"' in line] == ["2.0"]


async def sent_of(metrics: Metrics) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what a collector gets of metrics, by name, and who sends it."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="SKIPPED: no extra otel; run `make setup`")
    from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics

    from gateway.telemetry.metrics_export import MetricsExport

    kept: list[Any] = []

    class Exporter:
        def export(self, data: Any) -> None:
            kept.append(encode_metrics(data))

    await MetricsExport(metrics, "http://nowhere", Exporter()).send()
    (resource,) = kept[0].resource_metrics
    who = {each.key: each.value.string_value for each in resource.resource.attributes}
    return {metric.name: metric for metric in resource.scope_metrics[0].metrics}, who


def attributes_of(point: Any) -> dict[str, str]:
    return {each.key: each.value.string_value for each in point.attributes}


async def test_a_collector_gets_what_a_scrape_shows() -> None:
    """Histograms, counters and gauges alike; conventions' metrics and attributes under their own names and units, all
    others under Prometheus', and no attribute that is empty."""
    metrics = Metrics()
    metrics.gen_ai.count(RECORD, pace_of(0.1, 0.3, 0.4))
    metrics.close(RECORD)
    metrics.in_flight.set(3)
    sent, who = await sent_of(metrics)
    chunks, duration = sent["gen_ai.client.operation.time_per_output_chunk"], sent["gen_ai.client.operation.duration"]
    (gaps,), (operation,) = chunks.histogram.data_points, duration.histogram.data_points

    assert (chunks.unit, gaps.count, round(gaps.sum, 6)) == ("s", 3, 0.8)
    assert {
        bound: count for bound, count in zip((*gaps.explicit_bounds, 0), gaps.bucket_counts, strict=True) if count
    } == {
        0.16: 1,
        0.32: 1,
        0.64: 1,
    }
    assert attributes_of(operation) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "openai",
        "gen_ai.request.model": "auto",
        "gen_ai.response.model": "gpt-4o",
    }
    assert {
        "gen_ai.client.token.usage",
        "gen_ai.server.time_to_first_token",
        "gen_ai.server.time_per_output_token",
    } <= {*sent}
    calls = sent["tollgate_calls_total"].sum
    assert (calls.is_monotonic, [point.as_double for point in calls.data_points]) == (True, [1.0])
    assert [point.as_double for point in sent["tollgate_calls_in_flight"].gauge.data_points] == [3.0]
    assert who["service.name"] == "tollgate"
    assert who["service.instance.id"]


async def test_a_nonsensical_interval_is_the_usual_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """OTEL_METRIC_EXPORT_INTERVAL counts in milliseconds; what is none stops no gateway."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="SKIPPED: no extra otel; run `make setup`")
    from gateway.telemetry.metrics_export import MetricsExport

    found = []
    for said in ("250", "soon", "-5", ""):
        monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", said)
        found.append(MetricsExport(Metrics(), "http://nowhere", object())._every)

    assert found == [0.25, 60.0, 60.0, 60.0]
