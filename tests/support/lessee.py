# An owner of leases as the books know one: it draws room, writes rows and says that it lives, each when a test says so.

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import date

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.edges import Clock, Database
from billing.ids import date_of
from billing.lease_store import NANOUSD, TOKENS, Need, PostgresLeases
from billing.ledger import insert_records
from billing.records import CHARGED, UsageRecord

Room = tuple[str, str]  # scope and unit


class Lessee:
    """One owner by its id, in the time of a clock."""

    def __init__(self, database: Database, clock: Clock, owner: str = "host:1") -> None:
        self.id = owner
        self.database = database
        self.clock = clock
        self.store = PostgresLeases(database, clock, uses_server_time=False)

    async def begin(self) -> Lessee:
        """Be listed."""
        await self.store.begin(self.id, "1.0")
        return self

    async def report(self, oldest: float | None = None, backlog: int = 0) -> None:
        """Say that it lives, and when its oldest call began that runs or waits (unix seconds)."""
        now = self.clock.now()
        assert await self.store.beat(self.id, now if oldest is None else min(now, oldest), backlog) is not None

    async def draw(self, tokens: int, nanousd: int, *, team_id: str = "team_a", key_id: str = "key_a") -> bool:
        """Draw room of a team and its key for today; whether there was any."""
        rooms = [(scope, unit, amount) for scope in (f"team:{team_id}", f"key:{key_id}")
                 for unit, amount in ((TOKENS, tokens), (NANOUSD, nanousd))]  # fmt: skip
        needs = [Need(scope, unit, amount, amount, amount) for scope, unit, amount in rooms]
        taken = await self.store.take(self.id, f"{self.clock.today()}", [needs], 1.0)
        return bool(taken.leases) and taken.refused is None

    async def book(self, *records: UsageRecord, today: date | None = None) -> list[UsageRecord]:
        """Write rows into the ledger in one transaction; return those that were new."""
        async with self.database.begin() as connection:
            return await book_rows(connection, records, self.id, today or self.clock.today())

    async def end(self) -> bool:
        """End, with everything in the ledger."""
        return await self.store.end(self.id)


async def book_rows(
    connection: AsyncConnection, records: Sequence[UsageRecord], owner: str, today: date
) -> list[UsageRecord]:
    """Write rows that name an owner, with what they spend of its leases."""
    new = await insert_records(connection, records, today=today)
    spent: Counter[tuple[str, str, str]] = Counter()
    for record in new:
        if record.status in CHARGED:
            day = date_of(record.request_id).isoformat()
            for scope in (f"team:{record.team_id}", f"key:{record.key_id}"):
                spent[scope, TOKENS, day] += record.input_tokens + record.output_tokens
                spent[scope, NANOUSD, day] += record.cost_nanousd
    rooms = list(spent)
    values = {"owner": owner, "owners": [owner] * len(rooms), "scopes": [one[0] for one in rooms],
              "units": [one[1] for one in rooms], "days": [one[2] for one in rooms],
              "amounts": list(spent.values())}  # fmt: skip
    if rooms:
        await connection.execute(BOOK, values)
    return new


BOOK = text("""
    SELECT book_spent(:owner, CAST(:owners AS text[]), CAST(:scopes AS text[]), CAST(:units AS text[]),
                      CAST(:days AS text[]), CAST(:amounts AS bigint[]))
""")
