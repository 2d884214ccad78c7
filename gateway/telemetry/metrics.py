# Metrics of a gateway: a table of those that are counted here; those of accounting, targets and OpenTelemetry's
# conventions are in the files beside.

from __future__ import annotations

import asyncio
from typing import Any

from billing.core.records import HEDGE, HEDGE_LOST, UsageRecord
from gateway.calls.call import Call
from gateway.calls.hooks import ReplyHook
from gateway.core.principals import Caller
from gateway.storage.rows_behind import WrittenBehind
from gateway.telemetry.book_metrics import BookMetrics
from gateway.telemetry.gen_ai import GenAIMetrics
from gateway.telemetry.meters import (
    ALL,
    LEAST,
    Meters,
    Rises,
    counter,
    counter_of,
    gauge,
    histogram,
    histogram_of,
    make_rows,
)
from gateway.telemetry.target_metrics import TargetMetrics
from gateway.upstreams.wire.errors import UpstreamFailure
from protocol.errors import ServiceError
from router.catalog.targets import Target

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
OVERHEAD = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 1)
SCORES = tuple(edge / 20 for edge in range(1, 20))
REFRESH = 5.0  # seconds between looks at what others count


class Metrics(ReplyHook):
    """Every metric of the gateway; as a hook it counts how replies end."""

    # name, what it says; labels; upper bounds of a histogram's buckets
    requests = counter("tollgate_http_requests_total", "Answers by path and status", "path status")
    request_seconds = histogram("tollgate_http_request_seconds", "Whole time of a request", "path", buckets=SECONDS)
    refused = counter(
        "tollgate_refused_total", "Answers that refuse what was asked, by whose and why", "team code limit"
    )
    calls = counter("tollgate_calls_total", "Calls that reached an upstream", "team model endpoint status reason")
    route_score = histogram(
        "tollgate_route_score", "Chance that a small model suffices, of calls to auto routes", "reason", buckets=SCORES
    )
    tokens = counter("tollgate_tokens_total", "Tokens charged", "team model kind")
    cost = counter("tollgate_cost_nanousd_total", "Charged, in billionths of a dollar", "team model")
    attempts = counter("tollgate_attempts_total", "Tries at targets", "target outcome")
    first_token = histogram("tollgate_first_token_seconds", "Until the first token", "model", buckets=SECONDS)
    overhead = histogram(
        "tollgate_overhead_seconds", "Time until the first token that was ours, not the upstream's", buckets=OVERHEAD
    )
    in_flight = gauge("tollgate_calls_in_flight", "Calls being answered", of=ALL)
    idempotent = counter(
        "tollgate_idempotent_calls_total", "Calls with an Idempotency-Key, by what became of them", "outcome"
    )
    cache = counter("tollgate_cache_total", "Calls that go by the cache, and what became of their answers", "outcome")
    cache_saved = counter(
        "tollgate_cache_saved_nanousd_total", "What answers from the cache would have cost", "team model"
    )
    kv_prompt_tokens = counter(
        "tollgate_kv_prompt_tokens_total",
        "Prompt tokens at replicas that tell what they have cached: all, expected to be found, and found",
        "model kind",
    )
    canary_rollbacks = counter(
        "tollgate_canary_rollbacks_total", "Canaries that were withdrawn, by what they did worse", "name reason"
    )
    continuations = counter(
        "tollgate_continuations_total", "Replies of our own engine that broke in mid-stream", "model outcome"
    )
    hedges = counter(
        "tollgate_hedges_total", "Second attempts beside a first that was slow, by the second's model", "model outcome"
    )
    safety_findings = counter(
        "tollgate_safety_findings_total",
        "What the content policy found, by where and by what became of it",
        "stage outcome finding",
    )
    safety_refused = counter(
        "tollgate_safety_refused_total", "Calls of paused keys, and answers that models refused to give", "reason"
    )
    safety_checker = counter(
        "tollgate_safety_checker_calls_total", "Questions to the outside checker, by how they ended", "outcome"
    )
    safety_reader = counter(
        "tollgate_safety_reader_texts_total", "Windows of texts for the encoder, by how they ended", "outcome"
    )
    safety_wait = histogram(
        "tollgate_safety_wait_seconds", "A first token's wait for the verdict on its request", buckets=OVERHEAD
    )
    queue_wait = histogram(
        "tollgate_queue_wait_seconds", "Waited for a turn, by how it ended", "model tier outcome", buckets=SECONDS
    )
    shed = counter("tollgate_shed_total", "Calls refused because every target was busy", "model tier reason")
    connections_refused = counter(
        "tollgate_connections_refused_total", "Connections closed at once: too many of one client were open"
    )
    config_reloads = counter("tollgate_config_reloads_total", "Times that the configuration was read again", "outcome")
    config_loaded = gauge(
        "tollgate_config_loaded_timestamp_seconds",
        "When the configuration was read that is gone by; of several workers the oldest",
        of=LEAST,
    )
    rows_lost = counter(
        "tollgate_rows_lost_total", "Rows of tables beside the accounting that were never written", "rows"
    )

    def __init__(self) -> None:
        self.registry = meters = Meters()
        make_rows(self, meters)
        self.books, self.targets, self.gen_ai = BookMetrics(meters), TargetMetrics(meters), GenAIMetrics(meters)
        self._rises = Rises()
        self._rows_behind: tuple[WrittenBehind[Any], ...] = ()
        for outcome in ("ok", "refused"):
            counter_of(self.config_reloads, outcome)

    async def run(self) -> None:
        """Refresh every few seconds, so that a scrape that another worker process answers sees this one's too."""
        while True:
            self.refresh()
            await asyncio.sleep(REFRESH)

    def refresh(self) -> None:
        """Take over what is counted elsewhere."""
        self.books.refresh()
        self.targets.refresh()
        for rows in self._rows_behind:
            self._rises.follow(self.rows_lost, rows.lost, rows.what)

    def follow_rows(self, *rows: WrittenBehind[Any]) -> None:
        """Show from now on what these have lost."""
        self._rows_behind = rows

    def count_reload(self, is_ok: bool, now: float) -> None:
        """Count a reload; ``now`` in unix seconds."""
        counter_of(self.config_reloads, "ok" if is_ok else "refused").inc()
        if is_ok:
            self.config_loaded.set(now)

    def count_hit(self, record: UsageRecord, expected: float) -> None:
        """Count how much of a call's prompt was found in its replica's cache, and what share was expected to be."""
        kinds = {
            "all": record.input_tokens,
            "expected": round(expected * record.input_tokens),
            "found": record.cached_input_tokens,
        }
        for kind, tokens in kinds.items():
            counter_of(self.kv_prompt_tokens, record.model_used, kind).inc(tokens)

    def count_rollback(self, name: str, reason: str) -> None:
        """Count a canary that was withdrawn."""
        counter_of(self.canary_rollbacks, name, reason).inc()

    def count_refusal(self, caller: object, error: ServiceError) -> None:
        """Count what we refuse ourselves, by status or in a stream; what upstreams do is counted with the attempts.

        ``caller``: who asked, where that is known.
        """
        if not isinstance(error, UpstreamFailure):
            team = caller.team.id if isinstance(caller, Caller) else ""
            counter_of(self.refused, team, error.code or str(error.status), error.limit).inc()

    def watch(self, call: Call, target: Target) -> ReplyHook:
        """Watch a reply: all of them alike, and only how they end."""
        return self

    def close(self, record: UsageRecord) -> None:
        """Count a reply that has ended."""
        team, model = record.team_id, record.model_used
        counter_of(self.calls, team, model, record.endpoint, str(record.status), record.route_reason).inc()
        if record.complexity is not None and record.route_reason.startswith("auto_"):
            histogram_of(self.route_score, record.route_reason).observe(record.complexity)
        counter_of(self.tokens, team, model, "input").inc(record.input_tokens)
        counter_of(self.tokens, team, model, "output").inc(record.output_tokens)
        counter_of(self.cost, team, model).inc(record.cost_nanousd)
        if record.saved_nanousd:
            counter_of(self.cache_saved, team, model).inc(record.saved_nanousd)
        for attempt in record.attempts:
            if attempt.outcome == HEDGE_LOST and record.route_reason != HEDGE:
                continue  # counted with the row that it has of its own
            counter_of(self.attempts, attempt.target, attempt.outcome).inc()
        if record.first_token_ms is not None:
            histogram_of(self.first_token, model).observe(record.first_token_ms / 1000)
            waited = sum([attempt.ms for attempt in record.attempts]) + (record.queue_ms or 0.0)
            ours = record.first_token_ms - waited
            if ours >= 0:  # else a part of the waiting came later: the reply was continued elsewhere
                self.overhead.observe(ours / 1000)

    def render(self) -> bytes:
        """Return everything in Prometheus' text format, of all worker processes together."""
        self.refresh()
        return self.registry.render()
