# /admin/corrections: amounts that admins record besides the calls' usage.

from __future__ import annotations

from litestar import Response, get, post

from billing.ledger.corrections import list_corrections
from gateway.accounts.guards import finance_guard, reading_guard
from gateway.accounts.serializers import list_view
from gateway.accounts.teams import check_team
from gateway.core.clock import Clock, read_day
from gateway.http.current_edition import edition_of
from gateway.http.exchange import AnyRequest, act_of, answer, part_of, read_query, transaction
from gateway.reports.corrections import NewCorrection, book_correction, correction_view, read_uuid
from protocol.decoding import decode


@post("/admin/corrections", guards=[finance_guard], status_code=201, summary="Book a correction", takes=NewCorrection)
async def post_correction(request: AnyRequest) -> Response[bytes]:
    """Record tokens and dollars, signed, besides a team's calls of a UTC day. Entries are only added, never changed."""
    new, models = decode(await request.body(), NewCorrection), edition_of(request).catalog.models
    async with transaction(request) as connection:
        booked = await book_correction(connection, new, act_of(request), part_of(request, Clock), models)
    return answer(correction_view(booked), 201)


@get(
    "/admin/corrections",
    guards=[reading_guard],
    summary="List the corrections",
    query=("team_id", "from", "to", "before", "limit"),
)
async def get_corrections(request: AnyRequest) -> Response[bytes]:
    """List corrections, newest first: of one team with ``team_id``, of corrected days from ``from`` to ``to``.

    ``before``: the last id already seen.
    """
    query, limit = read_query(request)
    first, last = (read_day(query[name], name) if name in query else None for name in ("from", "to"))
    before = read_uuid(query["before"], "before") if "before" in query else None
    async with transaction(request) as connection:
        if "team_id" in query:
            await check_team(connection, query["team_id"])
        found = await list_corrections(
            connection, team_id=query.get("team_id"), first=first, last=last, before=before, limit=limit + 1
        )
    return answer(list_view([correction_view(one) for one in found], limit))
