# What all teams used on some days, for operators of the deployment: sums over every team, the dearest lines, and the
# teams themselves a page at a time. Postgres adds up; what is read here does not grow with the number of teams.

from __future__ import annotations

from datetime import date
from typing import Any

from sqlalchemy.ext.asyncio import AsyncConnection

from billing.ledger.statements import GroupBy, Line, Totals, period
from gateway.accounts.serializers import list_view, team_view
from gateway.accounts.teams import list_teams
from gateway.reports.usage_analysis import see_one_moment
from gateway.reports.usage_report import corrections_view, total_view

DEAREST = 20  # lines of a team and model; the rest is one more


async def admin_usage(
    connection: AsyncConnection, first: date, last: date, *, after: str | None, limit: int
) -> dict[str, Any]:
    """Return what all teams used from ``first`` to ``last``, in the shape of GET /admin/usage.

    The connection's transaction has asked nothing yet.
    """
    await see_one_moment(connection)
    whole = await period(connection, None, first, last, GroupBy.TEAM, GroupBy.MODEL, most=DEAREST)
    records = await list_teams(connection, after=after, limit=limit + 1)
    page = [record.team.id for record in records[:limit]]
    of_page = await period(connection, None, first, last, GroupBy.TEAM, teams=page)
    used = {line.groups[0]: line for line in of_page.lines}
    unused = Line(groups=(), total=Totals(), corrections=Totals())
    teams = [{**team_view(record), "usage": _sums(used.get(record.team.id, unused))} for record in records]
    return {
        "from": first.isoformat(),
        "to": last.isoformat(),
        "total": {**total_view(whole.total, True), **corrections_view(whole.corrections, True)},
        "dearest": [_dearest(line) for line in whole.lines],
        "is_closed": whole.is_closed,
        **list_view(teams, limit),
    }


def _dearest(line: Line) -> dict[str, Any]:
    team_id, model = line.groups
    return {"team_id": team_id, "model": model, "others": line.others, **_sums(line)}


def _sums(line: Line) -> dict[str, Any]:
    return {**total_view(line.total, True), **corrections_view(line.corrections, True)}
