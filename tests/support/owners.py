# An owner of calls as a gateway is one: quotas, journal, flusher and leases on real servers, without the HTTP.

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from pathlib import Path

from redis.asyncio import Redis

from billing.core.holds import Hold, HoldRequest, Leg, Limits, Scope
from billing.core.records import Status
from billing.journal.journal import Journal
from billing.quotas.lease_store import PostgresLeases
from billing.quotas.leases import Leases
from billing.quotas.quotas import Quotas
from billing.quotas.rates import DEADLINE, RateLimits
from billing.upkeep.flusher import Flusher
from billing.upkeep.owner import Owner, owner_id
from gateway.calls.accounting import CallAccounting
from gateway.core.background import stop_all
from gateway.core.clock import Clock
from gateway.storage.database import Database
from tests.support.factories import make_record

UNLIMITED = Limits()


@dataclass
class Process:
    """One process's books, all in this one."""

    clock: Clock
    leases: Leases
    rates: RateLimits
    quotas: Quotas
    journal: Journal
    flusher: Flusher
    owner: Owner

    def ask(self, *, team: Limits = UNLIMITED, tokens: int = 1000, cost: int = 1_000_000) -> HoldRequest:
        """Return a request for a hold."""
        return HoldRequest(
            request_id=self.clock.new_id(),
            team_id="team_a",
            scopes=(Scope("team", "team_a", team), Scope("key", "key_a", UNLIMITED)),
            legs=(Leg("a", tokens, cost),),
        )

    async def begin(self, request: HoldRequest) -> CallAccounting:
        """Hold and open a call that must have room."""
        hold = await self.quotas.open(request)
        assert isinstance(hold, Hold), hold
        account = CallAccounting(hold, self.journal, self.quotas)
        account.open(
            make_record(request.request_id, owner=hold.owner, output_tokens=0, status=Status.FAILED, cost_nanousd=0)
        )
        return account

    def close(self, account: CallAccounting, *, tokens: int = 120, cost: int = 400_000) -> None:
        """Close a call in the journal."""
        hold = account.hold
        account.close(
            make_record(
                hold.request.request_id, owner=hold.owner, input_tokens=tokens, output_tokens=0, cost_nanousd=cost
            )
        )

    async def call(self, *, tokens: int = 120, cost: int = 400_000, team: Limits = UNLIMITED) -> None:
        """Make a whole call."""
        account = await self.begin(self.ask(team=team))
        self.close(account, tokens=tokens, cost=cost)
        account.settle()

    async def flush(self) -> None:
        """Carry what is closed to the ledger."""
        while await self.flusher.flush_once():
            pass

    async def stop(self) -> None:
        """End as a process does that is asked to."""
        await self.flush()
        await self.owner.stop()
        self.journal.close()
        await self.rates.close()

    async def die(self) -> None:
        """End as a killed process does: nothing more is said; its locks are free."""
        tasks = (self.leases.returns.telling, self.owner._delivering)
        await stop_all([task for task in tasks if task is not None])
        self.journal.close()
        if self.owner._claim is not None:
            os.close(self.owner._claim)
            self.owner._claim = None
        await self.rates.close()
        await asyncio.sleep(0)


async def open_process(data_dir: Path, database: Database, redis: Redis, *, deadline: float = DEADLINE) -> Process:
    """Start one, as the gateway does; it beats and flushes when a test says so. ``deadline``: seconds for Redis."""
    clock = Clock()
    journal = Journal.open(data_dir / "journal", clock=clock)
    store = PostgresLeases(database, clock)
    leases = Leases(store, clock, owner_id(journal), share=0.25)
    rates = RateLimits(redis, clock, owner=leases.owner, deadline=deadline)
    flusher = Flusher(journal, database, clock, leases)
    owner = Owner(leases, flusher, journal, clock)
    await owner.start()
    return Process(clock, leases, rates, Quotas(leases, rates), journal, flusher, owner)
