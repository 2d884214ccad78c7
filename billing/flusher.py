# Carries closed calls from the journal to the ledger, and gives the dead's journals a home.

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, date, datetime

import structlog
from sqlalchemy import text
from sqlalchemy.exc import StatementError

from billing.edges import Clock, Database
from billing.journal import Closed, Journal
from billing.ledger import TooOld, find_records, insert_records
from billing.owners import carried, claim
from billing.records import UsageRecord
from billing.store_errors import POSTGRES_AWAY, is_about_a_value

BATCH = 2000  # rows in one transaction, at most
LEAST_BATCH = 20  # rows, while Postgres is too slow for more in the time that a statement has
GATHER = 0.05  # seconds to wait for more, once something closed
CROWD = 8  # rows in one go, from which on it pays to wait longer: a transaction costs the same for one and for hundreds
GATHER_CROWD = 0.2  # seconds to wait then
REPORT_EVERY = 10.0  # seconds between reports of the watermark, and between looks for dead journals
LONGEST_PAUSE = 5.0  # seconds between tries while Postgres is away
FLUSH_WITHIN = 30.0  # seconds for one batch, whatever it hangs on; it is tried again
SYNC_EVERY = 1.0  # seconds, with ``fsync: interval``

# What a record raises that cannot be made a row. Anything else is about the process or Postgres and is tried again.
UNWRITABLE = (StatementError, ValueError, TypeError, ArithmeticError, LookupError, AttributeError, AssertionError)

# ``watermark`` is in the time of the request ids, which our own clock makes; when we were seen is Postgres's to say.
REPORT = text("""
    INSERT INTO flushers (id, watermark, backlog, seen_at)
    VALUES (:id, :watermark, :backlog, coalesce(CAST(:now AS timestamptz), clock_timestamp()))
    ON CONFLICT (id) DO UPDATE
    SET watermark = excluded.watermark, backlog = excluded.backlog, seen_at = excluded.seen_at
    RETURNING extract(epoch FROM seen_at)
""")
TAKE_OFF = text("DELETE FROM flushers WHERE id = ANY(CAST(:ids AS text[])) AND unsettled = 0 RETURNING id")
LISTED = text("SELECT id FROM flushers WHERE id = ANY(CAST(:ids AS text[]))")

log = structlog.get_logger(__name__)


async def _book_nothing(_: Sequence[UsageRecord]) -> None: ...


class Flusher:
    """Writes what the journal has closed into Postgres, in batches, each record once.

    ``book_adopted`` is told which rows of dead processes were new, or may have been when a try to write them broke off:
    their holds were never settled, so the counters learn of them here. It is told what the ledger has, not what the
    journal says: the row of a stored answer comes before the journal's end of the call, and may be another.
    """

    def __init__(
        self,
        journal: Journal,
        database: Database,
        clock: Clock,
        *,
        book_adopted: Callable[[Sequence[UsageRecord]], Awaitable[None]] = _book_nothing,
        uses_server_time: bool = True,
    ) -> None:
        self.id = f"{socket.gethostname()}:{journal.token}"
        self._uses_server_time = uses_server_time
        self._server_ahead = 0.0  # seconds; what Postgres's clock shows more than ours
        self._claim: int | None = None  # our own file in the journal folder, locked
        self._journal = journal
        self._database = database
        self._clock = clock
        self._book_adopted = book_adopted
        self._one_at_a_time = asyncio.Lock()
        self._batch = BATCH
        self._unheard: set[str] = set()  # adopted calls that may have been written, though nobody heard of it
        self._gathered = 0  # rows that the last wait brought
        self._wake = asyncio.Event()
        self._writing = 0  # rows that others are writing at this moment
        self._none_writes = asyncio.Event()
        self._none_writes.set()
        self._may_write = asyncio.Event()  # nobody has paused us
        self._may_write.set()

    @property
    def backlog(self) -> int:
        """Closed calls that are not in the ledger yet."""
        return self._journal.backlog

    @property
    def is_behind(self) -> bool:
        """Whether the journal has calls that are not in the ledger: closed ones, or some whose end nobody knows."""
        return self._journal.oldest is not None

    @property
    def quarantined(self) -> int:
        """Files of the journal folder that are kept for people."""
        return self._journal.quarantined

    @property
    def damaged(self) -> int:
        """Segments found with places that could not be read."""
        return self._journal.damaged

    async def run(self) -> None:
        """Flush whenever something closes, until cancelled. A lost database only makes it wait."""
        self._journal.on_closed = self._wake.set
        self._wake.set()
        syncing = asyncio.create_task(self._sync_for_ever()) if self._journal.fsync == "interval" else None
        try:
            await self._flush_for_ever()
        finally:
            if syncing is not None:
                syncing.cancel()

    async def _flush_for_ever(self) -> None:
        pause, chores_due = 0.0, 0.0
        while True:
            try:
                if time.monotonic() >= chores_due:
                    chores_due = time.monotonic() + REPORT_EVERY
                    self._journal.prune_kept()
                    for _ in self._journal.adopt_each():
                        await asyncio.sleep(0)  # a segment takes some 100 ms: let calls go on between two
                    await self.report()
                self._gathered = 0
                while time.monotonic() < chores_due and (written := await self.flush_once()):
                    self._gathered += written
                pause = 0.0
            except Exception as exc:  # whatever it is: as long as this loop lives, nothing is lost
                pause = min(LONGEST_PAUSE, max(0.1, 2 * pause))
                is_known = isinstance(exc, POSTGRES_AWAY)
                log.error(
                    "ledger_unreachable", error=repr(exc), backlog=self.backlog, pause=pause, exc_info=not is_known
                )
            if pause:
                await asyncio.sleep(pause)
            elif not self.backlog or time.monotonic() < chores_due:
                await self._something_closed()

    async def flush_once(self) -> int:
        """Write one batch and return how many calls left the backlog. Raises what the database raises."""
        async with self._one_at_a_time:
            return await self._flush(self._journal.take_closed(self._batch))

    async def _flush(self, taken: Sequence[Closed]) -> int:
        if not taken:
            return 0
        adopted = {closed.record.request_id for closed in taken if closed.is_adopted}
        stuck: set[str] = set()
        try:
            new = await self._write([closed.record for closed in taken], stuck)
            unbooked = adopted & (self._unheard | {record.request_id for record in new})
            booked = await self._find(unbooked)
        except TooOld as exc:
            log.error("ledger_forgot", error=str(exc))
            self._unheard |= adopted - set(exc.request_ids)
            refused = [closed for closed in taken if closed.record.request_id in exc.request_ids]
            gone = self._journal.quarantine(refused)
            rest = [closed for closed in taken if closed.record.request_id not in exc.request_ids]
            return gone + await self._flush(rest)
        except Exception:
            self._batch = max(LEAST_BATCH, self._batch // 2)
            self._unheard |= adopted
            raise
        self._batch = min(BATCH, 2 * self._batch)
        flushed = [closed for closed in taken if closed.record.request_id not in stuck]
        self._journal.mark_flushed(flushed)
        if adopted:
            self._unheard -= adopted - stuck
            await self._book_adopted(booked)
        return len(flushed)

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """Keep everything where it is: inside, nothing is flushed or written beside us, and no adopted call is booked.

        Whoever reads the ledger's sums and ``Journal.unflushed`` inside sees every closed call in exactly one of them.
        """
        async with self._one_at_a_time:
            self._may_write.clear()
            try:
                await self._none_writes.wait()
                yield
            finally:
                self._may_write.set()

    @asynccontextmanager
    async def writing(self) -> AsyncIterator[None]:
        """Write a call's row beside the flusher: not while it is paused, and a pause waits for the end of the block.

        The call must be closed in the journal before anything else is awaited.
        """
        while not self._may_write.is_set():
            await self._may_write.wait()
        self._writing += 1
        self._none_writes.clear()
        try:
            yield
        finally:
            self._writing -= 1
            if not self._writing:
                self._none_writes.set()

    async def report(self) -> None:
        """Say how far this journal is carried: days close when every flusher has passed them.

        The dead whose journals are carried to the end are taken off the list.
        """
        if self._claim is None:
            try:
                self._claim = claim(self._journal.directory, self._journal.token, self.id)
            except OSError as exc:  # a full disk; without it our row only stays listed longer when we are dead
                log.warning("flusher_not_claimed", error=str(exc))
        now, oldest = self._clock.now(), self._journal.oldest
        row = {
            "id": self.id,
            "watermark": datetime.fromtimestamp(now if oldest is None else min(now, oldest), UTC),
            "backlog": self.backlog,
            "now": None if self._uses_server_time else datetime.fromtimestamp(now, UTC),
        }
        dead = carried(self._journal.directory)
        async with asyncio.timeout(FLUSH_WITHIN), self._database.begin() as connection:
            seen_at = (await connection.execute(REPORT, row)).scalar_one()
            if dead:
                await connection.execute(TAKE_OFF, {"ids": list(dead)})
                for listed in (await connection.execute(LISTED, {"ids": list(dead)})).scalars():
                    del dead[listed]  # the counters have yet to hear of its last calls
        self._server_ahead = float(seen_at) - now
        for path in dead.values():
            path.unlink(missing_ok=True)

    async def _sync_for_ever(self) -> None:
        while True:
            await asyncio.sleep(SYNC_EVERY)
            await asyncio.to_thread(self._journal.sync)

    async def _something_closed(self) -> None:
        try:
            async with asyncio.timeout(1.0):  # wait_for could swallow a cancellation
                await self._wake.wait()
            await asyncio.sleep(GATHER if self._gathered < CROWD else GATHER_CROWD)
        except TimeoutError:
            pass
        self._wake.clear()

    async def _write(self, records: Sequence[UsageRecord], stuck: set[str]) -> list[UsageRecord]:
        """Write records in one transaction; if one of them cannot be stored, find it and put it aside. ``stuck`` gains
        those for which the disk has no room."""
        try:
            async with asyncio.timeout(FLUSH_WITHIN), self._database.begin() as connection:
                return await insert_records(connection, records, today=self._today())
        except UNWRITABLE as exc:
            if isinstance(exc, StatementError) and not is_about_a_value(exc):
                raise
            if len(records) == 1:
                if not self._put_aside(records[0], exc):
                    stuck.add(records[0].request_id)
                return []
        half = len(records) // 2
        return await self._write(records[:half], stuck) + await self._write(records[half:], stuck)

    async def _find(self, request_ids: Collection[str]) -> list[UsageRecord]:
        """Return what the ledger has of these calls."""
        if not request_ids:
            return []
        async with asyncio.timeout(FLUSH_WITHIN), self._database.begin() as connection:
            return await find_records(connection, request_ids)

    def _put_aside(self, record: UsageRecord, exc: Exception) -> bool:
        """Keep a record that Postgres will never take where people find it, so that it holds up no other."""
        file = self._journal.put_aside(record)
        if file is None:
            return False
        self._unheard.discard(record.request_id)
        log.error("ledger_record_rejected", request_id=record.request_id, file=str(file), error=repr(exc))
        return True

    def _today(self) -> date:
        """Return the UTC day by Postgres's clock, as far as we know it."""
        return datetime.fromtimestamp(self._clock.now() + self._server_ahead, UTC).date()
