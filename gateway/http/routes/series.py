# GET /v1/series: a team's calls as charts draw them, by the minute, hour or day. GET /admin/series: those of all teams.

from __future__ import annotations

from litestar import Response, get

from gateway.accounts.guards import team_guard, team_reading_guard
from gateway.http.exchange import AnyRequest, answer, caller_of, now_of, part_of, read_parameters, transaction
from gateway.overload.read_limit import ReadLimit
from gateway.reports.series import series
from gateway.reports.series_query import NAMES, read_series_query


@get("/v1/series", guards=[team_guard], summary="Show a team's calls over time", query=NAMES)
async def get_series(request: AnyRequest) -> Response[bytes]:
    """Show metrics of the team's calls over time: a value for each ``step`` (minute, hour, day), in all and by line.

    ``metric``: requests, errors, blocked, refused, cached, tokens, input_tokens, cached_input_tokens, output_tokens,
    cost_usd, saved_usd, first_token_ms, total_ms, or up to six with commas between. ``by``: key, model, provider,
    status, tier, route_reason or code; the ``top`` lines (1 to 50), the rest as one. ``percentile`` (1 to 99.9): of
    times. ``from`` and ``to`` are UTC days or moments. ``key``, ``model``, ``provider``, ``status``, ``tier`` and
    ``route_reason`` choose. Reading counts against no rate of the team.
    """
    caller = caller_of(request)
    part_of(request, ReadLimit).take(caller.team.id)
    asked = read_series_query(read_parameters(request), now_of(request), caller.team.id, for_admin=False)
    async with transaction(request) as connection:
        return answer(await series(connection, asked))


@get(
    "/admin/series",
    guards=[team_reading_guard],
    summary="Show the calls of all teams over time",
    query=(*NAMES, "team_id"),
)
async def get_series_of_all(request: AnyRequest) -> Response[bytes]:
    """Show metrics of the calls of all teams, or of ``team_id``, over time; parameters as of ``/v1/series``, and
    ``metric=gpu_cost_usd``, ``by=team``."""
    query = read_parameters(request)
    asked = read_series_query(query, now_of(request), query.get("team_id"), for_admin=True)
    async with transaction(request) as connection:
        return answer(await series(connection, asked))
