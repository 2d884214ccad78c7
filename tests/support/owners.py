# An owner of calls as a gateway is one: quotas, journal, flusher and restorer on real servers, without the HTTP.

from __future__ import annotations

import asyncio
import os
import random
from dataclasses import dataclass
from pathlib import Path

from redis.asyncio import Redis

from billing.flusher import Flusher
from billing.holds import Hold, HoldRequest, Leg, Limits, Scope
from billing.journal import Journal
from billing.quotas import Quotas
from billing.rebuild_store import PostgresStore
from billing.records import Status
from billing.restore import Restorer
from gateway.answering.account import Account
from gateway.background import stop_all
from gateway.clock import Clock
from gateway.database import Database
from tests.support.factories import make_record

UNLIMITED = Limits()


@dataclass
class Owner:
    """One process's books, all in this one."""

    clock: Clock
    redis: Redis
    quotas: Quotas
    journal: Journal
    flusher: Flusher
    restorer: Restorer
    flushing: asyncio.Task[None] | None = None
    is_calling: bool = True

    def ask(
        self,
        team_id: str = "team_a",
        *,
        team: Limits = UNLIMITED,
        key: Limits = UNLIMITED,
        tokens: int = 1000,
        cost: int = 1_000_000,
    ) -> HoldRequest:
        """Return a request for a hold."""
        return HoldRequest(
            request_id=self.clock.new_id(),
            team_id=team_id,
            scopes=(Scope("team", team_id, team), Scope("key", "key_a", key)),
            legs=(Leg("a", tokens, cost),),
            valid_until=self.clock.now() + 5,
        )

    async def begin(self, request: HoldRequest) -> Account:
        """Hold and open a call that must have room."""
        hold = await self.quotas.open(request)
        assert isinstance(hold, Hold), hold
        account = Account(hold, self.journal, self.quotas)
        account.open(make_record(request.request_id, team_id=request.team_id, status=Status.FAILED, cost_nanousd=0))
        return account

    def close(self, account: Account, *, tokens: int = 120, cost: int = 400_000) -> None:
        """Close a call in the journal."""
        request = account.hold.request
        account.close(
            make_record(
                request.request_id,
                team_id=request.team_id,
                input_tokens=tokens,
                output_tokens=0,
                cost_nanousd=cost,
            )
        )

    async def call_for_ever(self) -> None:
        """Make calls of random length and cost, one after the other, as long as ``is_calling``."""
        dice = random.Random()
        while self.is_calling:
            account = await self.begin(self.ask())
            await asyncio.sleep(dice.expovariate(50))
            self.close(account, tokens=dice.randrange(1000), cost=dice.randrange(1_000_000))
            await asyncio.sleep(dice.expovariate(200))
            await account.settle()

    async def pause_flushing(self) -> None:
        """Flush nothing any more."""
        if self.flushing is not None:
            await stop_all([self.flushing])

    async def stop(self) -> None:
        """End as a process does that is asked to."""
        await self.pause_flushing()
        await self.restorer.stop()
        self.journal.close()
        await self.redis.aclose()

    async def die(self) -> None:
        """End as a killed process does: nothing more is said, flushed or taken off; the journal's locks are free."""
        await stop_all(task for task in (self.flushing, self.restorer._task, self.restorer._noting) if task is not None)
        self.journal.close()
        if self.flusher._claim is not None:
            os.close(self.flusher._claim)
        await self.quotas.disconnect()
        await self.redis.aclose()


async def open_owner(
    data_dir: Path,
    database: Database,
    redis_url: str,
) -> Owner:
    """Start an owner, as app.py does."""
    clock = Clock()
    redis: Redis = Redis.from_url(redis_url, socket_timeout=0.25, socket_connect_timeout=0.25)
    journal = Journal.open(data_dir / "journal", clock=clock)
    quotas = Quotas(redis, clock)
    flusher = Flusher(journal, database, clock, book_adopted=quotas.book_adopted)
    restorer = Restorer(quotas, journal, flusher, PostgresStore(database, clock), redis, clock)
    await restorer.start()
    owner = Owner(clock, redis, quotas, journal, flusher, restorer)
    owner.flushing = asyncio.create_task(flusher.run())
    return owner
