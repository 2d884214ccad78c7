# A gateway that dies around the storing of an answer: the answer and its charge are both there, or neither is.

from __future__ import annotations

from pathlib import Path

import pytest
from redis.asyncio import Redis
from sqlalchemy import text

from billing.audit import audit
from billing.flusher import Flusher
from billing.holds import Hold, HoldRequest, Leg, Limits, Scope, Settlement
from billing.journal import Journal
from billing.quotas import Quotas
from billing.records import Status, UsageRecord
from billing.store_errors import POSTGRES_AWAY
from billing.sweep import Sweeper
from gateway.answering.account import Account
from gateway.database import Database
from gateway.idempotency_store import Answered, IdempotencyStore
from gateway.sealing import Sealer
from gateway.stored_answers import Claim, Place, StoredAnswer
from protocol.usage import Usage
from tests.support.clock import SetClock
from tests.support.factories import make_record
from tests.support.postgres_proxy import postgres_proxy

PLACE = Place("team_a", "chat.completions", "key-1")
ANSWER = StoredAnswer(200, (), b"the whole answer")
COST = 700  # nano-dollars
LEASE_IS_OVER = 31.0  # seconds


class Scene:
    """A gateway that has streamed a part of an answer, and the process that comes after its death."""

    def __init__(self, database: Database, redis: Redis, folder: Path) -> None:
        self.clock = SetClock()
        self.database = database
        self.folder = folder
        self.quotas = Quotas(redis, self.clock, uses_server_time=False, deadline=5.0)
        self.store = IdempotencyStore(database, self.clock, Sealer("pepper", "idempotency"), retention=86_400.0)
        self.journal = Journal.open(folder, clock=self.clock)

    async def begin(self) -> None:
        """Claim, hold, open and stream a part."""
        async with self.database.begin() as connection:
            await connection.execute(text("INSERT INTO teams (id, name) VALUES ('team_a', 'A')"))
        hold = await self.quotas.open(
            HoldRequest(
                request_id=self.clock.new_id(),
                team_id="team_a",
                scopes=(Scope("team", "team_a", Limits()), Scope("key", "key_a", Limits())),
                legs=(Leg("a", 500, 1000),),
                valid_until=self.clock.now() + 5,
            )
        )
        assert isinstance(hold, Hold)
        self.claim = Claim(PLACE, b"digest", hold.request.request_id)
        assert await self.store.claim(self.claim) == self.claim
        self.account = Account(hold, self.journal, self.quotas, owes_parts=False)
        unknown = {"status": Status.FAILED, "input_tokens": 0, "cached_input_tokens": 0, "output_tokens": 0}
        self.account.open(make_record(hold.request.request_id, cost_nanousd=0, **unknown))
        self.account.count = lambda: Settlement(Usage(100, 0, 12), 400)
        self.account.note_progress()
        self.record = make_record(hold.request.request_id, cost_nanousd=COST)

    async def die(self, *, next_is_heard: bool = True) -> None:
        """Leave everything as it is; the next process adopts the journal, and the sweeper frees the hold.

        A next process that is not heard commits once without hearing of it, and flushes again.
        """
        self.journal.close()
        after = Journal.open(self.folder, clock=self.clock)
        sum(after.adopt_each())
        with postgres_proxy(self.database.url) as way:
            by_it = Database(way.url)
            flusher = Flusher(after, by_it, self.clock, book_adopted=self.quotas.book)
            if not next_is_heard:
                way.lose_commit_of("INSERT INTO usage_records")
                with pytest.raises(POSTGRES_AWAY):
                    await flusher.flush_once()
            while await flusher.flush_once():
                pass
            await by_it.close()
        self.clock.move(LEASE_IS_OVER)
        await Sweeper(self.quotas, self.database, self.clock).sweep_once()
        after.close()

    async def books(self) -> list[tuple[str, int]]:
        """Return status and cost of every row, once ledger, statements and counters agree."""
        assert await audit(self.database, self.quotas, self.clock.today()) == []
        async with self.database.begin() as connection:
            rows = await connection.execute(text("SELECT status, cost_nanousd FROM usage_records"))
            return [tuple(row) for row in rows]


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
    """It leaves its books as a killed process does: the row is in the ledger, and the counters learn of it there."""
    assert await scene.store.store(scene.claim, ANSWER, scene.record)
    scene.account.leave()
    await scene.account.settle()
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
    await scene.account.settle()
    await Flusher(scene.journal, scene.database, scene.clock).flush_once()

    assert await scene.books() == [("answered", COST)]


@pytest.mark.parametrize("status", [Status.FAILED, Status.SUPERSEDED])
async def test_who_was_taken_over_is_owed_nothing(scene: Scene, status: Status) -> None:
    """Its request id stands in no row of ours any more: nothing is stored, nothing is charged."""
    async with scene.database.begin() as connection:
        await connection.execute(text("UPDATE idempotency SET request_id = 'another'"))
    assert not await scene.store.store(scene.claim, ANSWER, scene.record)
    ended: UsageRecord = make_record(scene.claim.request_id, status=status, cost_nanousd=0)
    scene.account.close(ended)
    await scene.account.settle()
    await Flusher(scene.journal, scene.database, scene.clock).flush_once()

    assert await scene.books() == [(status.value, 0)]
