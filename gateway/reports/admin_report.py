# What operators of the deployment see. The report: every team and model, what was charged and what our own GPUs cost,
# what each replica cost while no call used it, and what the same tokens would have cost at a commercial model. The
# usage: sums over every team, the dearest lines, and the teams a page at a time; Postgres adds up, and what is read
# does not grow with the number of teams.

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import date
from typing import Any

from sqlalchemy.ext.asyncio import AsyncConnection

from billing.ledger.comparison import Use, add_up, sum_of, uses_of
from billing.ledger.instances import InstanceCost, idle_costs
from billing.ledger.statement_queries import GroupBy
from billing.ledger.statements import Line, Totals, period
from gateway.accounts.serializers import dollars, list_view, shown, team_view
from gateway.accounts.teams import list_teams
from gateway.reports.csv_text import csv_of
from gateway.reports.provider_totals import Invoices, providers_view
from gateway.reports.usage_analysis import (
    Analysis,
    Choices,
    compare_view,
    mix_view,
    read_choices,
    see_one_moment,
    shares_view,
    use_view,
)
from gateway.reports.usage_report import sums_view
from router.catalog.catalog import Catalog

NO_INVOICES: Invoices = {}
DEAREST = 20  # lines of a team and model; the rest is one more
COLUMNS = (
    "team_id",
    "model",
    "instance_id",
    "requests",
    "input_tokens",
    "cached_input_tokens",
    "output_tokens",
    "cost_usd",
    "cost_usd_exact",
    "usd_per_million_tokens",
    "gpu_cost_usd",
    "gpu_usd_per_million_tokens",
    "compared_cost_usd",
    "share_of_requests",
    "share_of_cost",
    "corrections_cost_usd",
)


async def admin_report(
    connection: AsyncConnection,
    analysis: Analysis,
    catalog: Catalog,
    first: date,
    last: date,
    invoices: Invoices = NO_INVOICES,
) -> dict[str, Any]:
    """Return the report of all teams for the UTC days from ``first`` to ``last``, in the shape of GET /admin/report.

    Its sums hold calls that came late and corrections; ``corrections_usd`` says how much of a cost these are. The
    connection's transaction has asked nothing yet. A provider's total stands beside the amount of its invoice.
    """
    await see_one_moment(connection)
    price = analysis.price_on(last)
    statement = await period(connection, None, first, last, GroupBy.TEAM, GroupBy.MODEL, GroupBy.TIER)
    by_team = uses_of(statement.lines, price)
    by_model = add_up(by_team, slice(1, None))
    by_model.sort(key=lambda use: (use.groups[0] is None, use.groups[0] or ""))
    mix = mix_view(by_model, for_admin=True)
    whole = sum_of(by_model, is_compared=price is not None)
    choices = Choices(None, [])
    if analysis.has_auto:
        choices = await read_choices(connection, catalog, None, first, last)
    shared = sum_of([use for use in by_model if use.groups[-1] is not None], is_compared=False)
    late = _late(statement.lines)
    return {
        "from": first.isoformat(),
        "to": last.isoformat(),
        "results": [_line(use, shared, late) for use in by_team],
        "teams": list(_teams(add_up(by_team, slice(1)), shared, choices)),
        "models": mix["models"],
        **providers_view(by_model, catalog, invoices),
        "total": {**mix["total"], "corrections_usd": dollars(statement.corrections.cost_nanousd)},
        **compare_view(analysis, whole),
        **choices.view(),
        **_gpu_view(await idle_costs(connection, first, last)),
        "is_closed": statement.is_closed,
    }


def report_csv(report: Mapping[str, Any]) -> str:
    """Return the report as CSV: a line for each team and model, then one for each replica's idle time."""
    return csv_of(COLUMNS, report_rows(report))


def report_rows(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the report as rows; those of idle time have an ``instance_id`` and no team."""
    results = [{**line, "corrections_cost_usd": line["corrections_usd"]} for line in report["results"]]
    idle = [
        {"instance_id": line["instance_id"], "model": line["model"], "gpu_cost_usd": line["idle_usd"]}
        for line in report["instances"]
    ]
    return results + idle


async def admin_usage(
    connection: AsyncConnection, first: date, last: date, today: date, *, after: str | None, limit: int
) -> dict[str, Any]:
    """Return what all teams used from ``first`` to ``last``, and what each has used today, as GET /admin/usage has it.

    The connection's transaction has asked nothing yet.
    """
    await see_one_moment(connection)
    whole = await period(connection, None, first, last, GroupBy.TEAM, GroupBy.MODEL, most=DEAREST)
    records = await list_teams(connection, after=after, limit=limit + 1)
    page = [record.team.id for record in records[:limit]]
    used, used_today = await _used_by(connection, page, first, last), await _used_by(connection, page, today, today)
    unused = _sums(Line(groups=(), total=Totals(), corrections=Totals()))
    teams = [
        {
            **team_view(record),
            "usage": used.get(record.team.id, unused),
            "usage_today": used_today.get(record.team.id, unused),
        }
        for record in records
    ]
    return {
        "from": first.isoformat(),
        "to": last.isoformat(),
        "total": sums_view(whole.total, whole.corrections, True),
        "dearest": [_dearest(line) for line in whole.lines],
        "is_closed": whole.is_closed,
        **list_view(teams, limit),
    }


async def _used_by(
    connection: AsyncConnection, teams: Sequence[str], first: date, last: date
) -> dict[str | None, dict[str, Any]]:
    """Return what each of some teams used, where it used anything."""
    statement = await period(connection, None, first, last, GroupBy.TEAM, teams=teams)
    return {line.groups[0]: _sums(line) for line in statement.lines}


def _line(use: Use, shared: Use, late: Mapping[tuple[str | None, ...], int]) -> dict[str, Any]:
    team_id, model = use.groups
    return {
        "team_id": team_id,
        "model": model,
        **use_view(use, for_admin=True),
        **shares_view(use, shared),
        "corrections_usd": dollars(late[use.groups]),
    }


def _teams(uses: Iterable[Use], shared: Use, choices: Choices) -> Iterator[dict[str, Any]]:
    """Yield a line for each team; the choices are gone through once, not once for each."""
    of_team = choices.by_team()
    for use in uses:
        (team_id,) = use.groups
        view = {"team_id": team_id, **use_view(use, for_admin=True), **shares_view(use, shared)}
        yield {**view, **of_team(team_id).view()}


def _late(lines: Sequence[Line]) -> dict[tuple[str | None, ...], int]:
    """Return what was corrected by team and model, nano-dollars."""
    late: dict[tuple[str | None, ...], int] = defaultdict(int)
    for line in lines:
        late[line.groups[:-1]] += line.corrections.cost_nanousd
    return late


def _gpu_view(costs: Sequence[InstanceCost]) -> dict[str, Any]:
    """Return what each replica cost: what its calls account for, and what is idle; together its hours' price."""
    lines = [
        {
            "instance_id": cost.instance_id or None,
            **shown(cost, "model", "endpoint", "gpus"),
            "hours": round(cost.hours, 6),
            "busy_hours": round(cost.busy_hours, 6),
            "cost_usd": dollars(cost.cost_nanousd),
            "calls_usd": dollars(cost.attributed_nanousd),
            "idle_usd": dollars(cost.idle_nanousd),
        }
        for cost in costs
    ]
    sums = {
        "cost_usd": dollars(sum(cost.cost_nanousd for cost in costs)),
        "calls_usd": dollars(sum(cost.attributed_nanousd for cost in costs)),
        "idle_usd": dollars(sum(cost.idle_nanousd for cost in costs)),
    }
    return {"instances": lines, "instances_total": sums}


def _dearest(line: Line) -> dict[str, Any]:
    team_id, model = line.groups
    return {"team_id": team_id, "model": model, "others": line.others, **_sums(line)}


def _sums(line: Line) -> dict[str, Any]:
    return sums_view(line.total, line.corrections, True)
