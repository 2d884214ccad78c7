# The accounting of one process, wired together: quotas, journal, flusher, owner, sweeper, auditor.

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from msgspec import Struct
from redis.asyncio import Redis

from billing.journal.journal import Journal
from billing.ledger.price_editions import PriceEditions
from billing.quotas.lease_store import PostgresLeases
from billing.quotas.leases import Leases
from billing.quotas.quotas import Quotas
from billing.quotas.rates import RateLimits
from billing.quotas.reservations import Reservations
from billing.upkeep.auditor import Auditor
from billing.upkeep.flusher import Flusher
from billing.upkeep.owner import Owner, owner_id
from billing.upkeep.sweep import Sweeper
from billing.upkeep.turns import Turns
from gateway.core.clock import Clock
from gateway.core.settings import Settings
from gateway.core.version import VERSION
from gateway.storage.audit_log import record_healing
from gateway.storage.database import Database


class Books(Struct, frozen=True, kw_only=True):
    """The parts of the accounting. Owner, rates, flusher, sweeper and auditor are background loops, to be run by the
    caller."""

    quotas: Quotas
    reservations: Reservations
    journal: Journal
    flusher: Flusher
    owner: Owner
    sweeper: Sweeper
    auditor: Auditor
    prices: PriceEditions

    def follow(self, settings: Settings) -> None:
        """Go by other settings, as far as they may change while the deployment runs."""
        self.quotas.follow(settings.quotas.standalone_share)
        self.sweeper.keep_rows = settings.retention.usage
        self.prices.add(settings.prices())


@asynccontextmanager
async def open_books(settings: Settings, clock: Clock, database: Database, redis: Redis) -> AsyncIterator[Books]:
    """Open the accounting, and wait a moment for database and Redis, before anything is flushed or held."""
    async with AsyncExitStack() as stack:
        journal = Journal.open(settings.data_dir / "journal", fsync=settings.journal_fsync, clock=clock)
        stack.callback(journal.close)
        store = PostgresLeases(database, clock)
        leases = Leases(store, clock, owner_id(journal), share=settings.quotas.standalone_share)
        rates = RateLimits(redis, clock, owner=leases.owner)
        stack.push_async_callback(rates.close)
        prices = PriceEditions(settings.prices())
        flusher = Flusher(journal, database, clock, leases, prices)
        owner = Owner(leases, flusher, journal, clock, version=VERSION)
        stack.push_async_callback(owner.stop)
        await asyncio.gather(owner.start(), rates.start())
        turns = Turns(database, clock)
        yield Books(
            quotas=Quotas(leases, rates),
            reservations=Reservations(store, clock, version=VERSION),
            journal=journal,
            flusher=flusher,
            owner=owner,
            sweeper=Sweeper(database, clock, turns, keep_rows=settings.retention.usage),
            auditor=Auditor(database, turns, record=record_healing),
            prices=prices,
        )
