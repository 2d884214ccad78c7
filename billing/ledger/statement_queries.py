# What the lines of a statement may be for, and the queries behind them: one for each way of grouping, over the daily
# sums or the calls themselves, with what was booked by hand and the days that are closed in the same round trip.

from __future__ import annotations

from enum import StrEnum
from functools import cache

from msgspec import Struct
from sqlalchemy import TextClause, text

from billing.core.records import CHARGED, COSTS, REQUESTS, SAVINGS, TOKENS
from billing.ledger.tables import IS_CALL

LONGEST_BY_CALL = 31  # days that are added up call by call
CORRECTION = "correction"  # the status of what was booked by hand, among the rows
STATUSES = {"requests": list(REQUESTS), "charged": [*CHARGED, CORRECTION]}


class GroupBy(StrEnum):
    """What the lines of a statement are for."""

    MODEL = "model"
    KEY = "key"
    TIER = "tier"
    DAY = "day"
    MONTH = "month"
    USER = "user"  # as callers tag their calls
    TEAM = "team"  # of a statement of the whole deployment,
    COST_CENTRE = "cost_centre"  # as is this: what its teams have now


class Tag(Struct, frozen=True):
    """One line for each value that callers gave to ``key`` in their calls' metadata."""

    key: str

    def __str__(self) -> str:
        return f"metadata:{self.key}"


Group = GroupBy | Tag


def reads_calls(group_by: tuple[Group, ...]) -> bool:
    """Tell whether such a statement adds up the calls one by one, and not the daily sums."""
    return any(group is GroupBy.USER or isinstance(group, Tag) for group in group_by)


COLUMNS = {
    GroupBy.MODEL: "{book}.model_used",
    GroupBy.KEY: "{book}.key_id",
    GroupBy.TIER: "{book}.tier",
    GroupBy.DAY: "CAST({book}.day AS text)",
    GroupBy.MONTH: "to_char({book}.day, 'YYYY-MM')",
    GroupBy.TEAM: "{book}.team_id",
    GroupBy.COST_CENTRE: "(SELECT cost_centre FROM teams WHERE teams.id = {book}.team_id)",
    GroupBy.USER: "{calls}.user_tag",
}
# Each sum, what it adds up, and of which statuses; once of what came in time, and once, as ``late_…``, of all else.
ADDED = {
    "requests": ("calls", "status = ANY(CAST(:requests AS text[]))"),
    "blocked": ("calls", "status = 'blocked'"),
    "failed": ("calls", "status = 'failed'"),
    **{name: (name, "status = ANY(CAST(:charged AS text[]))") for name in TOKENS},
    **{name: (name, "true") for name in (*COSTS, *SAVINGS, "entries")},
}
SUMS = {
    late + name: f"sum({amount}) FILTER (WHERE {which} AND {when})"
    for late, when in (("", "NOT is_late"), ("late_", "is_late"))
    for name, (amount, which) in ADDED.items()
}
# What is added up of every row, before statuses are told apart: of a group there are few, and rows without number.
AMOUNTS = (*TOKENS, *COSTS, *SAVINGS)


def query_for(group_by: tuple[Group, ...], *, of_all: bool = False, is_ranked: bool = False) -> TextClause:
    """Return the query for lines of such groups, of some teams or ``of_all``; by user or tag always ``is_ranked``.

    Lines come in the order of their groups or, ranked, of what they cost; what is past the first ``most`` is one more.
    Its columns, in this order: ``closed`` (how many of the days are), ``place`` (null where nothing was booked),
    ``others`` (how many groups the last line stands for), ``group0`` and so on, and ``SUMS``. Its parameters:
    ``teams``, ``first``, ``last``, ``most``, ``tag0`` and so on, and ``STATUSES``.
    """
    return _query(tuple(None if isinstance(group, Tag) else group for group in group_by), of_all, is_ranked)


@cache
def _query(kinds: tuple[GroupBy | None, ...], of_all: bool, is_ranked: bool) -> TextClause:
    """Return the query; a kind of ``None`` is a tag, whose key is a parameter."""
    names = [f"group{place}" for place in range(len(kinds))]
    by_call = GroupBy.USER in kinds or None in kinds
    book = "usage_records" if by_call else "usage_daily"
    return text(f"""
        WITH entry AS (
            {_select(book, kinds, of_all)} UNION ALL {_corrections(kinds, of_all)}
        ), summed AS (
            SELECT {_listed({name: name for name in names} | {name: _whole(made) for name, made in SUMS.items()})}
            FROM entry GROUP BY ({", ".join(names)})
        ), line AS (
            {_ranked(names) if is_ranked or by_call else _in_order(names)}
        )
        SELECT closing.closed, line.*
        FROM (SELECT count(*) AS closed FROM closed_days WHERE day BETWEEN :first AND :last) AS closing
        LEFT JOIN line ON true
        ORDER BY place
    """)  # noqa: S608  (columns are ours)


def _in_order(names: list[str]) -> str:
    """Select every line, in the order of its groups."""
    order = ", ".join(f'{name} COLLATE "C"' for name in names) or "1"
    columns = ", ".join((*names, *SUMS))
    return f"SELECT row_number() OVER (ORDER BY {order}) AS place, 0 AS others, {columns} FROM summed"  # noqa: S608


def _ranked(names: list[str]) -> str:
    """Select the dearest lines, dearest first, and what is past the first ``most`` as one more."""
    order = ", ".join(["cost_nanousd + late_cost_nanousd DESC", *(f'{name} COLLATE "C"' for name in names)])
    columns = {name: f"min({name}) FILTER (WHERE nth <= :most)" for name in names}
    columns |= {name: _whole(f"sum({name})") for name in SUMS}
    return f"""
        SELECT least(nth, CAST(:most AS bigint) + 1) AS place, greatest(max(nth) - :most, 0) AS others,
               {_listed(columns)}
        FROM (SELECT *, row_number() OVER (ORDER BY {order}) AS nth FROM summed) AS placed GROUP BY 1
    """  # noqa: S608


def _whole(made: str) -> str:
    """Return a sum as the integer that it is: Postgres adds bigints up to a numeric, which costs ten times as much."""
    return f"CAST(coalesce({made}, 0) AS bigint)"


def _listed(columns: dict[str, str]) -> str:
    return ", ".join(f"{made} AS {name}" for name, made in columns.items())


def _select(book: str, kinds: tuple[GroupBy | None, ...], of_all: bool) -> str:
    """Add up what was booked, by group, status and whether it came late: one pass over rows without number."""
    columns = [f"{_column(kind, place, book, book)} AS group{place}" for place, kind in enumerate(kinds)]
    count = f"count(*) FILTER (WHERE {IS_CALL})" if book == "usage_records" else _whole("sum(calls)")
    late = "coalesce(booked_on, day) <> day AS is_late"
    amounts = _listed({name: _whole(f"sum({name})") for name in AMOUNTS})
    return (
        f"SELECT {', '.join([late, *columns])}, status, {count} AS calls, {amounts}, 0 AS entries "  # noqa: S608
        f"FROM {book} WHERE {_where(book, of_all)} GROUP BY {', '.join(map(str, range(1, len(kinds) + 3)))}"
    )


def _corrections(kinds: tuple[GroupBy | None, ...], of_all: bool) -> str:
    """Select what was booked by hand; only a correction of one call has a user and tags, which are the call's."""
    columns = [f"{_column(kind, place, 'booked', 'call')} AS group{place}" for place, kind in enumerate(kinds)]
    booked = {name: f"booked.{name}" for name in ("input_tokens", "output_tokens", "cost_nanousd")}
    amounts = ", ".join(booked.get(name, "0") for name in AMOUNTS)
    join = "LEFT JOIN usage_records AS call ON call.day = booked.day AND call.request_id = booked.request_id"
    return (
        f"SELECT {', '.join(['true', *columns])}, '{CORRECTION}', 0, {amounts}, 1 "  # noqa: S608
        f"FROM corrections AS booked {join if None in kinds or GroupBy.USER in kinds else ''} "
        f"WHERE {_where('booked', of_all)}"
    )


def _column(kind: GroupBy | None, place: int, book: str, calls: str) -> str:
    if kind is None:
        return f"{calls}.metadata ->> CAST(:tag{place} AS text)"
    return COLUMNS[kind].format(book=book, calls=calls)


def _where(book: str, of_all: bool) -> str:
    days = f"{book}.day BETWEEN :first AND :last"
    return days if of_all else f"{book}.team_id = ANY(CAST(:teams AS text[])) AND {days}"
