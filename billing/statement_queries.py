# The queries behind statements: one for each way of grouping, over the daily sums or the calls themselves, with what
# people booked and the days that are closed in the same round trip.

from __future__ import annotations

from enum import StrEnum
from functools import cache

from sqlalchemy import TextClause, text

from billing.grouping import Group, GroupBy, Tag
from billing.records import CHARGED, REQUESTS

# The rows are added up as they are found, with status 'correction' for what people booked. The sums by user or tag are
# ranked by what they cost: what is past the ``most`` dearest becomes one row.
CORRECTION = "correction"
STATUSES = {
    "requests": list(REQUESTS),
    "charged": [*CHARGED, CORRECTION],
}
TOKENS = ("input_tokens", "cached_input_tokens", "cache_write_tokens", "output_tokens", "reasoning_tokens")
COLUMNS = {
    GroupBy.MODEL: "{book}.model_used",
    GroupBy.KEY: "{book}.key_id",
    GroupBy.TIER: "{book}.tier",
    GroupBy.DAY: "CAST({book}.day AS text)",
    GroupBy.MONTH: "to_char({book}.day, 'YYYY-MM')",
    GroupBy.TEAM: "{book}.team_id",
    GroupBy.USER: "{calls}.user_tag",
}
ADDED = ("requests", "blocked", "failed", *TOKENS, "cost_nanousd", "gpu_cost_nanousd", "entries")
SUMS = f"""
    sum(calls) FILTER (WHERE status = ANY(CAST(:requests AS text[]))) AS requests,
    sum(calls) FILTER (WHERE status = 'blocked') AS blocked,
    sum(calls) FILTER (WHERE status = 'failed') AS failed,
    {"".join(f"sum({name}) FILTER (WHERE status = ANY(CAST(:charged AS text[]))) AS {name}, " for name in TOKENS)}
    sum(cost_nanousd) AS cost_nanousd,
    sum(gpu_cost_nanousd) AS gpu_cost_nanousd,
    sum(entries) AS entries
"""


class Whose(StrEnum):
    """Whose books a statement adds up."""

    TEAM = "team"  # of :team_id
    TEAMS = "teams"  # of :team_ids
    HOUSE = "house"  # of all


def query_for(group_by: tuple[Group, ...], whose: Whose, *, is_ranked: bool = False) -> TextClause:
    """Return the query for lines of such groups. By user or tag they are always ranked by what they cost.

    Its columns: ``closed`` (how many of the days are), ``is_late`` (null where nothing was booked), ``group0`` and
    so on, ``place``, ``is_rest`` and the sums. Its parameters: ``team_id`` or ``team_ids``, ``first``, ``last``,
    ``most``, ``tag0`` and so on, and ``STATUSES``.
    """
    return _query(tuple(None if isinstance(group, Tag) else group for group in group_by), whose, is_ranked)


@cache
def _query(kinds: tuple[GroupBy | None, ...], whose: Whose, is_ranked: bool) -> TextClause:
    """Return the query; a kind of ``None`` is a tag, whose key is a parameter."""
    names = [f"group{place}" for place in range(len(kinds))]
    by_call = GroupBy.USER in kinds or None in kinds
    calls = _select("usage_records" if by_call else "usage_daily", kinds, whose)
    listed = ", ".join(["is_late", *names])
    booked = _corrections(kinds, whose)
    sums = f"SELECT {listed}, {SUMS} FROM ({calls} UNION ALL {booked}) AS entry GROUP BY {listed}"  # noqa: S608
    placed = _ranked(sums, names) if by_call or is_ranked else _unranked(sums)
    return text(f"""
        SELECT closing.closed, summed.*
        FROM (SELECT count(*) AS closed FROM closed_days WHERE day BETWEEN :first AND :last) AS closing
        LEFT JOIN ({placed}) AS summed ON true
    """)  # noqa: S608  (columns are ours)


def _select(book: str, kinds: tuple[GroupBy | None, ...], whose: Whose) -> str:
    columns = [f"{_column(kind, place, book, book)} AS group{place}" for place, kind in enumerate(kinds)]
    count = "1 AS calls" if book == "usage_records" else "calls"
    late = "coalesce(booked_on, day) <> day AS is_late"
    amounts = ", ".join((*TOKENS, "cost_nanousd", "gpu_cost_nanousd"))
    return (
        f"SELECT {', '.join([late, *columns])}, status, {count}, {amounts}, 0 AS entries "  # noqa: S608
        f"FROM {book} WHERE {_where(book, whose)}"
    )


def _corrections(kinds: tuple[GroupBy | None, ...], whose: Whose) -> str:
    """Select what people booked; only a correction of one call has a user and tags, which are the call's."""
    columns = [f"{_column(kind, place, 'booked', 'call')} AS group{place}" for place, kind in enumerate(kinds)]
    amounts = "booked.input_tokens, 0, 0, booked.output_tokens, 0, booked.cost_nanousd, 0"  # TOKENS, cost, GPU cost
    join = "LEFT JOIN usage_records AS call ON call.day = booked.day AND call.request_id = booked.request_id"
    return (
        f"SELECT {', '.join(['true', *columns])}, '{CORRECTION}', 0, {amounts}, 1 "  # noqa: S608
        f"FROM corrections AS booked {join if None in kinds or GroupBy.USER in kinds else ''} "
        f"WHERE {_where('booked', whose)}"
    )


def _unranked(sums: str) -> str:
    return f"SELECT *, 0 AS place, false AS is_rest FROM ({sums}) AS entry"  # noqa: S608


def _ranked(sums: str, names: list[str]) -> str:
    listed = ", ".join(names)
    shown = ", ".join(f"CASE WHEN place <= :most THEN {name} END AS {name}" for name in names)
    added = ", ".join(f"sum({name}) AS {name}" for name in ADDED)
    return f"""
        SELECT is_late, {shown}, {added}, max(place) AS place, place > :most AS is_rest
        FROM (
            SELECT *, dense_rank() OVER (ORDER BY weight DESC, {listed}) AS place
            FROM (SELECT *, sum(cost_nanousd) OVER (PARTITION BY {listed}) AS weight FROM ({sums}) AS entry) AS weighed
        ) AS placed
        GROUP BY is_late, is_rest, {", ".join(str(place + 2) for place in range(len(names)))}
    """  # noqa: S608


def _column(kind: GroupBy | None, place: int, book: str, calls: str) -> str:
    if kind is None:
        return f"{calls}.metadata ->> CAST(:tag{place} AS text)"
    return COLUMNS[kind].format(book=book, calls=calls)


def _where(book: str, whose: Whose) -> str:
    days = f"{book}.day BETWEEN :first AND :last"
    match whose:
        case Whose.TEAM:
            return f"{book}.team_id = :team_id AND {days}"
        case Whose.TEAMS:
            return f"{book}.team_id = ANY(CAST(:team_ids AS text[])) AND {days}"
        case Whose.HOUSE:
            return days
