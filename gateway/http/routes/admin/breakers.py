# /admin/breakers: which targets are called, and why not; opening one by hand, and resetting it.

from __future__ import annotations

from typing import Any

from litestar import Response, get, post
from litestar.params import FromPath

from gateway.accounts.guards import operating_guard, reading_guard
from gateway.accounts.serializers import moment_of
from gateway.core.clock import Clock
from gateway.http.exchange import AnyRequest, act_of, answer, part_of, read_parameters, transaction
from gateway.storage.audit_log import record_act
from gateway.upstreams.resilience.breakers import Breakers
from gateway.upstreams.resilience.shared import Watched
from protocol.errors import NotFound


@get("/admin/breakers", guards=[reading_guard], summary="Show the breakers")
async def get_breakers(request: AnyRequest) -> Response[bytes]:
    """Show the breaker of every model at every endpoint, as all gateways know it.

    ``requests`` and ``failures`` are those of the window; other gateways' are in them once anything failed.
    ``shared`` is false while Redis is away and this gateway uses its own counts alone.
    """
    read_parameters(request)
    return answer({"breakers": breakers_view(request), "shared": not part_of(request, Breakers).is_alone})


@post("/admin/breakers/{breaker_id:str}/open", guards=[operating_guard], status_code=200, summary="Open a breaker")
async def post_open(request: AnyRequest, breaker_id: FromPath[str]) -> Response[bytes]:
    """Send this model at this endpoint no calls, from any gateway, until its breaker is reset."""
    breakers, clock = part_of(request, Breakers), part_of(request, Clock)
    watched = find_breaker(breakers, breaker_id)
    await write_down(request, "breaker.opened", watched)
    await breakers.force_open(watched, f"opened by {act_of(request).actor}")
    return answer(breaker_view(breakers, clock, watched))


@post("/admin/breakers/{breaker_id:str}/reset", guards=[operating_guard], status_code=200, summary="Reset a breaker")
async def post_reset(request: AnyRequest, breaker_id: FromPath[str]) -> Response[bytes]:
    """Close a breaker, reset its counts, and use again the keys that were in cooldown at its endpoint."""
    breakers, clock = part_of(request, Breakers), part_of(request, Clock)
    watched = find_breaker(breakers, breaker_id)
    await write_down(request, "breaker.reset", watched)
    await breakers.reset(watched, f"reset by {act_of(request).actor}")
    return answer(breaker_view(breakers, clock, watched))


def breakers_view(request: AnyRequest) -> list[dict[str, Any]]:
    """Return the breaker of every model at every endpoint."""
    breakers, clock = part_of(request, Breakers), part_of(request, Clock)
    return [breaker_view(breakers, clock, watched) for watched in breakers.all()]


def find_breaker(breakers: Breakers, breaker_id: str) -> Watched:
    """Return the target that an id stands for. Raises NotFound."""
    for watched in breakers.all():
        if watched.id == breaker_id:
            return watched
    raise NotFound(
        f"There is no breaker '{breaker_id[:100]}'. GET /admin/breakers lists them.",
        param="breaker_id",
        code="breaker_not_found",
    )


async def write_down(request: AnyRequest, action: str, watched: Watched) -> None:
    """Enter an act into the audit log."""
    provider, endpoint, model = watched.labels
    details = {"provider": provider, "endpoint": endpoint, "model": model}
    async with transaction(request) as connection:
        await record_act(connection, act_of(request), action, subject=watched.id, details=details)


def breaker_view(breakers: Breakers, clock: Clock, watched: Watched) -> dict[str, Any]:
    """Return a breaker as admins see it; times are UTC, ``null`` where there is none."""
    now, moment = clock.monotonic(), clock.now()
    breaker, condition = watched.breaker, watched.breaker.condition
    counted = breaker.tallies(now)[-1]
    aside = breakers.keys_aside(watched)
    provider, endpoint, model = watched.labels
    has_retry = condition.is_open and not condition.is_forced
    return {
        "object": "breaker",
        "id": watched.id,
        "provider": provider,
        "endpoint": endpoint,
        "region": watched.target.endpoint.region,
        "model": model,
        "state": breaker.state(now).value,
        "forced": condition.is_forced,
        "reason": condition.reason or None,
        "requests": counted.requests,
        "failures": counted.failures,
        "opened_at": moment_of(moment - now + condition.opened_at) if condition.is_open else None,
        "retry_at": moment_of(moment - now + condition.retry_at) if has_retry else None,
        "keys_set_aside": [{"reason": one.why, "until": moment_of(moment - now + one.until)} for one in aside],
    }
