# GET /v1/calls, /v1/calls/{request_id}: a team's calls one by one, refused ones too. /admin/calls: those of all teams.

from __future__ import annotations

from litestar import Response, get
from litestar.params import FromPath

from gateway.accounts.guards import reading_guard, team_guard, team_reading_guard
from gateway.http.exchange import AnyRequest, answer, caller_of, now_of, part_of, read_parameters, transaction
from gateway.overload.read_limit import ReadLimit
from gateway.reports.call_filter import NAMES, read_filter
from gateway.reports.call_list import list_calls, show_call


@get("/v1/calls", guards=[team_guard], summary="List a team's calls", query=NAMES)
async def get_calls(request: AnyRequest) -> Response[bytes]:
    """List the team's calls, newest first: what each cost, which model answered, and why one was refused.

    ``limit`` (1 to 200) and ``after`` (``next`` of the page before) page; ``from`` and ``to`` are UTC days or moments.
    ``key``, ``model``, ``status`` (answered, interrupted, failed, blocked, superseded, refused), ``route_reason``,
    ``user``, ``metadata=KEY:VALUE`` and ``min_cost_usd`` choose. Reading counts against no rate of the team.
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


@get("/admin/calls", guards=[team_reading_guard], summary="List the calls of all teams", query=(*NAMES, "team_id"))
async def get_calls_of_all(request: AnyRequest) -> Response[bytes]:
    """List calls of all teams, or of ``team_id``, newest first; the other parameters are those of ``/v1/calls``."""
    query = read_parameters(request)
    wanted = read_filter(query, now_of(request), query.get("team_id"))
    async with transaction(request) as connection:
        return answer(await list_calls(connection, wanted))


@get("/admin/calls/{request_id:str}", guards=[reading_guard], summary="Show one call of any team")
async def get_call_of_any(request: AnyRequest, request_id: FromPath[str]) -> Response[bytes]:
    """Show all that is known of one call, by the x-request-id of its answer."""
    async with transaction(request) as connection:
        return answer(await show_call(connection, request_id))
