# Statements: what a team used and owes, added up by day, month, model, key or tier from the daily sums, and by user or
# metadata tag from the calls themselves. What was booked after a day's close, or by hand, stands apart.

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import date
from operator import add
from typing import Any

from msgspec import Struct
from msgspec.structs import astuple
from sqlalchemy import Row
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.ledger.statement_queries import ADDED, STATUSES, Group, GroupBy, Tag, query_for, reads_calls

__all__ = ["MOST_TAGS", "GroupBy", "Line", "Statement", "Tag", "Totals", "period", "sum_totals"]

MOST_TAGS = 1000  # lines by user or metadata; the rest is one more line
MOST = 2**31 - 1  # lines of any other statement: all


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
    gpu_cost_nanousd: int = 0  # of all calls, charged or not: what the deployment paid
    saved_nanousd: int = 0  # what answers from the cache would have cost
    discount_nanousd: int = 0  # by how much calls cost less than the same live ones, for their tiers
    entries: int = 0  # booked by hand; of corrections alone

    def __add__(self, other: Totals) -> Totals:
        if other == NOTHING:
            return self
        return Totals(**dict(zip(self.__struct_fields__, map(add, astuple(self), astuple(other)), strict=True)))


NOTHING = Totals()


def sum_totals(each: Iterable[Totals]) -> Totals:
    """Return the sum of many."""
    columns = zip(*map(astuple, (NOTHING, *each)), strict=True)
    return Totals(**dict(zip(Totals.__struct_fields__, map(sum, columns), strict=True)))


class Line(Struct, frozen=True, kw_only=True):
    """One group's sums; ``total`` leaves ``corrections`` out."""

    groups: tuple[str | None, ...]  # a model's name, a key's id, 2026-04-05, …; None: untagged, or of no model or key
    total: Totals
    corrections: Totals
    others: int = 0  # how many groups this line sums up, when it stands for all that are not listed


class Statement(Struct, frozen=True, kw_only=True):
    """What was used on some days. ``total`` leaves ``corrections`` out: calls that came after their day was closed, and
    what was booked by hand."""

    group_by: tuple[Group, ...]
    lines: tuple[Line, ...]  # none without group_by
    total: Totals
    corrections: Totals
    is_closed: bool  # every day is closed: ``total`` will not change any more


async def period(
    connection: AsyncConnection,
    team_id: str | None,
    first_day: date,
    last_day: date,
    *group_by: Group,
    teams: Sequence[str] | None = None,
    most: int | None = None,
) -> Statement:
    """Return the statement of the UTC days from ``first_day`` to ``last_day``, with a line for each group.

    Lines are in the order of their groups; by user or tag the dearest come first, at most ``MOST_TAGS`` of them. With
    ``most`` the dearest come first whatever the groups, at most so many of them. ``teams``: these, where it is not one.
    """
    limit = (MOST_TAGS if reads_calls(group_by) else MOST) if most is None else most
    teams = teams if team_id is None else [team_id]
    asked = {"teams": teams, "first": first_day, "last": last_day, "most": limit, **STATUSES}
    asked |= {f"tag{place}": group.key for place, group in enumerate(group_by) if isinstance(group, Tag)}
    query = query_for(group_by, of_all=teams is None, is_ranked=most is not None)
    rows = (await connection.execute(query, asked)).all()
    lines = [_line(row, len(group_by)) for row in rows if row.place is not None]
    return Statement(
        group_by=group_by,
        lines=tuple(lines) if group_by else (),
        total=sum_totals(line.total for line in lines),
        corrections=sum_totals(line.corrections for line in lines),
        is_closed=rows[0].closed == (last_day - first_day).days + 1,
    )


def _line(row: Row[Any], groups: int) -> Line:
    """Return the line of a row, whose columns are in the order that ``query_for`` tells."""
    values = row[3:]
    middle = groups + len(ADDED)
    total, late = values[groups:middle], values[middle:]
    return Line(
        groups=values[:groups],
        total=Totals(**dict(zip(ADDED, total, strict=True))),
        corrections=Totals(**dict(zip(ADDED, late, strict=True))) if any(late) else NOTHING,
        others=row.others,
    )
