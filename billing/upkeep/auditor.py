# The audit in the background: one process at a time compares the accounts of today and yesterday, all of them show what
# it found. A balance that differs is made anew, under its lock: drawn from its leases, corrected from the corrections,
# the cap from the row that has the limit; that is an error all the same, and told as one. For all else an operator
# looks.

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta

import msgspec
import structlog
from msgspec import Struct
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.core.edges import Database
from billing.core.store_errors import POSTGRES_AWAY
from billing.upkeep.audit import BALANCES, COSTS, STATEMENTS, Difference, audit
from billing.upkeep.turns import Turns

EVERY = 900.0  # seconds between audits, all processes together
LOOK_EVERY = EVERY / 30  # seconds
TURN = "audit"

log = structlog.get_logger(__name__)


class Found(Struct, frozen=True):
    """What an audit found: how many lines, leases and balances it compared, and how many figures differ from their
    source."""

    at: float = 0.0  # unix seconds; 0: there was none yet
    statements: int = 0  # and of rows that do not cost what their tokens cost
    counters: int = 0  # of leases and balances
    books: int = 0


class Healed(Struct, frozen=True):
    """A balance that was made anew."""

    scope: str
    unit: str
    period: str
    before: dict[str, int | None]  # cap, drawn and corrected
    after: dict[str, int | None]


class Auditor:
    """Audits in turn with the other processes; ``found`` is what the last audit of any has found.

    ``record`` writes a healed balance into the audit log, in the transaction that healed it.
    """

    def __init__(
        self, database: Database, turns: Turns, *, record: Callable[[AsyncConnection, Healed], Awaitable[None]]
    ) -> None:
        self.found = Found()
        self._database = database
        self._turns = turns
        self._record = record

    async def run(self) -> None:
        """Audit when it is our turn, until cancelled; every difference is logged as an error."""
        while True:
            try:
                await self.look_once()
            except (*POSTGRES_AWAY, msgspec.DecodeError) as exc:
                log.warning("audit_failed", error=repr(exc))
            await asyncio.sleep(LOOK_EVERY)

    async def look_once(self) -> None:
        """Audit if it is our turn, and learn what was found last. Raises POSTGRES_AWAY."""
        if await self._turns.take(TURN, EVERY):
            await self.audit_once()
        self.found = msgspec.json.decode(await self._turns.told(TURN) or "{}", type=Found)

    async def audit_once(self) -> None:
        """Compare the accounts, heal balances that differ, and let every process know what was found."""
        now = await self._turns.now()
        today = now.date()
        reports = [await audit(self._database, day, today=today) for day in (today - timedelta(days=1), today)]
        differences = {_figure(one): one for report in reports for one in report.differences}  # a month has two days
        for one in differences.values():
            log.error("books_differ", **{name: str(getattr(one, name)) for name in one.__struct_fields__})
        for scope, unit, period in sorted({_balance(one) for one in differences.values() if one.book == BALANCES}):
            await self._heal(scope, unit, period)
        of_statements = sum(one.book in (COSTS, STATEMENTS) for one in differences.values())
        books = sum(report.books for report in reports)
        found = Found(now.timestamp(), of_statements, len(differences) - of_statements, books)
        await self._turns.tell(TURN, msgspec.json.encode(found).decode())
        self.found = found
        log.info("books_compared", books=books, differences=len(differences))

    async def _heal(self, scope: str, unit: str, period: str) -> None:
        async with self._database.begin() as connection:
            healed = await heal_balance(connection, scope, unit, period)
            if healed is not None:
                await self._record(connection, healed)
        if healed is not None:
            log.error("balance_healed", **msgspec.to_builtins(healed))


def _figure(one: Difference) -> tuple[str, ...]:
    day = "" if one.book == BALANCES else str(one.day)  # its period stands in ``where``
    return one.book, day, one.where, one.quantity


def _balance(one: Difference) -> tuple[str, str, str]:
    """Return the scope, unit and period of a balance that differs."""
    scope, _, period = one.where.rpartition(" ")
    return scope, one.quantity.split(" ")[0], period


async def heal_balance(connection: AsyncConnection, scope: str, unit: str, period: str) -> Healed | None:
    """Make a balance anew; ``None``: it was as it should be.

    The limit's row is locked before the balance, as when a limit is changed. A process that draws changes lease and
    balance in one transaction, under the balance's lock: what the second statement sees of leases is what the balance
    has.
    """
    key = {"scope": scope, "unit": unit, "period": period}
    await connection.execute(MAKE, key)
    before = (await connection.execute(LOCK, key)).one()._asdict()
    after = (await connection.execute(MAKE_ANEW, key)).one()._asdict()
    return None if before == after else Healed(scope, unit, period, before, after)


MAKE = text("""
    INSERT INTO balances (scope, unit, period, cap) SELECT :scope, :unit, :period, cap_of(:scope, :unit, :period)
    ON CONFLICT DO NOTHING
""")
LOCK = text("""
    SELECT cap, drawn, corrected FROM balances WHERE scope = :scope AND unit = :unit AND period = :period
    FOR NO KEY UPDATE
""")
MAKE_ANEW = text("""
    WITH span AS (
        SELECT CAST(rpad(:period, 10, '-01') AS date) AS first,
               CASE length(:period) WHEN 7 THEN interval '1 month' ELSE interval '1 day' END AS long
    )
    UPDATE balances
    SET cap = cap_of(scope, unit, period),
        drawn = (
            SELECT coalesce(sum(granted - returned), 0) FROM leases, span
            WHERE leases.scope = :scope AND leases.unit = :unit AND day >= first AND day < first + long
        ),
        corrected = (
            SELECT coalesce(sum(CASE :unit WHEN 'tokens' THEN input_tokens + output_tokens ELSE cost_nanousd END), 0)
            FROM corrections, span
            WHERE (:scope = 'team:' || team_id OR :scope = 'key:' || key_id
                   OR :scope = 'model:' || team_id || '/' || model_used)
              AND day >= first AND day < first + long
        )
    WHERE scope = :scope AND unit = :unit AND period = :period
    RETURNING cap, drawn, corrected
""")
