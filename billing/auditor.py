# The audit in the background: one process of the house at a time compares the books, all of them show what it found.

from __future__ import annotations

import asyncio
from datetime import timedelta

import msgspec
import structlog
from msgspec import Struct
from redis.asyncio import Redis

from billing.audit import BEFORE, Difference, audit
from billing.cut_off import owners_cut_off
from billing.edges import Clock, Database
from billing.quotas import Quotas
from billing.store_errors import STORES_AWAY

EVERY = 900.0  # seconds between audits, all processes together
CONFIRM_AFTER = 90.0  # seconds; by then what a dead process left is in the books: holds are freed within 60
TURN = "tollgate:audit-turn"  # Redis key: whoever sets it audits, the others wait for the next turn
FOUND = "tollgate:audit-found"  # Redis key: what the last audit found
LOOK_EVERY = EVERY / 30  # seconds

log = structlog.get_logger(__name__)


class Found(Struct, frozen=True):
    """What an audit found: figures of the ledger that statements or counters do not share."""

    at: float = 0.0  # unix seconds; 0: there was none yet
    statements: int = 0
    counters: int = 0


class Auditor:
    """Audits today and yesterday in turn with the other processes; ``found`` is what whoever came last has found."""

    def __init__(self, database: Database, redis: Redis, quotas: Quotas, clock: Clock) -> None:
        self.found = Found()
        self._database = database
        self._redis = redis
        self._quotas = quotas
        self._clock = clock

    async def run(self) -> None:
        """Audit when it is our turn, until cancelled; every difference is logged as an error."""
        while True:
            try:
                if await self._redis.set(TURN, "taken", nx=True, ex=round(EVERY)):
                    await self.audit_once()
                self.found = msgspec.json.decode(await self._redis.get(FOUND) or b"{}", type=Found)
            except (*STORES_AWAY, msgspec.DecodeError) as exc:
                log.warning("audit_failed", error=repr(exc))
            await asyncio.sleep(LOOK_EVERY)

    async def audit_once(self) -> None:
        """Compare the books, and let every process know how many figures differ, now and after a while still."""
        differences = await self._compare()
        if differences:
            await asyncio.sleep(CONFIRM_AFTER)
            before = {_figure(one) for one in differences}
            differences = [one for one in await self._compare() if _figure(one) in before]
        for owner in await owners_cut_off(self._database):
            log.warning("books_not_compared", owner=owner.owner, carried=str(owner.carried), seen=str(owner.seen))
        for one in differences:
            log.error("books_differ", **{name: str(getattr(one, name)) for name in one.__struct_fields__})
        counters = sum(one.counters is not None for one in differences)
        self.found = Found(self._clock.now(), len(differences) - counters, counters)
        await self._redis.set(FOUND, msgspec.json.encode(self.found), ex=round(100 * EVERY))

    async def _compare(self) -> list[Difference]:
        today = self._clock.today()
        days = (today - timedelta(days=1), today)
        return [one for day in days for one in await audit(self._database, self._quotas, day)]


def _figure(one: Difference) -> tuple[str, ...]:
    """Return which figure differs, whatever moment it was compared at."""
    return str(one.day), one.team_id, one.where.partition(BEFORE)[0], one.quantity
