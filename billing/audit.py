# The audit: ledger, statements and counters say the same, to the nano-dollar, or somebody hears of it.

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from datetime import UTC, date, datetime, timedelta

from msgspec import Struct
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.cut_off import owners_cut_off, wait_for_reports
from billing.edges import Database
from billing.holds import Sums
from billing.ids import day_number
from billing.ledger import ROLLUP_KEY, SUMS
from billing.owed import Book, owed_by
from billing.partitions import partition_of
from billing.quotas import Quotas
from billing.sweep import LOST_AFTER

TRIES = 4  # calls close, flush and settle while we look: only what stays different counts
PAUSE = 0.5  # seconds between tries
SLACK = 60.0  # seconds below the watermark within which what is closed may still have to be settled
BEFORE = " before "  # in ``Difference.where``, and then the moment, where calls of a moving team were compared


class Difference(Struct, frozen=True, kw_only=True):
    """One quantity that two books disagree on."""

    day: date
    team_id: str
    where: str  # the line within the day: "key_a gpt-4o interactive answered", or "day", or "month"
    quantity: str
    ledger: int
    statements: int | None = None
    counters: int | None = None


class Pair(Struct, frozen=True):
    """The same sums in two books."""

    ledger: Sums
    counters: Sums

    @property
    def agrees(self) -> bool:
        """Whether both say the same."""
        return self.ledger == self.counters


class View(Struct, frozen=True):
    """What one look at a team shows. ``is_busy``: it has calls that run."""

    pair: Pair
    is_busy: bool


Look = Callable[[Sequence[Book] | None], Awaitable[Mapping[Book, View]]]


async def audit(database: Database, quotas: Quotas, day: date) -> list[Difference]:
    """Compare all books of one day, and return where they differ even after a moment's patience.

    Ledger and statements are read in one snapshot. A team or key whose figures stand still is compared with its
    counters whole; a team whose figures move is compared at the flushed watermark: calls from before it are all in the
    ledger and settled. So is every team while an owner is cut off; while one has calls to settle, counters are not
    compared at all. Counters that Redis no longer has, lost while we looked, or began after the watermark, are left
    out.
    """
    async with database.begin() as connection:
        differences = await compare_statements(connection, day)
    views = await _lasting(lambda books: _look_whole(database, quotas, day, books))
    if any(map(_stands_still, views.values())):
        cut_off, differing = await wait_for_reports(database), list(views)
        views = await _lasting(lambda books: _look_whole(database, quotas, day, books or differing))
    else:
        cut_off = await owners_cut_off(database)
    moving = [book for book, seen in views.items() if cut_off or not _stands_still(seen)]
    still = {book: seen[-1].pair for book, seen in views.items() if book not in moving}
    differences += _differences_in(day, still)
    teams = [book for book in moving if book[1] is None]
    may_compare = teams and not any(owner.unsettled for owner in cut_off)
    before = await flushed_before(database) if may_compare else None
    if before is not None:
        views = await _lasting(lambda books: _look_before(database, quotas, day, before, books or teams))
        seen_before = {book: seen[-1].pair for book, seen in views.items()}
        differences += _differences_in(day, seen_before, f"{BEFORE}{datetime.fromtimestamp(before, UTC):%H:%M}")
    return differences


def _stands_still(seen: Sequence[View]) -> bool:
    """Whether the figures of a book were the same at each look, and none of its calls ran."""
    return len(set(seen)) == 1 and not seen[-1].is_busy


async def flushed_before(database: Database) -> float | None:
    """Return the moment before which every call is in the ledger and settled: a whole minute in unix seconds.

    ``None`` when no flusher has reported.
    """
    async with database.begin() as connection:
        least = (await connection.execute(WATERMARK, {"listed": timedelta(seconds=LOST_AFTER)})).scalar_one()
    return None if least is None else (float(least) - SLACK) // 60 * 60


async def _lasting(look: Look) -> dict[Book, list[View]]:
    """Look several times, and return what was seen of the books that differed each time."""
    seen = {book: [view] for book, view in (await look(None)).items() if not view.pair.agrees}
    for _ in range(TRIES - 1):
        if not seen:
            break
        await asyncio.sleep(PAUSE)
        again = await look(list(seen))  # without the books that cannot be compared any more
        seen = {book: [*seen[book], view] for book, view in again.items() if not view.pair.agrees}
    return seen


async def _look_whole(database: Database, quotas: Quotas, day: date, books: Sequence[Book] | None) -> dict[Book, View]:
    """Compare everything that the ledger and the counters have, of ``books`` or of all."""
    async with database.begin() as connection:
        owed = await owed_by(connection, day)
    views = {}
    for book in owed if books is None else books:
        team_id, key_id = book
        state = await quotas.usage(team_id, day=day_number(day), key_id=key_id)
        if state.knows_day:
            counted = Sums(state.day_tokens, state.day_nanousd, state.month_nanousd)
            views[book] = View(Pair(owed.get(book, Sums()), counted), state.live > 0)
    return views


async def _look_before(
    database: Database, quotas: Quotas, day: date, before: float, teams: Iterable[Book]
) -> dict[Book, View]:
    """Compare what the books of teams have of calls, and of corrections, from before a moment."""
    async with database.begin() as connection:
        owed = await owed_by(connection, day, before)
    views = {}
    for book in teams:
        settled = await quotas.settled_before(book[0], day_number(day), before)
        if settled is not None:
            views[book] = View(Pair(owed.get(book, Sums()), settled), is_busy=False)
    return views


def _differences_in(day: date, pairs: Mapping[Book, Pair], when: str = "") -> list[Difference]:
    """Return a difference for each figure that two books disagree on."""
    differences = []
    for (team_id, key_id), pair in sorted(pairs.items(), key=lambda item: (item[0][0], item[0][1] or "")):
        whose = "" if key_id is None else f" of {key_id}"
        for name in Sums.__struct_fields__:
            where, quantity = name.split("_")
            ledger, counters = getattr(pair.ledger, name), getattr(pair.counters, name)
            if ledger != counters:
                differences.append(
                    Difference(
                        day=day,
                        team_id=team_id,
                        where=where + whose + when,
                        quantity="cost_nanousd" if quantity == "nanousd" else quantity,
                        ledger=ledger,
                        counters=counters,
                    )
                )
    return differences


async def compare_statements(connection: AsyncConnection, day: date) -> list[Difference]:
    """Compare the ledger's rows of a day with its daily sums, line by line; not where retention dropped the rows."""
    differences: list[Difference] = []
    if (await connection.execute(IS_DROPPED, {"day": day, "name": partition_of(day)})).scalar_one():
        return differences
    for row in (await connection.execute(LEDGER_AND_STATEMENTS, {"day": day})).mappings():
        where = " ".join(str(row[name]) for name in ROLLUP_KEY if name not in ("team_id", "day"))
        for name in SUMS:
            ledger, statements = int(row[f"ledger_{name}"] or 0), int(row[f"statements_{name}"] or 0)
            if ledger != statements:
                differences.append(
                    Difference(
                        day=day,
                        team_id=row["team_id"],
                        where=where,
                        quantity=name,
                        ledger=ledger,
                        statements=statements,
                    )
                )
    return differences


def _sums(book: str, sums: Sequence[str]) -> str:
    return ", ".join(f"{book}.{name} AS {book}_{name}" for name in sums)


_KEY = ", ".join(ROLLUP_KEY)
_LEDGER_KEY = ", ".join(f"{made} AS {name}" for name, made in ROLLUP_KEY.items())
_LEDGER_SUMS = ", ".join("count(*) AS calls" if name == "calls" else f"sum({name}) AS {name}" for name in SUMS)

LEDGER_AND_STATEMENTS = text(f"""
    SELECT {_KEY}, {_sums("ledger", SUMS)}, {_sums("statements", SUMS)}
    FROM (SELECT {_LEDGER_KEY}, {_LEDGER_SUMS} FROM usage_records WHERE day = :day
          GROUP BY {", ".join(ROLLUP_KEY.values())}) AS ledger
    FULL JOIN (SELECT * FROM usage_daily WHERE day = :day) AS statements USING ({_KEY})
    ORDER BY {_KEY}
""")  # noqa: S608  (columns are ours)

IS_DROPPED = text("""
    SELECT to_regclass(:name) IS NULL AND NOT EXISTS (SELECT FROM usage_records WHERE day = :day)
       AND :day < (SELECT min(day) FROM usage_records)
""")

WATERMARK = text("""
    SELECT extract(epoch FROM min(watermark)) FROM flushers
    WHERE seen_at >= clock_timestamp() - CAST(:listed AS interval)
""")
