# /admin/fleet/targets: how many replicas each pool should have, for whatever starts and stops them; set by hand, too.

from __future__ import annotations

from typing import Any

from litestar import Response, get, post
from litestar.params import FromPath
from msgspec import Struct

from billing.quotas.rate_wire import REDIS_AWAY
from gateway.accounts.guards import operating_guard, reading_guard
from gateway.accounts.serializers import moment_of, shown
from gateway.core.clock import Clock
from gateway.fleet.autoscaler import EVERY
from gateway.fleet.autoscaling import Autoscaler, PoolTarget
from gateway.http.exchange import AnyRequest, act_of, answer, part_of, read_parameters, transaction
from gateway.storage.audit_log import record_act
from protocol.decoding import decode
from protocol.errors import NotFound, Overloaded, invalid_value

UNDECIDED_AFTER = 6 * EVERY  # seconds without a decision


class NewTarget(Struct, frozen=True):
    """How many replicas a pool should have; null: as many as its calls need."""

    target: int | None


@get("/admin/fleet/targets", guards=[reading_guard], summary="Show how many replicas each pool should have")
async def get_targets(request: AnyRequest) -> Response[bytes]:
    """Show the ``target`` of every pool with ``scaling``, decided once for all gateways, and its ``reason``.

    ``target`` is null until the first decision. ``stale``: none was made for a minute, as while Redis or Postgres is
    away; the target is then the last one. ``rolled_back``: the revision that `tollgate fleet up` gave up, and why.
    """
    read_parameters(request)
    now = part_of(request, Clock).now()
    return answer({"targets": [target_view(one, now) for one in await part_of(request, Autoscaler).read()]})


@post(
    "/admin/fleet/targets/{pool:str}",
    guards=[operating_guard],
    status_code=200,
    summary="Set how many replicas a pool should have",
    takes=NewTarget,
)
async def post_target(request: AnyRequest, pool: FromPath[str]) -> Response[bytes]:
    """Set the ``target`` of a pool with ``scaling``, within its ``min`` and ``max``, until it is set to null: then it
    follows the demand again. All gateways know it."""
    autoscaler, now = part_of(request, Autoscaler), part_of(request, Clock).now()
    target = decode(await request.body(), NewTarget).target
    one = _target_of(await autoscaler.read(), pool)
    if target is not None and not one.rules.min <= target <= one.rules.max:
        raise invalid_value("target", f"is a whole number from {one.rules.min} to {one.rules.max}, or null")
    async with transaction(request) as connection:
        await record_act(connection, act_of(request), "fleet.scaled", subject=pool, details={"target": target})
    try:
        await autoscaler.set_target(pool, target)
    except REDIS_AWAY as exc:
        raise Overloaded("Redis does not answer: the target stays as it was.") from exc
    return answer(target_view(_target_of(await autoscaler.read(), pool), now))


def _target_of(found: list[PoolTarget], pool: str) -> PoolTarget:
    for one in found:
        if one.pool == pool:
            return one
    known = ", ".join(one.pool for one in found) or "none"
    words = f"There is no pool '{pool[:100]}' with scaling; those that have it: {known}."
    raise NotFound(words, param="pool", code="pool_not_found")


def target_view(one: PoolTarget, now: float) -> dict[str, Any]:
    """Return what was decided of a pool."""
    state, rules = one.state, one.rules
    view: dict[str, Any] = {
        "object": "fleet_target",
        **shown(one, "pool", "ready", "rolled_back"),
        **shown(rules, "min", "max"),
        "target": None,
        "reason": "not decided yet",
        "stale": True,
        **dict.fromkeys(("calls_per_second", "predicted_ttft_seconds", "changed_at", "decided_at")),
    }
    if state is None:
        return view
    ttft = state.predicted_ttft
    return view | {
        "target": min(max(state.target, rules.min), rules.max),
        "reason": state.reason,
        "stale": now - state.decided_at > UNDECIDED_AFTER,
        "calls_per_second": round(state.rate, 3),
        "predicted_ttft_seconds": None if ttft is None else round(ttft, 3),
        "changed_at": moment_of(state.changed_at),
        "decided_at": moment_of(state.decided_at),
    }
