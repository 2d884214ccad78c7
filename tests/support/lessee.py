# An owner of leases as the books know one: it draws room, writes rows and says that it lives, each when a test says so.

from __future__ import annotations

from datetime import date

from msgspec.structs import replace

from billing.core.edges import Clock, Database
from billing.core.records import UsageRecord
from billing.ledger.ledger import insert_records
from billing.quotas.lease_store import NANOUSD, TOKENS, Need, PostgresLeases


class Lessee:
    """One owner by its id, in the time of a clock."""

    def __init__(self, database: Database, clock: Clock, owner: str = "host:1") -> None:
        self.id = owner
        self.database = database
        self.clock = clock
        self._granted: dict[date, dict[tuple[str, str], int]] = {}
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
        granted = {(row.scope, row.unit): row.granted for row in taken.leases or ()}
        before = self._granted.get(self.clock.today(), {})
        self._granted[self.clock.today()] = before | granted
        return any(granted.get((scope, unit), 0) > before.get((scope, unit), 0) for scope, unit, _ in rooms)

    async def book(self, *records: UsageRecord, today: date | None = None) -> int:
        """Write rows that name it into the ledger, in one transaction; return how many were new."""
        async with self.database.begin() as connection:
            named = [replace(record, owner=self.id) for record in records]
            return await insert_records(connection, named, today=today or self.clock.today())

    async def end(self) -> bool:
        """End, with everything in the ledger."""
        return await self.store.end(self.id)
