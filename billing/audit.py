# The audit: ledger, statements and counters say the same, to the nano-dollar, or somebody hears of it.

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from uuid import UUID

from msgspec import Struct
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.corrections import sums_of
from billing.edges import Database
from billing.ledger import EPOCH, ROLLUP_KEY, SUMS
from billing.partitions import partition_of
from billing.quotas import Quotas
from billing.records import CHARGED

TRIES = 4  # calls close, flush and settle while we look: only what stays different counts
PAUSE = 0.5  # seconds between tries
SLACK = 60.0  # seconds below the watermark within which what is closed may still have to be settled
BEFORE = " before "  # in ``Difference.where``, and then the moment, where calls of a moving team were compared
LISTED = 3600.0  # seconds; a flusher not seen for so long is lost, and its calls with it


class Difference(Struct, frozen=True, kw_only=True):
    """One quantity that two books disagree on."""

    day: date
    team_id: str
    where: str  # the line within the day: "key_a gpt-4o interactive answered", or "day", or "month"
    quantity: str
    ledger: int
    statements: int | None = None
    counters: int | None = None


class Sums(Struct, frozen=True):
    """What one book says that a team owes."""

    day_tokens: int = 0
    day_nanousd: int = 0
    month_nanousd: int = 0


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


Book = tuple[str, str | None]  # a team's id, and a key's of it or None for the whole team: whoever has limits
Look = Callable[[Sequence[Book] | None], Awaitable[Mapping[Book, View]]]


async def audit(database: Database, quotas: Quotas, day: date) -> list[Difference]:
    """Compare all books of one day, and return where they differ even after a moment's patience.

    Ledger and statements are read in one snapshot. A team or key whose figures stand still is compared with its
    counters whole; a team whose figures move is compared at the flushed watermark: calls from before it are all in the
    ledger and settled. Counters that Redis no longer has, or began after the watermark, are left out.
    """
    async with database.begin() as connection:
        differences = await compare_statements(connection, day)
    views = await _lasting(lambda books: _look_whole(database, quotas, day, books))
    moving = [book for book, seen in views.items() if len(set(seen)) > 1 or any(view.is_busy for view in seen)]
    still = {book: seen[-1].pair for book, seen in views.items() if book not in moving}
    differences += _name(day, still)
    teams = [book for book in moving if book[1] is None]
    before = await flushed_before(database) if teams else None
    if before is not None:
        views = await _lasting(lambda books: _look_before(database, quotas, day, before, books or teams))
        seen_before = {book: seen[-1].pair for book, seen in views.items()}
        differences += _name(day, seen_before, f"{BEFORE}{datetime.fromtimestamp(before, UTC):%H:%M}")
    return differences


async def flushed_before(database: Database) -> float | None:
    """Return the moment before which every call is in the ledger and settled: a whole minute in unix seconds.

    ``None`` when no flusher has reported.
    """
    async with database.begin() as connection:
        least = (await connection.execute(WATERMARK, {"listed": timedelta(seconds=LISTED)})).scalar_one()
    return None if least is None else (float(least) - SLACK) // 60 * 60


async def _lasting(look: Look) -> dict[Book, list[View]]:
    """Look several times, and return what was seen of the books that differed each time."""
    seen: dict[Book, list[View]] = {book: [view] for book, view in (await look(None)).items()}
    seen = {book: views for book, views in seen.items() if not views[0].pair.agrees}
    for _ in range(TRIES - 1):
        if not seen:
            break
        await asyncio.sleep(PAUSE)
        for book, view in (await look(list(seen))).items():
            seen[book].append(view)
        seen = {book: views for book, views in seen.items() if not views[-1].pair.agrees}
    return seen


async def _look_whole(database: Database, quotas: Quotas, day: date, books: Sequence[Book] | None) -> dict[Book, View]:
    """Compare everything that the ledger and the counters have, of ``books`` or of all."""
    async with database.begin() as connection:
        owed = await _owed(connection, day)
    views = {}
    for book in owed if books is None else books:
        team_id, key_id = book
        state = await quotas.usage(team_id, day=(day - EPOCH).days, key_id=key_id)
        if state.knows_day:
            counted = Sums(state.day_tokens, state.day_nanousd, state.month_nanousd)
            views[book] = View(Pair(owed.get(book, Sums()), counted), state.live > 0)
    return views


async def _look_before(
    database: Database, quotas: Quotas, day: date, before: float, teams: Iterable[Book]
) -> dict[Book, View]:
    """Compare what the books of teams have of calls, and of corrections, from before a moment."""
    async with database.begin() as connection:
        owed = await _owed(connection, day, before)
    views = {}
    for book in teams:
        settled = await quotas.settled_before(book[0], (day - EPOCH).days, before)
        if settled is not None:
            counted = Sums(settled.tokens, settled.day_nanousd, settled.month_nanousd)
            views[book] = View(Pair(owed.get(book, Sums()), counted), is_busy=False)
    return views


async def _owed(connection: AsyncConnection, day: date, before: float | None = None) -> dict[Book, Sums]:
    """Return what every team and key owes by the statements and the corrections, in one snapshot; if only before a
    moment, then without the rows of calls that are younger."""
    await connection.execute(text("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY"))
    query = {"day": day, "charged": [status.value for status in CHARGED]}
    amounts: dict[Book, list[int]] = {(row.team_id, None): [0, 0, 0] for row in await connection.execute(TEAMS)}
    for row in await connection.execute(OWED, query):
        more = int(row.day_tokens or 0), int(row.day_nanousd or 0), int(row.month_nanousd)
        _add(amounts, row.team_id, row.key_id, *more)
    moment = None if before is None else datetime.fromtimestamp(before, UTC)
    if before is not None and moment is not None:
        younger = query | {"first": UUID(int=int(before * 1000) << 80), "first_day": moment.date()}
        for row in await connection.execute(YOUNGER, younger):
            less = -int(row.day_tokens or 0), -int(row.day_nanousd or 0), -int(row.month_nanousd)
            _add(amounts, row.team_id, row.key_id, *less)
    first = day.replace(day=1)
    last = (first + timedelta(days=31)).replace(day=1) - timedelta(days=1)
    for one in await sums_of(connection, first, last, before=moment):
        is_of_day = one.day == day
        more = one.tokens * is_of_day, one.cost_nanousd * is_of_day, one.cost_nanousd
        _add(amounts, one.team_id, one.key_id, *more)
    return {book: Sums(*each) for book, each in amounts.items()}


def _add(amounts: dict[Book, list[int]], team_id: str, key_id: str | None, *more: int) -> None:
    """Add to the team's book, and to its key's."""
    for book in {(team_id, None), (team_id, key_id)}:
        present = amounts.setdefault(book, [0, 0, 0])
        amounts[book] = [one + another for one, another in zip(present, more, strict=True)]


def _name(day: date, pairs: Mapping[Book, Pair], when: str = "") -> list[Difference]:
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

TEAMS = text("SELECT id AS team_id FROM teams")

OWED = text("""
    SELECT team_id, key_id,
           sum(input_tokens + output_tokens) FILTER (WHERE day = :day) AS day_tokens,
           sum(cost_nanousd) FILTER (WHERE day = :day) AS day_nanousd,
           sum(cost_nanousd) AS month_nanousd
    FROM usage_daily
    WHERE status = ANY(CAST(:charged AS text[]))
      AND day >= date_trunc('month', CAST(:day AS date))
      AND day < date_trunc('month', CAST(:day AS date)) + interval '1 month'
    GROUP BY team_id, key_id
    ORDER BY team_id, key_id
""")

YOUNGER = text("""
    SELECT team_id, key_id,
           sum(input_tokens + output_tokens) FILTER (WHERE day = :day) AS day_tokens,
           sum(cost_nanousd) FILTER (WHERE day = :day) AS day_nanousd,
           sum(cost_nanousd) AS month_nanousd
    FROM usage_records
    WHERE status = ANY(CAST(:charged AS text[]))
      AND day >= greatest(CAST(:first_day AS date), CAST(date_trunc('month', CAST(:day AS date)) AS date))
      AND day < date_trunc('month', CAST(:day AS date)) + interval '1 month'
      AND request_id >= :first
    GROUP BY team_id, key_id
""")
