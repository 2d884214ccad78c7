# GET /admin/fleet/targets: how many replicas each pool should have, for whatever starts and stops them.

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from litestar import Response, get

from gateway.accounts.guards import reading_guard
from gateway.accounts.serializers import moment
from gateway.core.clock import Clock
from gateway.fleet.autoscaler import EVERY
from gateway.fleet.autoscaling import Autoscaler, PoolTarget
from gateway.http.exchange import AnyRequest, answer, part_of, read_parameters

STALE_AFTER = 6 * EVERY  # seconds without a decision


@get("/admin/fleet/targets", guards=[reading_guard], summary="Show how many replicas each pool should have")
async def get_targets(request: AnyRequest) -> Response[bytes]:
    """Show the ``target`` of every pool with ``scaling``, decided once for all gateways, and its ``reason``.

    ``target`` is null until the first decision. ``stale``: none was made for a minute, as while Redis or Postgres is
    away; the target is then the last one.
    """
    read_parameters(request)
    now = part_of(request, Clock).now()
    return answer({"targets": [target_view(one, now) for one in await part_of(request, Autoscaler).read()]})


def target_view(one: PoolTarget, now: float) -> dict[str, Any]:
    """Return what was decided of a pool."""
    state, rules = one.state, one.rules
    view: dict[str, Any] = {
        "object": "fleet_target",
        "pool": one.pool,
        "target": None,
        "ready": one.ready,
        "min": rules.min,
        "max": rules.max,
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
        "stale": now - state.decided_at > STALE_AFTER,
        "calls_per_second": round(state.rate, 3),
        "predicted_ttft_seconds": None if ttft is None else round(ttft, 3),
        "changed_at": moment(datetime.fromtimestamp(state.changed_at, UTC)),
        "decided_at": moment(datetime.fromtimestamp(state.decided_at, UTC)),
    }
