# Who keeps the house's books in one process, wired together: quotas, journal, flusher, restorer, sweeper, auditor.

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from msgspec import Struct
from redis.asyncio import Redis

from billing.auditor import Auditor
from billing.flusher import Flusher
from billing.journal import Journal
from billing.quotas import Quotas
from billing.rebuild_store import PostgresStore
from billing.restore import Restorer
from billing.sweep import Sweeper
from gateway.clock import Clock
from gateway.database import Database
from gateway.settings import Settings


class Books(Struct, frozen=True, kw_only=True):
    """The keepers of the books. Flusher, sweeper and auditor keep them once somebody runs them."""

    quotas: Quotas
    journal: Journal
    flusher: Flusher
    restorer: Restorer
    sweeper: Sweeper
    auditor: Auditor

    def follow(self, settings: Settings) -> None:
        """Go by other settings, as far as they may change while the house runs."""
        self.quotas.follow(settings.quotas.standalone_share)
        self.sweeper.keep_rows = settings.retention.usage


@asynccontextmanager
async def open_books(settings: Settings, clock: Clock, database: Database, redis: Redis) -> AsyncIterator[Books]:
    """Open the books, and wait a moment until they count in Redis, before anything is adopted, flushed or held."""
    async with AsyncExitStack() as stack:
        journal = Journal.open(settings.data_dir / "journal", fsync=settings.journal_fsync, clock=clock)
        stack.callback(journal.close)
        quotas = Quotas(redis, clock, standalone_share=settings.quotas.standalone_share)
        stack.push_async_callback(quotas.disconnect)
        flusher = Flusher(journal, database, clock, book_adopted=quotas.book_adopted)
        restorer = Restorer(quotas, journal, flusher, PostgresStore(database, clock), redis, clock)
        stack.push_async_callback(restorer.stop)
        await restorer.start()
        yield Books(
            quotas=quotas,
            journal=journal,
            flusher=flusher,
            restorer=restorer,
            sweeper=Sweeper(quotas, database, clock, keep_rows=settings.retention.usage),
            auditor=Auditor(database, redis, quotas, clock),
        )
