# The audit in the background: one process at a time compares the accounts of today and yesterday, all of them show what
# it found. Balances that differ are healed; for all else an operator looks.

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta

import msgspec
import structlog
from msgspec import Struct
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.core.edges import Database
from billing.core.store_errors import POSTGRES_AWAY
from billing.upkeep.audit import BALANCES, COSTS, STATEMENTS, Difference, audit
from billing.upkeep.heal import Healed, heal_balance
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
