# Metrics under the names of OpenTelemetry's GenAI conventions: Prometheus shows them with underscores and units, and
# metrics_export.py sends them under the conventions' own. Bounds of buckets are those that the conventions ask for.

from __future__ import annotations

from billing.core.records import CHARGED, Status, UsageRecord
from gateway.telemetry.meters import Meters, histogram, histogram_of, make_rows
from gateway.telemetry.pace import CHUNK_SECONDS, Pace
from gateway.telemetry.tracing import OPERATIONS

TOKENS = tuple(4**power for power in range(14))
FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
PER_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
MOST_SERIES = 300  # pairs of a name asked for and a target that have series of their own
OTHERS = "(others)"
LABELS = "gen_ai_operation_name gen_ai_provider_name gen_ai_request_model gen_ai_response_model"

Labels = tuple[str, str, str, str]


class GenAIMetrics:
    """What providers were asked, how much of it and how fast. Of answers from the cache there is nothing to count."""

    token_usage = histogram(
        "gen_ai_client_token_usage", "Tokens charged, of a call", f"{LABELS} gen_ai_token_type", buckets=TOKENS
    )
    duration = histogram(
        "gen_ai_client_operation_duration_seconds",
        "From the first attempt to the end of a call",
        f"{LABELS} error_type",
        buckets=CHUNK_SECONDS,
    )
    chunk = histogram(
        "gen_ai_client_operation_time_per_output_chunk_seconds",
        "Waits for the chunks of a stream after its first: the gaps between tokens",
        LABELS,
        buckets=CHUNK_SECONDS,
    )
    first_token = histogram(
        "gen_ai_server_time_to_first_token_seconds",
        "Until the first token of a stream, by the attempt that brought it",
        LABELS,
        buckets=FIRST,
    )
    per_token = histogram(
        "gen_ai_server_time_per_output_token_seconds",
        "The mean wait for a stream's tokens after the first",
        LABELS,
        buckets=PER_TOKEN,
    )

    def __init__(self, meters: Meters) -> None:
        make_rows(self, meters)
        self._labels: dict[Labels, Labels] = {}

    def count(self, record: UsageRecord, pace: Pace | None = None) -> None:
        """Count a call that has ended; ``pace`` tells how its stream came."""
        if record.is_cached:
            return
        labels = self._labels_of(record)
        if record.attempts:  # none: a line that came from a provider's batch
            error = "" if record.status is Status.ANSWERED else _error_of(record)
            seconds = (record.total_ms - (record.queue_ms or 0.0)) / 1000
            histogram_of(self.duration, *labels, error).observe(seconds)
        if record.status in CHARGED:
            for kind, tokens in (("input", record.input_tokens), ("output", record.output_tokens)):
                if tokens:
                    histogram_of(self.token_usage, *labels, kind).observe(tokens)
        if pace is not None:
            self._count_pace(record, pace, labels)

    def _count_pace(self, record: UsageRecord, pace: Pace, labels: Labels) -> None:
        if any(pace.chunks):
            histogram_of(self.chunk, *labels).add(pace.chunks, pace.total)
        if record.status is not Status.ANSWERED:
            return
        histogram_of(self.first_token, *labels).observe(pace.first)
        if pace.total and record.output_tokens > 1:
            histogram_of(self.per_token, *labels).observe(pace.total / (record.output_tokens - 1))

    def _labels_of(self, record: UsageRecord) -> Labels:
        """Return the labels of a call: beyond the most series those of all others of its operation together."""
        asked = (record.endpoint, record.provider, record.model_asked, record.model_used)
        if (known := self._labels.get(asked)) is None:
            operation = OPERATIONS.get(record.endpoint, record.endpoint)
            known = (operation, *asked[1:])
            if len(self._labels) >= MOST_SERIES:
                return operation, OTHERS, OTHERS, OTHERS
            self._labels[asked] = known
        return known


def _error_of(record: UsageRecord) -> str:
    """Return what failed, as attempts have it; else the status of a call that its client or the policy ended."""
    outcome = record.attempts[-1].outcome
    return record.status.value if outcome == "ok" else outcome
