# Is it alive, can it work, how much has it done, and what can it be asked.

from __future__ import annotations

from typing import Any

from litestar import Response, get

from gateway.accounts.guards import metrics_guard, open_guard
from gateway.core.draining import Drain
from gateway.http.exchange import AnyRequest, part_of
from gateway.http.openapi import describe
from gateway.storage.books import Books
from gateway.storage.readiness import Readiness
from gateway.telemetry.metrics import Metrics


@get("/health/live", guards=[open_guard], summary="Is the process alive")
async def live() -> dict[str, str]:
    """Answer as long as the process can."""
    return {"status": "ok"}


@get(["/health/ready", "/health"], guards=[open_guard], summary="Can it take work")
async def ready(request: AnyRequest) -> Response[dict[str, Any]]:
    """Say of each part whether it answers. Known keys are served without Postgres or Redis: degraded is still ready.

    A gateway that is told to end is not: 503 at once, so that balancers send requests elsewhere.
    """
    body = await health_of(request)
    return Response(body, status_code=503 if body["status"] == "draining" else 200)


async def health_of(request: AnyRequest) -> dict[str, Any]:
    """Return the state of this gateway's parts, in the shape of GET /health/ready."""
    readiness = part_of(request, Readiness)
    books, drain = part_of(request, Books), part_of(request, Drain)
    quotas = "standalone" if books.quotas.is_standalone else "clocks differ" if books.owner.is_astray else "ok"
    parts = {**await readiness.parts(), "quotas": quotas}
    status = "ok" if set(parts.values()) == {"ok"} else "degraded"
    if drain.has_begun:
        status = "draining"
    return {"status": status, "parts": parts, "journal_backlog": books.flusher.backlog}


@get("/metrics", guards=[metrics_guard], summary="Prometheus metrics", media_type="text/plain")
async def metrics(request: AnyRequest) -> Response[bytes]:
    """Return every metric in Prometheus' text format."""
    metrics = part_of(request, Metrics)
    return Response(metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")


@get("/openapi.json", guards=[open_guard], summary="This API", include_in_schema=False, sync_to_thread=False)
def openapi_document(request: AnyRequest) -> Response[bytes]:
    """Return the OpenAPI description of every route."""
    return Response(describe(request.app), media_type="application/json")
