# The usage report: which days and groups are asked for, and a statement as clients and finance read it. Money is exact
# decimal dollars; calls that came after their day was closed stand apart, as corrections.

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from datetime import date, timedelta
from typing import Any

from msgspec import Struct
from msgspec.structs import asdict
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.statements import GroupBy, Statement, Totals, period
from gateway.admin_views import dollars
from protocol.errors import BadRequest

LONGEST_PERIOD = 1100  # days


class Period(Struct, frozen=True, kw_only=True):
    """What is asked for: whole UTC days, both ends included."""

    first: date
    last: date
    group_by: GroupBy | None

    @property
    def is_plain_day(self) -> bool:
        """Tell whether it is one day's sum and nothing more."""
        return self.group_by is None and self.first == self.last


def read_period(said: Mapping[str, str], today: date) -> Period:
    """Return the period that ``date``, ``from``, ``to`` and ``group_by`` mean. Raises BadRequest.

    Nothing said: today. ``from`` alone: until today. Several days without ``group_by``: day by day.
    """
    group_by = _group(said["group_by"]) if "group_by" in said else None
    if "date" in said:
        if "from" in said or "to" in said:
            raise BadRequest("Send 'date', or 'from' and 'to', not both.", param="date", code="invalid_value")
        day = _day(said["date"], "date")
        return Period(first=day, last=day, group_by=group_by)
    if "from" not in said:
        if "to" in said:
            raise BadRequest("'to' needs a 'from'.", param="from", code="missing_required_parameter")
        return Period(first=today, last=today, group_by=group_by)
    first = _day(said["from"], "from")
    last = _day(said["to"], "to") if "to" in said else today
    if last < first:
        raise BadRequest(f"The period ends ({last}) before it begins ({first}).", param="to", code="invalid_value")
    if last - first >= timedelta(days=LONGEST_PERIOD):
        raise BadRequest(f"A period is at most {LONGEST_PERIOD} days long.", param="from", code="invalid_value")
    return Period(first=first, last=last, group_by=group_by or GroupBy.DAY)


async def usage_of(connection: AsyncConnection, team_id: str, asked: Period, *, for_house: bool) -> dict[str, Any]:
    """Return a team's usage in the shape of GET /v1/usage. ``for_house``: with what our own GPUs cost us."""
    statement = await period(connection, team_id, asked.first, asked.last, asked.group_by)
    sums = _total_view(statement.total, for_house)
    late = _corrections(statement.corrections, for_house)
    if asked.is_plain_day:
        day = {"team_id": team_id, "date": asked.first.isoformat()}
        return {**day, **sums, "is_closed": statement.is_closed, **late}
    return {
        "team_id": team_id,
        "from": asked.first.isoformat(),
        "to": asked.last.isoformat(),
        "group_by": asked.group_by,
        "results": _lines(statement, for_house),
        "total": {**sums, **late},
        "is_closed": statement.is_closed,
    }


def usage_csv(usage: Mapping[str, Any]) -> str:
    """Return what ``usage_of`` returned as CSV: one line for each result, or for the day."""
    columns, rows = usage_rows(usage)
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\r\n")  # RFC 4180
    writer.writerow(columns)
    writer.writerows([_cell(row.get(column)) for column in columns] for row in rows)
    return out.getvalue()


def usage_rows(usage: Mapping[str, Any]) -> tuple[list[str], list[dict[str, Any]]]:
    """Return what ``usage_of`` returned as a flat table: its columns and its rows."""
    if "results" not in usage:
        skip = ("is_closed", "corrections")
        row = {name: value for name, value in usage.items() if name not in skip}
        return list(row), [row]
    group = str(usage["group_by"])
    sums = [name for name in usage["total"] if name != "corrections"]
    span = {name: usage[name] for name in ("team_id", "from", "to")}
    return [*span, group, *sums], [{**span, **result} for result in usage["results"]]


def _lines(statement: Statement, for_house: bool) -> list[dict[str, Any]]:
    name = str(statement.group_by)
    return [
        {name: line.group, **_total_view(line.total, for_house), **_corrections(line.corrections, for_house)}
        for line in statement.lines
    ]


def _total_view(total: Totals, for_house: bool) -> dict[str, Any]:
    view = asdict(total)
    view["cost_usd"] = dollars(view.pop("cost_nanousd"))
    gpu_cost = dollars(view.pop("gpu_cost_nanousd"))
    return {**view, "gpu_cost_usd": gpu_cost} if for_house else view


def _corrections(late: Totals, for_house: bool) -> dict[str, Any]:
    return {} if late == Totals() else {"corrections": _total_view(late, for_house)}


def _group(said: str) -> GroupBy:
    try:
        return GroupBy(said)
    except ValueError:
        known = ", ".join(GroupBy)
        raise BadRequest(f"'group_by' is one of {known}.", param="group_by", code="invalid_value") from None


def _day(said: str, name: str) -> date:
    try:
        if len(said) == len("2026-04-05"):
            return date.fromisoformat(said)
    except ValueError:
        pass
    raise BadRequest(f"'{name}' is a UTC day such as 2026-04-05.", param=name, code="invalid_value")


def _cell(value: object) -> str:
    return "" if value is None else f"{value:f}" if hasattr(value, "as_tuple") else str(value)
