# Reads of the rollup: sums and percentiles by one dimension, step by step. Postgres adds up and ranks; what it returns
# is bounded by the points times the lines that are asked for. Whole days come from the daily sums where these suffice.

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

from msgspec import Struct
from sqlalchemy import TextClause, text
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.core.records import CHARGED, REQUESTS, Status
from billing.ledger.series import COUNT_BITS, DAYS_OF_ALL, HOUR, HOURS_OF_ALL, MASK, MINUTE, SEALED_MINUTE, middle_of

REFUSED = "refused"  # the status of calls that have no row in the ledger
STEPS = {"minute": timedelta(minutes=1), "hour": timedelta(hours=1), "day": timedelta(days=1)}
# What lines may be for, and calls be chosen by: their columns.
DIMENSIONS = {
    "team": "team_id",
    "key": "key_id",
    "model": "model_used",
    "provider": "provider",
    "status": "status",
    "tier": "tier",
    "route_reason": "route_reason",
    "code": "code",
}
OF_DAYS = frozenset({"team", "key", "model", "status", "tier"})  # those that the daily sums have
OF_CORRECTIONS = frozenset({"team", "key", "model", "tier"})


def _of(amount: str, *statuses: str) -> str:
    listed = ", ".join(f"'{status}'" for status in sorted(statuses))
    which = f" FILTER (WHERE status IN ({listed}))" if statuses else ""
    return f"CAST(coalesce(sum({amount}){which}, 0) AS bigint)"


# As statements count them.
SUMS = {
    "requests": _of("calls", *REQUESTS),
    "errors": _of("calls", Status.FAILED),
    "blocked": _of("calls", Status.BLOCKED),
    REFUSED: _of("calls", REFUSED),
    "cached": _of("cached"),
    "tokens": _of("input_tokens + output_tokens", *CHARGED),
    **{name: _of(name, *CHARGED) for name in ("input_tokens", "cached_input_tokens", "output_tokens")},
    "cost_usd": _of("cost_nanousd"),
    "saved_usd": _of("saved_nanousd"),
    "gpu_cost_usd": _of("gpu_cost_nanousd"),
}
NOT_OF_DAYS = frozenset({REFUSED, "cached"})
HISTOGRAMS = {"first_token_ms": "first_token", "total_ms": "total"}  # milliseconds of requests


class SeriesQuery(Struct, frozen=True, kw_only=True):
    """What is asked for: whole steps from ``since`` up to ``until``, both on borders of steps in UTC."""

    since: datetime
    until: datetime
    step: str
    sums: tuple[str, ...]
    percentiles: tuple[str, ...]
    percentile: float = 95.0
    by: str | None = None
    chosen: Mapping[str, str] = {}  # dimension to value
    top: int = 10
    before: SeriesQuery | None = None  # of the time before, whose totals are told beside

    @property
    def points(self) -> int:
        """How many steps there are."""
        return (self.until - self.since) // STEPS[self.step]

    @property
    def names_teams(self) -> bool:
        """Whether teams or keys are told apart."""
        return not {"team", "key"}.isdisjoint((self.by, *self.chosen))

    @property
    def reads_days(self) -> bool:
        """Whether the daily sums suffice."""
        dimensions = {*self.chosen, *(() if self.by is None else (self.by,))}
        is_sum = not self.percentiles and NOT_OF_DAYS.isdisjoint(self.sums)
        return self.step == "day" and dimensions <= OF_DAYS and is_sum


class Cell(Struct, frozen=True):
    """One point of a line; ``name`` None: of all that are not listed."""

    name: str | None
    place: int  # of the step
    values: tuple[int, ...]  # in the order of the query's sums


class Sums(Struct, frozen=True):
    """Cells of the lines that are listed, largest first, and of the others; ``others``: how many these are."""

    names: list[str]
    cells: list[Cell]
    others: int


async def read_sums(connection: AsyncConnection, asked: SeriesQuery) -> Sums:
    """Return the sums at each step: of the ``top`` lines by the first sum, and of all others together.

    A line that is zero throughout is none.
    """
    sums = asked.sums or ("requests",)
    named = [f"value{number}" for number in range(len(sums))]
    added = ", ".join(f"{SUMS[name]} AS {value}" for name, value in zip(sums, named, strict=True))
    query = text(f"""
        WITH cell AS (
            SELECT {_place(asked)} AS place, {_name(asked)} AS name, {added}
            FROM {_book(asked)} WHERE {_where(asked)} GROUP BY 1, 2
        ), line AS (
            SELECT name, row_number() OVER (ORDER BY sum({named[0]}) DESC, name COLLATE "C") AS nth
            FROM cell GROUP BY name HAVING {" OR ".join(f"sum({value}) <> 0" for value in named)}
        )
        SELECT least(nth, CAST(:top AS bigint) + 1) AS nth, min(name) AS name, place,
               (SELECT count(*) FROM line) AS lines, {", ".join(f"CAST(sum({value}) AS bigint)" for value in named)}
        FROM cell JOIN line USING (name) GROUP BY 1, place ORDER BY 1
    """)  # noqa: S608  (columns are ours)
    rows = (await connection.execute(query, _values(asked) | {"top": asked.top})).all()
    names = dict.fromkeys(row.name for row in rows if row.nth <= asked.top)
    cells = [Cell(row.name if row.nth <= asked.top else None, row.place, tuple(row[4:])) for row in rows]
    return Sums(list(names), cells, max(0, rows[0].lines - asked.top) if rows else 0)


async def read_percentile(
    connection: AsyncConnection, asked: SeriesQuery, metric: str, names: list[str]
) -> dict[tuple[bool, str | None, int | None], float]:
    """Return a percentile by (of all lines, name, place): name None: all that are not in ``names``; place None: of the
    whole time. What no request had is not there."""
    column = HISTOGRAMS[metric]
    query: TextClause = text(f"""
        WITH each AS (
            SELECT {_place(asked)} AS place, unnest({column}) AS packed,
                   CASE WHEN {_name(asked)} = ANY(CAST(:names AS text[])) THEN {_name(asked)} END AS name
            FROM usage_series
            WHERE {_where(asked)} AND status IN ({", ".join(f"'{status}'" for status in sorted(REQUESTS))})
        ), cell AS (
            SELECT name, place, packed >> {COUNT_BITS} AS number, CAST(sum(packed & {MASK}) AS bigint) AS calls
            FROM each GROUP BY 1, 2, 3
        ), bucket AS (
            SELECT grouping(name) AS of_all, grouping(place) AS of_whole, name, place, number,
                   CAST(sum(calls) AS bigint) AS calls
            FROM cell GROUP BY number, GROUPING SETS ((name, place), (name), (place), ())
        ), below AS (
            SELECT *, sum(calls) OVER (PARTITION BY of_all, of_whole, name, place ORDER BY number) AS calls_below,
                   sum(calls) OVER (PARTITION BY of_all, of_whole, name, place) AS all_calls
            FROM bucket
        )
        SELECT of_all, of_whole, name, place, min(number) AS number FROM below
        WHERE calls_below >= all_calls * CAST(:share AS double precision)
        GROUP BY 1, 2, 3, 4
    """)  # noqa: S608  (columns are ours)
    values = _values(asked) | {"names": names, "share": asked.percentile / 100}
    rows = (await connection.execute(query, values)).all()
    return {
        (bool(row.of_all), row.name, None if row.of_whole else row.place): round(middle_of(row.number), 1)
        for row in rows
    }


async def read_corrections(connection: AsyncConnection, asked: SeriesQuery) -> tuple[int, int, int] | None:
    """Return what people booked for the UTC days that are asked for, in part or whole: input tokens, output tokens and
    nano-dollars, signed. None where calls are chosen by what a correction does not have."""
    if not OF_CORRECTIONS.issuperset(asked.chosen):
        return None
    chosen = "".join(f" AND {DIMENSIONS[name]} = :{name}" for name in asked.chosen)
    query = text(f"""
        SELECT coalesce(sum(input_tokens), 0), coalesce(sum(output_tokens), 0), coalesce(sum(cost_nanousd), 0)
        FROM corrections WHERE day BETWEEN :first AND :last{chosen}
    """)  # noqa: S608  (columns are ours)
    days = {"first": asked.since.date(), "last": (asked.until - timedelta(microseconds=1)).date()}
    inputs, outputs, cost = (await connection.execute(query, days | dict(asked.chosen))).one()
    return int(inputs), int(outputs), int(cost)


def _book(asked: SeriesQuery) -> str:
    return "usage_daily" if asked.reads_days else "usage_series"


def _place(asked: SeriesQuery) -> str:
    if asked.reads_days:
        return "day - CAST(:since AS date)"
    seconds = "extract(epoch FROM at - CAST(:since AS timestamptz))"
    return f"CAST(floor({seconds} / {STEPS[asked.step].total_seconds():.0f}) AS integer)"


def _name(asked: SeriesQuery) -> str:
    return "CAST('' AS text)" if asked.by is None else DIMENSIONS[asked.by]


def _where(asked: SeriesQuery) -> str:
    column, kind = ("day", "date") if asked.reads_days else ("at", "timestamptz")
    time = f"{column} >= CAST(:since AS {kind}) AND {column} < CAST(:until AS {kind})"
    steps = "" if asked.reads_days else f"step IN ({', '.join(map(str, _steps(asked)))}) AND "
    return steps + time + "".join(f" AND {DIMENSIONS[name]} = :{name}" for name in asked.chosen)


def _steps(asked: SeriesQuery) -> tuple[int, ...]:
    """Return which rows are read."""
    if asked.step == "minute":
        return MINUTE, SEALED_MINUTE
    if asked.names_teams:
        return MINUTE, HOUR
    return DAYS_OF_ALL if asked.step == "day" else HOURS_OF_ALL


def _values(asked: SeriesQuery) -> dict[str, Any]:
    since, until = asked.since, asked.until
    days = {"since": since.date(), "until": until.date()}
    return (days if asked.reads_days else {"since": since, "until": until}) | dict(asked.chosen)
