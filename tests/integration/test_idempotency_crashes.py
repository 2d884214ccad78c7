# A gateway that dies around the storing of an answer: the answer and its charge are both there, or neither is.

from __future__ import annotations

import os
from pathlib import Path

import pytest
from redis.asyncio import Redis
from sqlalchemy import text

from billing.core.holds import Hold, HoldRequest, Leg, Limits, Scope, Settlement
from billing.core.records import Status, UsageRecord
from billing.core.store_errors import POSTGRES_AWAY
from billing.journal.journal import Journal
from billing.quotas.lease_store import PostgresLeases
from billing.quotas.leases import Leases
from billing.quotas.quotas import Quotas
from billing.quotas.rates import RateLimits
from billing.upkeep.audit import audit
from billing.upkeep.flusher import Flusher
from billing.upkeep.owner import Owner, owner_id
from gateway.calls.accounting import CallAccounting
from gateway.idempotency.store import Answered, IdempotencyStore
from gateway.idempotency.stored_answers import Claim, Place, StoredAnswer
from gateway.storage.database import Database
from gateway.storage.encryption import Sealer
from protocol.usage import Usage
from tests.support.clock import SetClock
from tests.support.factories import make_record
from tests.support.postgres_proxy import postgres_proxy

PLACE = Place("team_a", "chat.completions", "key-1")
ANSWER = StoredAnswer(200, (), b"the whole answer")
COST = 700  # nano-dollars


class Scene:
    """A gateway that has streamed a part of an answer, and the process that comes after its death."""

    def __init__(self, database: Database, redis: Redis, folder: Path) -> None:
        self.clock = SetClock()
        self.database = database
        self.folder = folder
        self.store = IdempotencyStore(database, self.clock, Sealer("pepper", "idempotency"), retention=86_400.0)
        self.journal, self.owner, self.leases = self.process(database)
        self.quotas = Quotas(self.leases, RateLimits(redis, self.clock, owner=self.owner.id))

    def process(self, database: Database) -> tuple[Journal, Owner, Leases]:
        """Return a process's journal, itself as the database knows it, and its leases."""
        journal = Journal.open(self.folder, clock=self.clock)
        store = PostgresLeases(database, self.clock, uses_server_time=False)
        leases = Leases(store, self.clock, owner_id(journal), share=0.5)
        flusher = Flusher(journal, database, self.clock, leases)
        return journal, Owner(leases, flusher, journal, self.clock), leases

    async def begin(self) -> None:
        """Claim, hold, open and stream a part."""
        async with self.database.begin() as connection:
            await connection.execute(text("INSERT INTO teams (id, name) VALUES ('team_a', 'A')"))
        await self.owner.start()
        hold = await self.quotas.open(
            HoldRequest(
                request_id=self.clock.new_id(),
                team_id="team_a",
                scopes=(Scope("team", "team_a", Limits()), Scope("key", "key_a", Limits())),
                legs=(Leg("a", 500, 1000),),
            )
        )
        assert isinstance(hold, Hold)
        self.claim = Claim(PLACE, b"digest", hold.request.request_id)
        assert await self.store.claim(self.claim) == self.claim
        self.account = CallAccounting(hold, self.journal, self.quotas, owes_parts=False)
        unknown = {"status": Status.FAILED, "input_tokens": 0, "cached_input_tokens": 0, "output_tokens": 0}
        named = {"owner": self.owner.id, "held_tokens": 500, "held_nanousd": 1000}
        self.account.open(make_record(hold.request.request_id, cost_nanousd=0, **unknown, **named))
        self.account.follow(lambda: Settlement(Usage(100, 0, 12), 400), lambda: None)
        self.account.note_progress()
        self.record = make_record(hold.request.request_id, cost_nanousd=COST, **named)

    async def die(self, *, next_is_heard: bool = True) -> None:
        """Leave everything as it is; the next process adopts the journal, and ends the dead one.

        A next process that is not heard commits once without hearing of it, and flushes again.
        """
        self.journal.close()
        assert self.owner._claim is not None
        os.close(self.owner._claim)
        with postgres_proxy(self.database.url) as way:
            by_it = Database(way.url)
            after, owner, _ = self.process(by_it)
            await owner.start()
            flusher = Flusher(after, by_it, self.clock)
            if not next_is_heard:
                way.lose_commit_of("INSERT INTO usage_records")
                with pytest.raises(POSTGRES_AWAY):
                    await flusher.flush_once()
            while await flusher.flush_once():
                pass
            await owner.end_dead()
            await owner.stop()
            await by_it.close()
        after.close()

    async def books(self) -> list[tuple[str, int]]:
        """Return status and cost of every row, once ledger, statements, leases and balances agree: with every process
        gone, what is drawn is what the rows cost."""
        assert (await audit(self.database, self.clock.today(), today=self.clock.today())).differences == []
        async with self.database.begin() as connection:
            drawn = (
                await connection.execute(text("SELECT DISTINCT drawn FROM balances WHERE unit = 'nanousd'"))
            ).scalar()
            found = await connection.execute(text("SELECT status, cost_nanousd FROM usage_records"))
            rows = [tuple(row) for row in found]
        assert (drawn or 0) == sum(cost for _, cost in rows)
        return rows


@pytest.fixture
async def scene(database: Database, redis: Redis, tmp_path: Path) -> Scene:
    """A call with a key in the middle of its answer."""
    scene = Scene(database, redis, tmp_path)
    await scene.begin()
    return scene


def retry(scene: Scene) -> Claim:
    return Claim(PLACE, b"digest", scene.clock.new_id())


async def test_who_dies_before_storing_is_owed_nothing(scene: Scene) -> None:
    """A part was streamed; the retry will pay for the whole, so the part is free."""
    await scene.die()

    assert await scene.books() == [("failed", 0)]
    async with scene.database.begin() as connection:
        await connection.execute(text("UPDATE idempotency SET lease_until = now() - interval '1 s'"))
    again = retry(scene)
    assert await scene.store.claim(again) == again


async def test_who_dies_between_storing_and_the_journal_is_paid_once(scene: Scene) -> None:
    """The answer can be had again, so it is on the books: the row came with it, the journal's end adds nothing."""
    assert await scene.store.store(scene.claim, ANSWER, scene.record)
    await scene.die()

    assert await scene.books() == [("answered", COST)]
    assert await scene.store.claim(retry(scene)) == Answered(scene.claim.request_id, ANSWER)


async def test_a_call_that_its_adopter_writes_twice_is_counted_as_its_row_says(scene: Scene) -> None:
    """The ledger has the end, the journal lacks it, and the answer to the adopter's first commit is lost."""
    assert await scene.store.store(scene.claim, ANSWER, scene.record)
    await scene.die(next_is_heard=False)

    assert await scene.books() == [("answered", COST)]


async def test_who_ends_without_hearing_that_it_was_stored_is_paid_once(scene: Scene) -> None:
    """It leaves its books as a killed process does: the row is in the ledger, on the lease of its owner."""
    assert await scene.store.store(scene.claim, ANSWER, scene.record)
    scene.account.leave()
    scene.account.settle()
    await scene.die()

    assert await scene.books() == [("answered", COST)]


async def test_who_dies_after_the_journal_is_paid_once(scene: Scene) -> None:
    """The journal's copy of the record finds its row there."""
    assert await scene.store.store(scene.claim, ANSWER, scene.record)
    scene.account.close(scene.record)
    await scene.die()

    assert await scene.books() == [("answered", COST)]


async def test_who_lives_on_is_paid_once(scene: Scene) -> None:
    """Stored, closed, settled, flushed: one row, counted once everywhere."""
    assert await scene.store.store(scene.claim, ANSWER, scene.record)
    scene.account.close(scene.record)
    scene.account.settle()
    await Flusher(scene.journal, scene.database, scene.clock, scene.leases).flush_once()
    await scene.owner.stop()

    assert await scene.books() == [("answered", COST)]


@pytest.mark.parametrize("status", [Status.FAILED, Status.SUPERSEDED])
async def test_who_was_taken_over_is_owed_nothing(scene: Scene, status: Status) -> None:
    """Its request id stands in no row of ours any more: nothing is stored, nothing is charged."""
    async with scene.database.begin() as connection:
        await connection.execute(text("UPDATE idempotency SET request_id = 'another'"))
    assert not await scene.store.store(scene.claim, ANSWER, scene.record)
    ended: UsageRecord = make_record(scene.claim.request_id, status=status, cost_nanousd=0, owner=scene.owner.id)
    scene.account.close(ended)
    scene.account.settle()
    await Flusher(scene.journal, scene.database, scene.clock, scene.leases).flush_once()
    await scene.owner.stop()

    assert await scene.books() == [(status.value, 0)]
