# GET /admin/instances: the replicas of our own engine as they were last seen.

from __future__ import annotations

from typing import Any

from litestar import Response, get

from billing.ledger.instance_samples import Instance, last_looks
from gateway.accounts.guards import reading_guard
from gateway.accounts.serializers import dollars, moment
from gateway.core.clock import Clock
from gateway.fleet.instances import STALE_AFTER
from gateway.http.current_edition import edition_of
from gateway.http.exchange import AnyRequest, answer, part_of, read_parameters, transaction
from router.catalog.catalog import Catalog

REMEMBERED = 3600.0  # seconds for which a replica that no gateway sees any more is still shown


@get("/admin/instances", guards=[reading_guard], summary="Show the engine's replicas")
async def get_instances(request: AnyRequest) -> Response[bytes]:
    """Show every replica that was seen in the last hour, as it was last seen; ``stale``: it may be gone."""
    edition = edition_of(request)
    clock = part_of(request, Clock)
    read_parameters(request)
    now = clock.now()
    async with transaction(request) as connection:
        seen = await last_looks(connection, now - REMEMBERED)
    return answer({"instances": [instance_view(one, now, edition.catalog) for one in without_replaced(seen, now)]})


def without_replaced(seen: list[Instance], now: float) -> list[Instance]:
    """Leave out the replicas that are gone and whose address another one has taken over."""
    taken = {one.endpoint for one in seen if not _is_stale(one, now)}
    return [one for one in seen if not _is_stale(one, now) or one.endpoint not in taken]


def instance_view(one: Instance, now: float, catalog: Catalog) -> dict[str, Any]:
    """Return a replica; rates are over its last ten seconds, seconds since its start."""
    load = one.load
    model = catalog.models.get(one.model) if one.model is not None else None
    gpu_hour = model.gpu_hour_nanousd if model is not None else None
    return {
        "object": "instance",
        "instance_id": one.instance_id,
        "model_id": load["model_id"],
        "gpu_node_id": load["gpu_node_id"] or _host_of(one.endpoint),
        "status": load["status"],
        "queue_depth": load["queue_depth"],
        "memory_utilization_pct": round(100 * load["kv_utilization"], 2),
        "requests_per_second": load["requests_per_second"],
        "tokens_per_second": load["tokens_per_second"],
        "prefix_hit_rate": load["prefix_hit_rate"],
        "running": load["running"],
        "free_blocks": load["free_blocks"],
        "total_blocks": load["total_blocks"],
        "provider": one.provider,
        "endpoint": one.endpoint,
        "model": one.model,
        "gpus": one.gpus,
        "gpu_hour_usd": None if gpu_hour is None else dollars(gpu_hour),
        "uptime_seconds": load["uptime_seconds"],
        "busy_seconds": load["busy_seconds"],
        "first_seen": moment(one.first_seen),
        "seen_at": moment(one.last_seen),
        "stale": _is_stale(one, now),
    }


def _is_stale(one: Instance, now: float) -> bool:
    return now - one.last_seen.timestamp() > STALE_AFTER


def _host_of(endpoint: str) -> str:
    return endpoint.rpartition(" ")[2].partition("://")[2].partition("/")[0]
