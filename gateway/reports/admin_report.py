# The report of the whole deployment, for admins: every team and model, what was charged and what our own GPUs cost,
# what each replica cost while no call used it, and what the same tokens would have cost at a commercial model.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import date
from typing import Any

from msgspec.structs import replace
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.ledger.comparison import Use, sum_of, uses_of
from billing.ledger.grouping import GroupBy
from billing.ledger.instances import InstanceCost, idle_costs
from billing.ledger.statements import Line, Totals, period
from gateway.accounts.serializers import dollars
from gateway.reports.csv_text import csv_of
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
from router.catalog.catalog import Catalog

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
    connection: AsyncConnection, analysis: Analysis, catalog: Catalog, first: date, last: date
) -> dict[str, Any]:
    """Return the report of all teams for the UTC days from ``first`` to ``last``, in the shape of GET /admin/report.

    Its sums hold calls that came late and corrections; ``corrections_usd`` says how much of a cost these are. The
    connection's transaction has asked nothing yet.
    """
    await see_one_moment(connection)
    price = analysis.price_on(last)
    statement = await period(connection, None, first, last, GroupBy.TEAM, GroupBy.MODEL, GroupBy.TIER)
    by_team = uses_of(statement.lines, price)
    by_model = uses_of([_without_team(line) for line in statement.lines], price)
    by_model.sort(key=lambda use: (use.groups[0] is None, use.groups[0] or ""))
    mix = mix_view(by_model, for_admin=True)
    whole = sum_of(by_team, is_compared=price is not None)
    choices = await read_choices(connection, catalog, None, first, last)
    shared = sum_of([use for use in by_team if use.groups[-1] is not None], is_compared=False)
    late = _late(statement.lines)
    return {
        "from": first.isoformat(),
        "to": last.isoformat(),
        "results": [_line(use, shared, late) for use in by_team],
        "teams": [_team(team, by_team, shared, choices) for team in dict.fromkeys(use.groups[0] for use in by_team)],
        "models": mix["models"],
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


def _line(use: Use, shared: Use, late: Mapping[tuple[str | None, ...], Totals]) -> dict[str, Any]:
    team_id, model = use.groups
    return {
        "team_id": team_id,
        "model": model,
        **use_view(use, for_admin=True),
        **shares_view(use, shared),
        "corrections_usd": dollars(late[use.groups].cost_nanousd),
    }


def _team(team_id: str | None, uses: Sequence[Use], shared: Use, choices: Choices) -> dict[str, Any]:
    whole = sum_of([use for use in uses if use.groups[0] == team_id], is_compared=uses[0].compared_nanousd is not None)
    whole = replace(whole, groups=(team_id,))
    view = {"team_id": team_id, **use_view(whole, for_admin=True), **shares_view(whole, shared)}
    return {**view, **choices.of_team(team_id).view()}


def _late(lines: Sequence[Line]) -> dict[tuple[str | None, ...], Totals]:
    late: dict[tuple[str | None, ...], Totals] = {}
    for line in lines:
        late[line.groups[:-1]] = late.get(line.groups[:-1], Totals()) + line.corrections
    return late


def _without_team(line: Line) -> Line:
    return Line(groups=line.groups[1:], total=line.total, corrections=line.corrections)


def _gpu_view(costs: Sequence[InstanceCost]) -> dict[str, Any]:
    """Return what each replica cost: what its calls account for, and what is idle; together its hours' price."""
    lines = [
        {
            "instance_id": cost.instance_id or None,
            "model": cost.model,
            "endpoint": cost.endpoint,
            "gpus": cost.gpus,
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
