# Carries closed calls from the journal to the ledger, and adopts the journals of dead processes.

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import date
from itertools import islice

import structlog
from sqlalchemy.exc import StatementError

from billing.core.edges import Clock, Database
from billing.core.records import UsageRecord
from billing.core.store_errors import POSTGRES_AWAY, is_about_a_value
from billing.journal.backlog import Closed, put_aside
from billing.journal.journal import Journal
from billing.journal.kept import KEPT_FOR
from billing.ledger.ledger import TooOld, write_records
from billing.ledger.partitions import ensure_partitions
from billing.ledger.price_editions import PriceEditions
from billing.quotas.lease_store import REACH_THE_DISK
from billing.quotas.leases import Leases

AGAIN = 500  # rows in one transaction, of calls that are delivered again: they are read between two calls' turns
BATCH = 2000  # rows in one transaction, at most
LEAST_BATCH = 20  # rows, while Postgres is too slow for more in the time that a statement has
GATHER = 0.05  # seconds to wait for more, once something closed
CROWD = 8  # rows in one go, from which on it pays to wait longer: a transaction costs the same for one and for hundreds
GATHER_CROWD = 0.5  # seconds to wait then; what a report of usage may lack is a second or two
GATHER_EACH = 0.005  # seconds from close to flush for each living owner: of however many, 200 flush in a second
GATHER_MOST = 0.5  # seconds
ADOPT_EVERY = 10.0  # seconds between looks for journals of dead processes
LONGEST_PAUSE = 5.0  # seconds between tries while Postgres is away
FLUSH_WITHIN = 30.0  # seconds for one batch, whatever it hangs on; it is tried again
SYNC_EVERY = 1.0  # seconds, with ``fsync: interval``

# What a record raises that cannot be made a row. Anything else is about the process or Postgres and is tried again.
UNWRITABLE = (StatementError, ValueError, TypeError, ArithmeticError, LookupError, AttributeError, AssertionError)

log = structlog.get_logger(__name__)


class Flusher:
    """Writes what the journal has closed into Postgres, in batches, each record once.

    What the rows have spent is booked on their owners' leases in the same transaction, so no owner needs to hear of it.
    """

    def __init__(
        self,
        journal: Journal,
        database: Database,
        clock: Clock,
        leases: Leases | None = None,
        prices: PriceEditions | None = None,
    ) -> None:
        self._journal = journal
        self._database = database
        self._clock = clock
        self._leases = leases  # whose beat counts what is flushed
        self._prices = prices or PriceEditions(())
        self._one_at_a_time = asyncio.Lock()
        self._prepared_for: date | None = None  # its partitions, and those of the days after it, are there
        self._batch = BATCH
        self._gathered = 0  # rows that the last wait brought
        self._wake = asyncio.Event()
        self._closed_at = 0.0  # loop time; when the first call closed of those that wait

    @property
    def backlog(self) -> int:
        """Closed calls that are not in the ledger yet."""
        return self._journal.backlog

    async def run(self) -> None:
        """Flush whenever something closes, until cancelled. A lost database only makes it wait."""
        self._journal.on_closed = self._note_close
        self._note_close()
        syncing = asyncio.create_task(self._sync_for_ever()) if self._journal.fsync == "interval" else None
        try:
            await self._flush_for_ever()
        finally:
            if syncing is not None:
                syncing.cancel()

    async def _flush_for_ever(self) -> None:
        pause, chores_due, now = 0.0, 0.0, asyncio.get_running_loop().time
        while True:
            try:
                if now() >= chores_due:
                    chores_due = now() + ADOPT_EVERY
                    await self.adopt()
                self._gathered = written = await self.flush_once()
                while written and self.backlog >= self._batch and now() < chores_due:  # else gather
                    self._gathered += (written := await self.flush_once())
                pause = 0.0
            except Exception as exc:  # whatever it is: as long as this loop lives, nothing is lost
                pause = min(LONGEST_PAUSE, max(0.1, 2 * pause))
                is_known = isinstance(exc, POSTGRES_AWAY)
                log.error(
                    "ledger_unreachable", error=repr(exc), backlog=self.backlog, pause=pause, exc_info=not is_known
                )
            if pause:
                await asyncio.sleep(pause)
            elif not self.backlog or now() < chores_due:
                await self._gather()

    async def flush_once(self) -> int:
        """Write one batch and return how many calls left the backlog. Raises what the database raises."""
        async with self._one_at_a_time:
            taken = self._journal.waiting.take(self._batch)
            return await self._flush(taken) if taken else 0

    async def _flush(self, taken: Sequence[Closed]) -> int:
        stuck: set[str] = set()
        try:
            too_old = await self._write([closed.record for closed in taken], stuck)
        except Exception:
            self._batch = max(LEAST_BATCH, self._batch // 2)
            raise
        self._batch = min(BATCH, 2 * self._batch)
        flushed = [closed for closed in taken if closed.record.request_id not in stuck | too_old]
        self._journal.waiting.mark_flushed(flushed)
        refused = [closed for closed in taken if closed.record.request_id in too_old]
        if refused:
            log.error("ledger_forgot", calls=len(refused))
        return len(flushed) + self._journal.waiting.quarantine(refused)

    async def adopt(self) -> None:
        """Take over what dead processes left in the journal folder."""
        for _ in self._journal.adopt_each():
            await asyncio.sleep(0)  # a segment takes some 100 ms: let calls go on between two

    async def deliver_again(self) -> None:
        """Write the calls of the last day again, for a database that forgot: it takes those that it lacks."""
        async with self._one_at_a_time:
            self._prices.forget()  # after a flush that was under way, told by the database that was there before
        for calls in self._journal.kept(self._clock.now() - KEPT_FOR):
            while records := list(islice(calls, AGAIN)):
                await self._write(records, set())

    async def _sync_for_ever(self) -> None:
        while True:
            await asyncio.sleep(SYNC_EVERY)
            await asyncio.to_thread(self._journal.sync)

    def _note_close(self) -> None:
        if not self._wake.is_set():
            self._closed_at = asyncio.get_running_loop().time()
            self._wake.set()

    async def _gather(self) -> None:
        """Wait for a call to close, and for more that share its transaction. What closed while the last rows were on
        their way has waited for these already."""
        try:
            async with asyncio.timeout(1.0):  # wait_for could swallow a cancellation
                await self._wake.wait()
            owners = 1 if self._leases is None else self._leases.living
            least = GATHER if self._gathered < CROWD else GATHER_CROWD
            until = self._closed_at + max(least, min(GATHER_MOST, owners * GATHER_EACH))
            await asyncio.sleep(until - asyncio.get_running_loop().time())
        except TimeoutError:
            pass
        self._wake.clear()

    async def _write(self, records: Sequence[UsageRecord], stuck: set[str]) -> set[str]:
        """Write records in one transaction; if one of them cannot be stored, find it and move it to the rejected ones.
        ``stuck`` gains those for which the disk has no room. Return the ids that the ledger refuses because they are
        too old."""
        owner, sent = ("", (0, 0)) if self._leases is None else (self._leases.owner, self._leases.mark)
        today = self._clock.today()
        try:
            async with asyncio.timeout(FLUSH_WITHIN):
                if self._prepared_for != today:
                    async with self._database.begin() as connection:
                        await ensure_partitions(connection, today)
                    self._prepared_for = today
                async with self._database.at_once() as connection:
                    told = await self._prices.tell(connection, records)
                    written = await write_records(connection, records, today=today, flusher=owner)
                    await connection.execute(REACH_THE_DISK)
        except TooOld as exc:
            rest = [record for record in records if record.request_id not in exc.request_ids]
            return await self._write(rest, stuck) | set(exc.request_ids)
        except UNWRITABLE as exc:
            if isinstance(exc, StatementError) and not is_about_a_value(exc):
                raise
            if len(records) > 1:
                half = len(records) // 2
                return await self._write(records[:half], stuck) | await self._write(records[half:], stuck)
            file = put_aside(self._journal.directory, record := records[0])
            if file is None:
                stuck.add(record.request_id)
            else:
                log.error("ledger_record_rejected", request_id=record.request_id, file=str(file), error=repr(exc))
        else:
            self._prices.note(told)
            if self._leases is not None and written.beat is not None:
                self._leases.heard(sent, written.beat)
        return set()
