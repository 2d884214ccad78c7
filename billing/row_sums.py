# Rows of a day against its daily sums, at any number of rows. Lines go into drawers by a salted hash of their keys, and
# rows are added up drawer by drawer, a page of the day at a time; only drawers whose sums differ are opened. What one
# page returns is small, however many rows it had, and two errors that cancel out within a drawer lie in different ones
# under the next audit's salt.

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, date, datetime
from typing import Any

from msgspec import Struct
from sqlalchemy import TextClause, text
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.ids import least_id
from billing.ledger import ROLLUP_KEY, SUMS
from billing.partitions import partition_of

DRAWERS = 256
OPENED = 16  # drawers at most: where more differ, those are enough to begin with
DAY = 86_400.0  # seconds
FIRST_PAGE = 600.0  # seconds of a day
PAGE_TAKES = 0.5  # seconds that a page is to take: a statement has ten

Sums = dict[tuple[Any, ...], list[int]]


class LineDifference(Struct, frozen=True):
    """One sum of one line that rows and daily sums do not share."""

    line: str
    name: str
    rows: int
    daily: int


async def compare_lines(connection: AsyncConnection, day: date) -> tuple[int, list[LineDifference]]:
    """Compare a day's rows with its daily sums; return how many lines there are, and the differences.

    Nothing is compared where retention dropped the rows. The transaction sees one snapshot.
    """
    if (await connection.execute(IS_DROPPED, {"day": day, "name": partition_of(day)})).scalar_one():
        return 0, []
    salt = {"salt": random.getrandbits(31), "drawers": DRAWERS}
    count = (await connection.execute(COUNT, {"day": day})).scalar_one()
    rows = await _add_up_rows(connection, ROW_DRAWERS, day, salt)
    daily = _sums((await connection.execute(DAILY_DRAWERS, {"day": day} | salt)).all(), 1, {})
    drawers = [drawer for [drawer] in _differing(rows, daily)][:OPENED]
    if not drawers:
        return count, []
    opened = salt | {"opened": drawers}
    rows = await _add_up_rows(connection, ROW_LINES, day, opened)
    width = len(ROLLUP_KEY)
    daily = _sums((await connection.execute(DAILY_LINES, {"day": day} | opened)).all(), width, {})
    return count, [
        LineDifference(" ".join(map(str, line)), name, there, here)
        for line in _differing(rows, daily)
        for name, there, here in zip(SUMS, _of(rows, line), _of(daily, line), strict=True)
        if there != here
    ]


async def _add_up_rows(connection: AsyncConnection, query: TextClause, day: date, values: Mapping[str, Any]) -> Sums:
    """Add up a day's rows, a page after the other; pages grow and shrink with the time that they take."""
    sums: Sums = {}
    begins = datetime(day.year, day.month, day.day, tzinfo=UTC).timestamp()
    done, page = 0.0, FIRST_PAGE
    width = 1 if query is ROW_DRAWERS else len(ROLLUP_KEY)
    while done < DAY:
        until = min(DAY, done + page)
        bounds = {"day": day, "from": least_id(begins + done), "until": least_id(begins + until)}
        began = time.monotonic()
        _sums((await connection.execute(query, {**bounds, **values})).all(), width, sums)
        done, page = until, page * min(4.0, max(0.1, PAGE_TAKES / max(1e-6, time.monotonic() - began)))
    return sums


def _sums(rows: Sequence[Any], width: int, sums: Sums) -> Sums:
    """Add rows to sums: the first columns are the key."""
    for row in rows:
        key, amounts = tuple(row[:width]), row[width:]
        present = sums.get(key)
        sums[key] = list(amounts) if present is None else [a + b for a, b in zip(present, amounts, strict=True)]
    return sums


def _differing(one: Sums, other: Sums) -> list[tuple[Any, ...]]:
    return sorted(key for key in one.keys() | other.keys() if _of(one, key) != _of(other, key))


def _of(sums: Sums, key: tuple[Any, ...]) -> list[int]:
    return sums.get(key) or [0] * len(SUMS)


def _drawer(columns: Sequence[str]) -> str:
    return f"CAST(mod(hashtextextended(concat_ws(' ', {', '.join(columns)}), :salt), :drawers) AS integer)"


_MADE, _KEY = list(ROLLUP_KEY.values()), list(ROLLUP_KEY)
_OF_ROWS = ", ".join("count(*)" if name == "calls" else f"CAST(sum({name}) AS bigint)" for name in SUMS)
_OF_DAILY = ", ".join(f"CAST(sum({name}) AS bigint)" for name in SUMS)
_FROM_ROWS = "FROM usage_records WHERE day = :day AND request_id >= :from AND request_id < :until"
_FROM_DAILY = "FROM usage_daily WHERE day = :day"
_OPENED = "= ANY(CAST(:opened AS integer[]))"

ROW_DRAWERS = text(f"SELECT {_drawer(_MADE)}, {_OF_ROWS} {_FROM_ROWS} GROUP BY 1")
DAILY_DRAWERS = text(f"SELECT {_drawer(_KEY)}, {_OF_DAILY} {_FROM_DAILY} GROUP BY 1")
ROW_LINES = text(
    f"SELECT {', '.join(_MADE)}, {_OF_ROWS} {_FROM_ROWS} AND {_drawer(_MADE)} {_OPENED} GROUP BY {', '.join(_MADE)}"
)
DAILY_LINES = text(
    f"SELECT {', '.join(_KEY)}, {_OF_DAILY} {_FROM_DAILY} AND {_drawer(_KEY)} {_OPENED} GROUP BY {', '.join(_KEY)}"
)
COUNT = text("SELECT count(*) FROM usage_daily WHERE day = :day")
IS_DROPPED = text("""
    SELECT to_regclass(:name) IS NULL AND NOT EXISTS (SELECT FROM usage_records WHERE day = :day)
       AND :day < (SELECT min(day) FROM usage_records)
""")
