# GET /admin/instances: the replicas of our own engine as they were last seen, and as they announce themselves.

from __future__ import annotations

from collections.abc import Container
from typing import Any

from litestar import Response, get

from billing.ledger.instance_samples import Instance, last_looks
from gateway.accounts.guards import reading_guard
from gateway.accounts.serializers import dollars, moment, moment_of, shown
from gateway.core.clock import Clock
from gateway.fleet.discovery import Discovery, Replica
from gateway.fleet.instances import STALE_AFTER
from gateway.fleet.membership import LOST
from gateway.fleet.rollouts import Rolling
from gateway.http.current_edition import edition_of
from gateway.http.exchange import AnyRequest, answer, part_of, read_parameters, transaction
from protocol.serving.announcements import ACTIVE
from router.catalog.catalog import Catalog

ANNOUNCED = (
    *("pool", "state", "takes_calls", "reason", "version", "base_url", "block_size", "max_model_len", "kv_events"),
    *("adapters_left_out", "heartbeat_at", "revision", "share"),
)
MEASURED = (
    *("queue_depth", "requests_per_second", "tokens_per_second", "prefix_hit_rate", "running", "free_blocks"),
    *("total_blocks", "uptime_seconds", "busy_seconds"),
)
LOAD = ("model_id", "status", *MEASURED)  # that is shown as a replica tells it
OF_LATER_ENGINES = ("roofline_share", "fairness")  # null where a replica does not tell them
LOOKED_AT = (
    *MEASURED,
    *OF_LATER_ENGINES,
    "memory_utilization_pct",
    "endpoint",
    "model",
    "gpus",
    "gpu_hour_usd",
    "first_seen",
    "seen_at",
)
REMEMBERED = 3600.0  # seconds for which a replica that no gateway sees any more is still shown


@get("/admin/instances", guards=[reading_guard], summary="Show the engine's replicas")
async def get_instances(request: AnyRequest) -> Response[bytes]:
    """Show every replica that was seen in the last hour, as it was last seen; ``stale``: it may be gone.

    Replicas of a pool that announce themselves show their ``state`` by their heartbeat, ``takes_calls``, and why one
    does not (``reason``), as this process knows them; the load of one that was not yet looked at is null. ``share``: of
    its pool's conversations, that its version (``revision``) answers, while another one is rolled out. ``rollouts``:
    what each of these is at, and why it was rolled back.
    """
    edition, now = edition_of(request), part_of(request, Clock).now()
    read_parameters(request)
    async with transaction(request) as connection:
        seen = await last_looks(connection, now - REMEMBERED)
    pools = frozenset(edition.settings.fleet.pools) if edition.settings.fleet is not None else frozenset()
    discovery = part_of(request, Discovery)
    announced = {one.member.said.instance_id: one for one in discovery.replicas()}
    asked = {each.base_url for provider in edition.settings.providers.values() for each in provider.endpoints}
    views = [
        instance_view(one, now, edition.catalog)
        | (
            _announced(announced.pop(one.instance_id))
            if one.instance_id in announced
            else listed_view(one, now, pools, asked)
        )
        for one in without_replaced(seen, now)
    ]
    views += [_unseen_view(one) | _announced(one) for one in announced.values()]
    rollouts = [_rollout_view(pool, one, now) for pool, one in sorted(discovery.rollouts().items())]
    return answer({"instances": views, "rollouts": rollouts})


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
        **shown(one, "instance_id", "provider", "endpoint", "model", "gpus", "first_seen"),
        **{name: load[name] for name in LOAD},
        **{name: load.get(name) or None for name in OF_LATER_ENGINES},
        "gpu_node_id": load["gpu_node_id"] or _host_of(one.endpoint),
        "memory_utilization_pct": round(100 * load["kv_utilization"], 2),
        "gpu_hour_usd": None if gpu_hour is None else dollars(gpu_hour),
        "seen_at": moment(one.last_seen),
        "stale": _is_stale(one, now),
    }


def _announced(one: Replica) -> dict[str, Any]:
    """Return what a replica says of itself, and what this process makes of it."""
    said = one.member.said
    return {
        **shown(said, "pool", "version", "base_url", "block_size", "max_model_len", "adapters_left_out"),
        **shown(one, "state", "takes_calls", "revision", "share"),
        "reason": one.member.refused,
        "kv_events": None if said.kv_events is None else said.kv_events.endpoint,
        "heartbeat_at": moment_of(one.member.heard_on),
    }


def listed_view(one: Instance, now: float, pools: Container[str], asked: Container[str]) -> dict[str, Any]:
    """Return the same of a replica that the configuration names, or that is gone. ``asked``: addresses that are."""
    base_url = one.endpoint.rpartition(" ")[2]
    state = LOST if _is_stale(one, now) else one.load["status"]
    return {
        **dict.fromkeys(ANNOUNCED),
        "pool": one.provider if one.provider in pools else None,
        "state": state,
        "takes_calls": state == ACTIVE and base_url in asked,
        "base_url": base_url,
    }


def _unseen_view(one: Replica) -> dict[str, Any]:
    """Return what ``instance_view`` would, of a replica that was not yet looked at."""
    said = one.member.said
    return {
        **dict.fromkeys(LOOKED_AT),
        "object": "instance",
        "instance_id": said.instance_id,
        "model_id": said.model,
        "gpu_node_id": _host_of(said.base_url),
        "status": one.state,
        "provider": said.pool,
        "stale": one.state == LOST,
    }


def _rollout_view(pool: str, one: Rolling, now: float) -> dict[str, Any]:
    """Return what a pool's rollout is at."""
    return {
        "object": "fleet_rollout",
        "pool": pool,
        **shown(one, "revision", "kept", "share"),
        "state": one.state_at(now),
        "since": moment_of(one.since),
        "reason": one.why(now),
    }


def _is_stale(one: Instance, now: float) -> bool:
    return now - one.last_seen.timestamp() > STALE_AFTER


def _host_of(endpoint: str) -> str:
    return endpoint.rpartition(" ")[2].partition("://")[2].partition("/")[0]
