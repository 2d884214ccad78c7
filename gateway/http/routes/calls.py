# GET /v1/calls, /v1/calls/{request_id}: a team's calls one by one, refused ones too. /admin/calls: those of all teams.
# GET /v1/series, /admin/series: the same as charts draw them, by the minute, hour or day.

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from litestar import Response, get
from litestar.params import FromPath
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.accounts.guards import team_admin_guard, team_guard, team_reading_guard
from gateway.accounts.teams import check_team
from gateway.contents.store import ContentStore
from gateway.core.clock import Clock
from gateway.dialects.options import check_endpoint
from gateway.http.exchange import (
    AnyRequest,
    act_of,
    admin_of,
    answer,
    caller_of,
    now_of,
    own_act,
    part_of,
    read_flag,
    read_parameters,
    transaction,
)
from gateway.http.routes.admin.breakers import breakers_view
from gateway.http.routes.health import health_of
from gateway.overload.read_limit import ReadLimit
from gateway.reports.call_filter import NAMES, read_filter
from gateway.reports.call_list import list_calls, show_call
from gateway.reports.series import NAMES as SERIES_NAMES
from gateway.reports.series import read_series_query, series
from gateway.webhooks.budget_alerts import reached_budgets


@get("/v1/calls", guards=[team_guard], summary="List a team's calls", query=NAMES)
async def get_calls(request: AnyRequest) -> Response[bytes]:
    """List the team's calls, newest first: what each cost, which model answered, and why one was refused.

    ``limit`` (1 to 200) and ``after`` (``next`` of the page before) page; ``from`` and ``to`` are UTC days or moments.
    ``key``, ``model``, ``status`` (answered, interrupted, failed, blocked, superseded, refused), ``route_reason``,
    ``user``, ``metadata=KEY:VALUE``, ``min_cost_usd`` and ``min_ms`` choose. Reading counts against no rate of a team.
    """
    caller = caller_of(request)
    part_of(request, ReadLimit).take(caller.team.id)
    wanted = read_filter(read_parameters(request), now_of(request), caller.team.id)
    async with transaction(request) as connection:
        return answer(await list_calls(connection, wanted))


@get("/v1/calls/{request_id:str}", guards=[team_guard], summary="Show one call")
async def get_call(request: AnyRequest, request_id: FromPath[str]) -> Response[bytes]:
    """Show all that is known of one of the team's calls, by the x-request-id of its answer."""
    caller = caller_of(request)
    part_of(request, ReadLimit).take(caller.team.id)
    async with transaction(request) as connection:
        return answer(await show_call(connection, request_id, caller.team.id))


@get("/v1/calls/{request_id:str}/contents", guards=[team_guard], summary="Read what one call asked and was answered")
async def get_contents(request: AnyRequest, request_id: FromPath[str]) -> Response[bytes]:
    """Show what one of the team's calls asked and was answered, where its team has contents kept. Each reading stands
    in the audit log."""
    caller = caller_of(request)
    part_of(request, ReadLimit).take(caller.team.id)
    act, may_read = own_act(request, f"key:{caller.key_id}"), partial(check_endpoint, caller)
    store = part_of(request, ContentStore)
    return answer(await store.read(request_id, act, now_of(request), caller.team.id, may_read))


@get("/admin/calls", guards=[team_reading_guard], summary="List the calls of all teams", query=(*NAMES, "team_id"))
async def get_calls_of_all(request: AnyRequest) -> Response[bytes]:
    """List calls of all teams, or of ``team_id``, newest first; the other parameters are those of ``/v1/calls``."""
    query = read_parameters(request)
    wanted = read_filter(query, now_of(request), query.get("team_id"))
    async with transaction(request) as connection:
        await check_team(connection, wanted.team_id)
        return answer(await list_calls(connection, wanted))


@get("/admin/calls/{request_id:str}", guards=[team_reading_guard], summary="Show one call of any team")
async def get_call_of_any(request: AnyRequest, request_id: FromPath[str]) -> Response[bytes]:
    """Show all that is known of one call, by the x-request-id of its answer; to a team's admin of that team's calls."""
    async with transaction(request) as connection:
        return answer(await show_call(connection, request_id, admin_of(request).team_id))


@get(
    "/admin/calls/{request_id:str}/contents",
    guards=[team_admin_guard],
    summary="Read what one call of any team asked and was answered",
)
async def get_contents_of_any(request: AnyRequest, request_id: FromPath[str]) -> Response[bytes]:
    """Show what one call asked and was answered, to admins and to its team's admin, where its team has contents kept.
    Each reading stands in the audit log."""
    own = admin_of(request).team_id
    return answer(await part_of(request, ContentStore).read(request_id, act_of(request), now_of(request), own))


@get("/v1/series", guards=[team_guard], summary="Show a team's calls over time", query=(*SERIES_NAMES, "budgets"))
async def get_series(request: AnyRequest) -> Response[bytes]:
    """Show metrics of the team's calls over time: a value for each ``step`` (minute, hour, day), in all and by line.

    ``metric``: requests, errors, blocked, refused, cached, tokens, input_tokens, cached_input_tokens, output_tokens,
    cost_usd, saved_usd, first_token_ms, total_ms, or up to six with commas between. ``by``: key, model, provider,
    status, tier, route_reason or code; the ``top`` lines (1 to 50), the rest as one. ``percentile`` (1 to 99.9): of
    times. ``from`` and ``to`` are UTC days or moments; ``compare=before`` adds the totals of as much time before.
    ``key``, ``model``, ``provider``, ``status``, ``tier`` and ``route_reason`` choose. ``budgets=true`` adds the
    ``budgets`` of which 80 or 100 % is used. Reading counts against no rate of the team.
    """
    caller = caller_of(request)
    part_of(request, ReadLimit).take(caller.team.id)
    query = read_parameters(request)
    asked = read_series_query(query, now_of(request), caller.team.id, for_admin=False)
    async with transaction(request) as connection:
        return answer(await series(connection, asked) | await _budgets(request, connection, query, caller.team.id))


@get(
    "/admin/series",
    guards=[team_reading_guard],
    summary="Show the calls of all teams over time",
    query=(*SERIES_NAMES, "team_id", "health", "budgets"),
)
async def get_series_of_all(request: AnyRequest) -> Response[bytes]:
    """Show metrics of the calls of all teams, or of ``team_id``, over time; parameters as of ``/v1/series``, and
    ``metric=gpu_cost_usd``, ``by=team``. ``health=true`` adds ``health``, as of /health/ready, and the ``breakers``
    that are not closed; not to a team's admin."""
    query = read_parameters(request)
    with_health = read_flag(query, "health") and admin_of(request).team_id is None
    asked = read_series_query(query, now_of(request), query.get("team_id"), for_admin=admin_of(request).sees_costs)
    async with transaction(request) as connection:
        found = await series(connection, asked)  # first: it sets the transaction's isolation
        await check_team(connection, query.get("team_id"))
        found |= await _budgets(request, connection, query, query.get("team_id"))
    if with_health:
        found["health"] = await health_of(request)
        found["breakers"] = [one for one in breakers_view(request) if one["state"] != "closed"]
    return answer(found)


async def _budgets(
    request: AnyRequest, connection: AsyncConnection, query: Mapping[str, str], team_id: str | None
) -> dict[str, Any]:
    """Return the budgets that are nearly used, or used up, where they are asked for."""
    if not read_flag(query, "budgets"):
        return {}
    return {"budgets": await reached_budgets(connection, part_of(request, Clock).today(), team_id)}
