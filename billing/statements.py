# Statements: what a team used and owes, by day, model, key or tier, added up from the daily sums.

from __future__ import annotations

from collections import defaultdict
from datetime import date
from enum import StrEnum
from operator import add

from msgspec import Struct
from msgspec.structs import astuple
from sqlalchemy import RowMapping, text
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.records import CHARGED, REQUESTS


class GroupBy(StrEnum):
    """What the lines of a statement are for."""

    MODEL = "model"
    KEY = "key"
    TIER = "tier"
    DAY = "day"


class Totals(Struct, frozen=True, kw_only=True):
    """Sums over calls. Tokens and money are of charged calls; ``requests`` are those answered, wholly or in part."""

    requests: int = 0
    blocked: int = 0
    failed: int = 0
    input_tokens: int = 0  # cached ones included
    cached_input_tokens: int = 0
    cache_write_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0
    cost_nanousd: int = 0
    gpu_cost_nanousd: int = 0  # of all calls, charged or not: what the house paid

    def __add__(self, other: Totals) -> Totals:
        return Totals(**dict(zip(self.__struct_fields__, map(add, astuple(self), astuple(other)), strict=True)))


class Line(Struct, frozen=True):
    """One group's sums. ``corrections`` are calls that came after their day was closed; ``total`` leaves them out."""

    group: str  # a model's name, a key's id, a tier, or a day as 2026-04-05
    total: Totals
    corrections: Totals


class Statement(Struct, frozen=True, kw_only=True):
    """What a team used from ``first_day`` to ``last_day``, both included; ``total`` leaves ``corrections`` out."""

    team_id: str
    first_day: date
    last_day: date
    group_by: GroupBy | None
    lines: tuple[Line, ...]  # none without group_by
    total: Totals
    corrections: Totals
    is_closed: bool  # every day is closed: ``total`` will not change any more


async def daily(connection: AsyncConnection, team_id: str, day: date) -> Statement:
    """Return the statement of one UTC day."""
    return await period(connection, team_id, day, day)


async def period(
    connection: AsyncConnection, team_id: str, first_day: date, last_day: date, group_by: GroupBy | None = None
) -> Statement:
    """Return the statement of the UTC days from ``first_day`` to ``last_day``, with a line for each group."""
    span = {"team_id": team_id, "first": first_day, "last": last_day}
    booked: dict[str, Totals] = defaultdict(Totals)
    late: dict[str, Totals] = defaultdict(Totals)
    for row in (await connection.execute(QUERIES[group_by], span | STATUSES)).mappings():
        into = late if row["is_late"] else booked
        into[str(row["line"])] += _totals(row)
    closed = (await connection.execute(CLOSED_DAYS, {"first": first_day, "last": last_day})).scalar_one()
    lines = tuple(Line(group, booked[group], late[group]) for group in sorted(booked.keys() | late.keys()))
    return Statement(
        team_id=team_id,
        first_day=first_day,
        last_day=last_day,
        group_by=group_by,
        lines=lines if group_by else (),
        total=sum(booked.values(), Totals()),
        corrections=sum(late.values(), Totals()),
        is_closed=closed == (last_day - first_day).days + 1,
    )


COLUMNS = {None: "''", GroupBy.MODEL: "model_used", GroupBy.KEY: "key_id", GroupBy.TIER: "tier", GroupBy.DAY: "day"}
STATUSES = {"requests": [status.value for status in REQUESTS], "charged": [status.value for status in CHARGED]}
CLOSED_DAYS = text("SELECT count(*) FROM closed_days WHERE day BETWEEN :first AND :last")
QUERIES = {
    group: text(f"""
        SELECT {column} AS line, booked_on <> day AS is_late,
               sum(calls) FILTER (WHERE status = ANY(CAST(:requests AS text[]))) AS requests,
               sum(calls) FILTER (WHERE status = 'blocked') AS blocked,
               sum(calls) FILTER (WHERE status = 'failed') AS failed,
               sum(input_tokens) FILTER (WHERE is_charged) AS input_tokens,
               sum(cached_input_tokens) FILTER (WHERE is_charged) AS cached_input_tokens,
               sum(cache_write_tokens) FILTER (WHERE is_charged) AS cache_write_tokens,
               sum(output_tokens) FILTER (WHERE is_charged) AS output_tokens,
               sum(reasoning_tokens) FILTER (WHERE is_charged) AS reasoning_tokens,
               sum(cost_nanousd) AS cost_nanousd,
               sum(gpu_cost_nanousd) AS gpu_cost_nanousd
        FROM usage_daily, LATERAL (SELECT status = ANY(CAST(:charged AS text[])) AS is_charged)
        WHERE team_id = :team_id AND day BETWEEN :first AND :last
        GROUP BY 1, 2
    """)  # noqa: S608  (columns are ours)
    for group, column in COLUMNS.items()
}


def _totals(row: RowMapping) -> Totals:
    return Totals(**{name: int(row[name] or 0) for name in Totals.__struct_fields__})
