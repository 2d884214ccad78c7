# The engine's load in the header of an answer, for balancers that ask for it there: Open Request Cost Aggregation
# (ORCA, the specification of Envoy and gRPC, "In-band reporting"), with the metrics that vLLM names in it.

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from gpu_backend.step.messages import LoadReport

ASKS, TELLS = b"endpoint-load-metrics-format", b"endpoint-load-metrics"


def load_headers(headers: Iterable[tuple[bytes, bytes]], load: LoadReport | None) -> list[tuple[bytes, bytes]]:
    """Return the header that a request's ``headers`` ask for: as text, as JSON, or none; another format is ignored."""
    asked = next((value.strip().lower() for name, value in headers if name == ASKS), b"")
    if load is None or asked not in (b"text", b"json"):
        return []
    metrics = {
        "kv_cache_usage_perc": load.kv_utilization,
        "num_requests_waiting": float(load.queue_depth),
        "num_requests_running": float(load.running),
    }
    if asked == b"json":
        return [(TELLS, b"JSON " + msgspec.json.encode({"named_metrics": metrics}))]
    return [(TELLS, b"TEXT " + ", ".join(f"named_metrics.{name}={value}" for name, value in metrics.items()).encode())]
