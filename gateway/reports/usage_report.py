# The usage report: a statement as clients and finance read it. Money is exact decimal dollars; what was booked after a
# day's close, or by hand, stands apart, as corrections.

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, nullcontext
from typing import Any

from msgspec.structs import asdict
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.ledger.statement_queries import reads_calls
from billing.ledger.statements import NOTHING, Line, Statement, Totals, period
from gateway.accounts.serializers import cost_view, dollars
from gateway.reports.csv_text import csv_of
from gateway.reports.usage_period import Period
from protocol.errors import BadRequest

# What a CSV says of corrections, which JSON has as an object.
CORRECTED = ("input_tokens", "output_tokens", "cost_usd", "cost_usd_exact")
OWED = ("owed_usd", "owed_usd_exact")

COUNTS = ("requests", "input_tokens", "cached_input_tokens", "output_tokens")  # of every sum
WITHIN = 8  # seconds; less than the client of the database waits, so that it is the server that says so
CANCELLED = "57014"  # Postgres: query_canceled


async def usage_of(
    connection: AsyncConnection, team_id: str | None, asked: Period, *, for_admin: bool
) -> dict[str, Any]:
    """Return a team's usage, or that of all, in the shape of GET /v1/usage. ``for_admin``: with what our own GPUs cost
    us."""
    async with added_up_by_call(connection) if reads_calls(asked.group_by) else nullcontext():
        statement = await period(connection, team_id, asked.first, asked.last, *asked.group_by)
    sums = sums_view(statement.total, statement.corrections, for_admin)
    if asked.is_plain_day:
        day = {"team_id": team_id, "date": asked.first.isoformat()}
        return {**day, **sums, "is_closed": statement.is_closed}
    return {
        "team_id": team_id,
        "from": asked.first.isoformat(),
        "to": asked.last.isoformat(),
        "group_by": ",".join(map(str, asked.group_by)),
        "results": [_line(line, statement, for_admin) for line in statement.lines],
        "total": sums,
        "is_closed": statement.is_closed,
    }


@asynccontextmanager
async def added_up_by_call(connection: AsyncConnection, within: float = WITHIN) -> AsyncIterator[None]:
    """Run queries over single calls. Raises BadRequest when there are too many of them to be added up in time.

    The transaction can go on after it.
    """
    try:
        async with connection.begin_nested():
            await connection.execute(text(f"SET LOCAL statement_timeout = {round(within * 1000)}"))
            yield
    except DBAPIError as exc:
        if getattr(exc.orig, "sqlstate", None) != CANCELLED:
            raise
        raise BadRequest(
            f"These days hold too many calls to be added up one by one in {within:g} seconds. Ask for fewer days.",
            param="from",
            code="period_too_long",
        ) from exc


def usage_csv(usage: Mapping[str, Any]) -> str:
    """Return what ``usage_of`` returned as CSV: one line for each result, or for the day; else the analysis' lines."""
    if "analysis" in usage:
        return csv_of(*analysis_rows(usage))
    columns, rows = usage_rows(usage)
    return csv_of([*columns, *(f"corrections_{name}" for name in CORRECTED), *OWED], map(_with_corrections, rows))


def usage_rows(usage: Mapping[str, Any]) -> tuple[list[str], list[dict[str, Any]]]:
    """Return what ``usage_of`` returned as a flat table: its columns and its rows, without corrections."""
    skip = ("is_closed", "corrections", "analysis", *OWED)
    if "results" not in usage:
        return [name for name in usage if name not in skip], [dict(usage)]
    sums = [name for name in usage["total"] if name not in skip]
    span = {name: usage[name] for name in ("team_id", "from", "to")}
    others = ["others"] if any("others" in result for result in usage["results"]) else []
    columns = [*span, *str(usage["group_by"]).split(","), *others, *sums]
    return columns, [{**span, **result} for result in usage["results"]]


def analysis_rows(usage: Mapping[str, Any]) -> tuple[list[str], list[dict[str, Any]]]:
    """Return the analysis of a report as a flat table, a row for each model: its columns and its rows."""
    span = {"team_id": usage["team_id"], "from": usage.get("from", usage.get("date"))}
    span["to"] = usage.get("to", usage.get("date"))
    sums = usage["analysis"]["total"]
    columns = [*span, "model", *sums, "share_of_requests", "share_of_cost"]
    return columns, [{**span, **line} for line in usage["analysis"]["models"]]


def sums_view(total: Totals, late: Totals, for_admin: bool) -> dict[str, Any]:
    """Return sums by the names that clients know, what is owed for them, and what was booked late and by hand, if
    anything was; ``entries`` of it by hand. ``for_admin``: with what our own GPUs cost us."""
    owed = cost_view(total.cost_nanousd + late.cost_nanousd)
    sums = {**_total_view(total, for_admin), **dict(zip(OWED, owed.values(), strict=True))}
    if late == NOTHING:
        return sums
    return {**sums, "corrections": {**_total_view(late, for_admin), "entries": late.entries}}


def _total_view(total: Totals, for_admin: bool) -> dict[str, Any]:
    view = asdict(total)
    del view["entries"]
    view |= cost_view(view.pop("cost_nanousd"))
    view["cache_saved_usd"] = dollars(view.pop("saved_nanousd"))
    view["tier_saved_usd"] = dollars(view.pop("discount_nanousd"))
    gpu_cost = dollars(view.pop("gpu_cost_nanousd"))
    return {**view, "gpu_cost_usd": gpu_cost} if for_admin else view


def _line(line: Line, statement: Statement, for_admin: bool) -> dict[str, Any]:
    names: dict[str, Any] = dict(zip(map(str, statement.group_by), line.groups, strict=True))
    if reads_calls(statement.group_by):
        names["others"] = line.others
    return {**names, **sums_view(line.total, line.corrections, for_admin)}


def _with_corrections(row: dict[str, Any]) -> dict[str, Any]:
    late = row.get("corrections", {})
    return row | {f"corrections_{name}": late.get(name, 0) for name in CORRECTED}
