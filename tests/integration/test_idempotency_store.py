# Who runs a call that came with an Idempotency-Key, and what is kept of it: on a real Postgres.

from __future__ import annotations

import asyncio
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec.structs import replace
from sqlalchemy import text

from billing.core.records import Status
from billing.ledger.partitions import ensure_partitions
from gateway.calls.call import Call
from gateway.core.background import Background
from gateway.core.errors import StoredAnswerUnreadable
from gateway.core.principals import Caller, Team
from gateway.core.settings import Settings
from gateway.idempotency import keeping
from gateway.idempotency.replay_buffer import Message, Send
from gateway.idempotency.store import Answered, Found, IdempotencyStore, Reused, Running, purge_expired
from gateway.idempotency.stored_answers import Claim, Place, StoredAnswer
from gateway.inference.idempotency import AnsweredOnce, Keep, digest_of
from gateway.storage.database import SETTINGS, Database
from gateway.storage.encryption import Sealer
from gateway.telemetry.metrics import Metrics
from protocol.chat import ChatRequest
from router import RoutingOptions
from tests.support.clock import SetClock
from tests.support.factories import make_record

DAY = 86_400.0
SHORT = 0.3  # seconds
PLACE = Place("team_a", "chat.completions", "key-1")
ANSWER = StoredAnswer(200, ((b"content-type", b"text/plain"),), b"the secret answer, " * 20)


@pytest.fixture
async def store(database: Database, clock: SetClock) -> IdempotencyStore:
    """The store of one gateway, in a house with two teams."""
    async with database.begin() as connection:
        await connection.execute(text("INSERT INTO teams (id, name) VALUES ('team_a', 'A'), ('team_b', 'B')"))
    return make_store(database, clock)


def make_store(database: Database, clock: SetClock, lease: float = 60.0) -> IdempotencyStore:
    return IdempotencyStore(database, clock, Sealer("pepper", "idempotency"), retention=DAY, lease=lease)


def wanted(clock: SetClock, place: Place = PLACE, digest: bytes = b"one") -> Claim:
    return Claim(place, digest, clock.new_id())


async def ask(database: Database, query: str, **values: Any) -> list[Any]:
    async with database.begin() as connection:
        return list((await connection.execute(text(query), values)).all())


async def change(database: Database, statement: str) -> None:
    async with database.begin() as connection:
        await connection.execute(text(statement))


async def answer(store: IdempotencyStore, claim: Claim) -> bool:
    return await store.store(claim, ANSWER, make_record(claim.request_id))


async def test_one_of_many_gets_the_call(store: IdempotencyStore, database: Database, clock: SetClock) -> None:
    """However many ask at once, on however many gateways: one runs it, the others wait."""
    gateways = [make_store(database, clock) for _ in range(4)]
    found = await asyncio.gather(*(gateway.claim(wanted(clock)) for gateway in gateways * 5))

    assert sorted(type(one).__name__ for one in found) == ["Claim"] + ["Running"] * 19


async def test_an_answer_is_kept_with_its_row(store: IdempotencyStore, database: Database, clock: SetClock) -> None:
    """Whoever asks again gets it to the byte; the ledger has its record by the same transaction, and once."""
    mine = wanted(clock)
    assert await store.claim(mine) == mine
    assert await answer(store, mine)
    assert await answer(store, mine)  # the first commit's answer may have been lost on its way

    assert await store.claim(wanted(clock)) == Answered(mine.request_id, ANSWER)
    rows = await ask(database, "SELECT CAST(request_id AS text), status, cost_nanousd FROM usage_records")
    assert [tuple(row) for row in rows] == [(mine.request_id, Status.ANSWERED, 400_000)]
    assert (await ask(database, "SELECT sum(calls) FROM usage_daily"))[0][0] == 1


@pytest.mark.parametrize("ends", ["committed", "rolled back"])
async def test_whether_an_answer_is_stored_waits_for_a_try_that_is_under_way(
    store: IdempotencyStore, database: Database, clock: SetClock, ends: str
) -> None:
    """A transaction that nobody hears of any more may still commit: only then does the row tell."""
    mine = wanted(clock)
    await store.claim(mine)
    assert not await store.is_stored(mine)
    try:
        async with database.begin() as connection:
            await connection.execute(
                text(f"UPDATE idempotency SET status = 200 WHERE request_id = '{mine.request_id}'")
            )
            asking = asyncio.create_task(store.is_stored(mine))
            await asyncio.sleep(0.2)
            assert not asking.done()
            if ends == "rolled back":
                raise ZeroDivisionError
    except ZeroDivisionError:
        pass

    assert await asking is (ends == "committed")


async def test_another_body_is_told_so(store: IdempotencyStore, clock: SetClock) -> None:
    """Under a key that runs or is answered, anything else is a mistake of the caller's."""
    mine = wanted(clock)
    await store.claim(mine)
    assert await store.claim(wanted(clock, digest=b"two")) == Reused()
    await answer(store, mine)

    assert await store.claim(wanted(clock, digest=b"two")) == Reused()


@pytest.mark.parametrize(
    "place", [Place("team_b", "chat.completions", "key-1"), Place("team_a", "embeddings", "key-1")]
)
async def test_teams_and_endpoints_share_no_keys(store: IdempotencyStore, clock: SetClock, place: Place) -> None:
    """The same key elsewhere is another key."""
    mine, other = wanted(clock), wanted(clock, place=place)
    await store.claim(mine)

    assert await store.claim(other) == other


async def test_the_call_of_a_dead_gateway_is_taken_over(
    store: IdempotencyStore, database: Database, clock: SetClock
) -> None:
    """A lease that nobody renews ends; whoever asks then runs the call, and the dead one's answer does not count."""
    dead = make_store(database, clock, lease=SHORT)
    late, mine = wanted(clock), wanted(clock)
    await dead.claim(late)
    assert await store.claim(mine) == Running()
    await asyncio.sleep(1.1 * SHORT)
    assert await store.claim(wanted(clock, digest=b"two")) == Reused()
    assert await store.claim(mine) == mine

    assert not await answer(dead, late)
    assert await ask(database, "SELECT * FROM usage_records") == []
    await dead.release(late)
    assert await store.claim(wanted(clock)) == Running()
    assert await answer(store, mine)
    assert await store.claim(wanted(clock)) == Answered(mine.request_id, ANSWER)


async def test_a_lease_is_renewed_while_the_call_runs(
    store: IdempotencyStore, database: Database, clock: SetClock
) -> None:
    """As long as its gateway lives, a call is not taken over, however long it runs; afterwards it may be."""
    alive = make_store(database, clock, lease=SHORT)
    mine, other = wanted(clock), wanted(clock)
    await alive.claim(mine)
    renewing = asyncio.create_task(alive.run())
    with alive.leased(mine, clock.monotonic()):
        await change(database, "UPDATE idempotency SET lease_until = now() - interval '1 hour'")
        async with asyncio.timeout(10):
            while not await ask(database, "SELECT 1 FROM idempotency WHERE lease_until > now() - interval '1 minute'"):
                await asyncio.sleep(0.02)
    renewing.cancel()
    await alive.renew()  # of what no longer runs here: nothing
    await asyncio.sleep(1.1 * SHORT)

    assert await store.claim(other) == other


async def test_a_response_in_the_background_keeps_its_lease_when_its_key_is_answered(
    store: IdempotencyStore, database: Database, clock: SetClock
) -> None:
    """Both have the request id of one call: the key's answer is the response as it is queued."""
    key = wanted(clock)
    response = replace(key, place=replace(PLACE, key="resp_1"))
    for claim in (key, response):
        assert await store.claim(claim) == claim
    with store.leased(response, clock.monotonic()):
        with store.leased(key, clock.monotonic()):
            assert await answer(store, key)
        await change(database, "UPDATE idempotency SET lease_until = now() WHERE lease_until IS NOT NULL")
        clock.move(DAY)
        before = store.may_be_lost(response)
        await store.renew()
        renewed = await ask(database, "SELECT key FROM idempotency WHERE lease_until > now() + interval '50 seconds'")

        assert [tuple(row) for row in renewed] == [("resp_1",)]
        assert (before, store.may_be_lost(response)) == (True, False)


async def test_a_gateway_that_stood_still_for_a_lease_may_have_lost_its_call(
    store: IdempotencyStore, database: Database, clock: SetClock
) -> None:
    """Until its row says that it has not: one that was taken over is never its own again. A claim of the same id that
    ends meanwhile, a key's whose response runs behind it, takes nothing from it."""
    stopped = make_store(database, clock, lease=SHORT)
    mine = wanted(clock)
    await stopped.claim(mine)
    with stopped.leased(mine, clock.monotonic()):
        with stopped.leased(replace(mine, place=Place("team_a", "responses", "key")), clock.monotonic()):
            pass
        told = [stopped.may_be_lost(mine)]
        clock.move(2 * SHORT)
        told.append(stopped.may_be_lost(mine))
        await stopped.renew()
        told.append(stopped.may_be_lost(mine))
        await change(database, "UPDATE idempotency SET request_id = 'of another', lease_until = now()")
        clock.move(2 * SHORT)
        await stopped.renew()
        told.append(stopped.may_be_lost(mine))

    assert told == [False, True, False, True]


@pytest.mark.parametrize("is_first", [True, False], ids=["at once", "after another"])
async def test_a_gateway_that_stood_still_as_it_claimed_a_call_may_have_lost_it(
    store: IdempotencyStore, clock: SetClock, monkeypatch: pytest.MonkeyPatch, is_first: bool
) -> None:
    """A lease begins when Postgres writes it down, not when its gateway goes on."""
    claim, other, told = store.claim, wanted(clock), list[bool]()
    call = Call(
        request_id=clock.new_id(),
        caller=Caller(team=Team(id=PLACE.team_id, name="A"), key_id="key_a"),
        endpoint=PLACE.endpoint,
        request=ChatRequest(model="m", messages=()),
        routing=RoutingOptions(),
        created_at=clock.now(),
        started=clock.monotonic(),
        idempotency_key=PLACE.key,
    )
    digest = digest_of(call, "pepper")
    if not is_first:
        assert await claim(replace(other, digest=digest)) == replace(other, digest=digest)

    async def claim_and_stand_still(asked: Claim) -> Found:
        found = await claim(asked)
        clock.move(59.0)
        await store.release(other)
        return found

    async def run(call: Call, send: Send, keep: Keep) -> None:
        assert call.may_be_lost is not None
        told.append(call.may_be_lost())
        clock.move(1.0)
        told.append(call.may_be_lost())

    async def unheard(message: Message) -> None:
        raise AssertionError(message)

    monkeypatch.setattr(store, "claim", claim_and_stand_still)
    timeouts = SimpleNamespace(timeouts=SimpleNamespace(total=60.0))
    settings = SimpleNamespace(key_pepper="pepper", other_key_peppers=(), providers={"a": timeouts})
    once = AnsweredOnce(cast(Settings, settings), store, Background(), clock, Metrics())
    await once.answer(call, run, lambda error: b"", {}, unheard)

    assert told == [False, True]


async def test_an_answer_waits_for_what_a_neighbour_has_locked(
    database: Database, store: IdempotencyStore, clock: SetClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that stood still while it made the ledger's partitions: that is no refusal, and no answer is lost for it."""
    monkeypatch.setitem(SETTINGS, "lock_timeout", "20")
    monkeypatch.setattr(keeping, "MOST_REFUSALS", 1)
    mine = wanted(clock)
    async with Database(database.url) as impatient:
        own = make_store(impatient, clock)
        await own.claim(mine)
        async with database.begin() as connection:
            await ensure_partitions(connection, clock.today() + timedelta(days=60))
            storing = asyncio.create_task(keeping.keep_until_known(own, mine, ANSWER, make_record(mine.request_id)))
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(asyncio.shield(storing), 0.3)

        assert await storing


async def test_of_those_who_wait_one_looks_at_a_time(store: IdempotencyStore, clock: SetClock) -> None:
    """What it saw, the others need not ask Postgres for; once nobody waits, it is forgotten."""
    looks: list[int] = []

    async def wait(number: int) -> object:
        lookout = store.lookout(wanted(clock))
        async with lookout:
            if lookout.seen is None:
                looks.append(number)
                await asyncio.sleep(0.01)
                lookout.seen = Answered("of somebody", ANSWER)
            return lookout.seen

    seen = await asyncio.gather(*(wait(number) for number in range(5)))

    assert looks == [0] and seen == [Answered("of somebody", ANSWER)] * 5
    assert store.lookout(wanted(clock)).seen is None


async def test_who_asks_for_something_else_shares_no_lookout(store: IdempotencyStore, clock: SetClock) -> None:
    """Two bodies race under one key: what a waiter of one of them sees answered is never given to the other's."""
    lookout = store.lookout(wanted(clock))
    async with lookout:
        lookout.seen = Answered("of somebody", ANSWER)

        other = store.lookout(wanted(clock, digest=b"two"))
        async with other:
            assert other.seen is None
        assert store.lookout(wanted(clock)) is lookout


async def test_a_released_call_is_free_at_once(store: IdempotencyStore, clock: SetClock) -> None:
    """A call that failed leaves nothing behind, not even its body; an answered one is not released."""
    mine, other = wanted(clock), wanted(clock, digest=b"two")
    await store.claim(mine)
    await store.release(mine)
    assert await store.claim(other) == other
    await answer(store, other)
    await store.release(other)

    assert await store.claim(wanted(clock, digest=b"two")) == Answered(other.request_id, ANSWER)


async def test_an_answer_is_kept_for_its_time(store: IdempotencyStore, clock: SetClock) -> None:
    """Twenty-four hours from the answer on; then the key is free, for any request."""
    mine = wanted(clock)
    await store.claim(mine)
    clock.move(60)
    await answer(store, mine)
    clock.move(DAY - 1)
    assert await store.claim(wanted(clock)) == Answered(mine.request_id, ANSWER)
    clock.move(1)

    anew = wanted(clock, digest=b"two")
    assert await store.claim(anew) == anew


async def test_expired_rows_are_purged(store: IdempotencyStore, database: Database, clock: SetClock) -> None:
    """What is past its time goes, unless it still runs; the rest stays."""
    old, running, young = (wanted(clock, place=Place("team_a", "embeddings", name)) for name in ("old", "run", "young"))
    await store.claim(old)
    await answer(store, old)
    await store.claim(running)
    clock.move(DAY / 2)
    await store.claim(young)
    await answer(store, young)
    assert await purge_expired(database, clock) == 0
    clock.move(DAY / 2)

    assert await purge_expired(database, clock) == 1
    left = await ask(database, "SELECT key FROM idempotency ORDER BY key")
    assert [row.key for row in left] == ["run", "young"]


async def test_what_is_stored_is_sealed(store: IdempotencyStore, database: Database, clock: SetClock) -> None:
    """Neither the answer nor what was asked can be read in Postgres, not even compressed."""
    mine = wanted(clock)
    await store.claim(mine)
    await answer(store, mine)
    row = (await ask(database, "SELECT * FROM idempotency"))[0]
    sealed = bytes(row.answer)

    assert b"secret" not in b"".join(bytes(str(value), "utf-8") for value in row) + sealed
    assert sealed[0] == 1 and b"\x78\x01" not in sealed[:16]
    other_house = IdempotencyStore(database, clock, Sealer("other pepper", "idempotency"), retention=DAY)
    with pytest.raises(StoredAnswerUnreadable):
        await other_house.claim(wanted(clock))


@pytest.mark.parametrize(
    "harm",
    [
        "answer = set_byte(answer, 40, (get_byte(answer, 40) + 1) % 256)",
        "answer = substring(answer FROM 1 FOR 20)",
        "answer = NULL",
        "answer = (SELECT answer FROM idempotency WHERE key = 'other')",
        "request_id = 'of somebody else'",
    ],
    ids=["changed", "cut", "taken away", "moved", "renamed"],
)
async def test_a_changed_answer_is_never_given_out(
    store: IdempotencyStore, database: Database, clock: SetClock, harm: str
) -> None:
    """It opens in its place alone, whole or not at all; and it is not run again, which would be paid again."""
    other = wanted(clock, place=Place("team_a", "chat.completions", "other"))
    mine = wanted(clock)
    for claim in (other, mine):
        await store.claim(claim)
        await answer(store, claim)
    await change(database, f"UPDATE idempotency SET {harm} WHERE key = 'key-1'")

    with pytest.raises(StoredAnswerUnreadable):
        await store.claim(wanted(clock))


async def test_large_answers_come_back_whole(store: IdempotencyStore, clock: SetClock) -> None:
    """Those that are packed beside the event loop, too."""
    mine = wanted(clock)
    large = StoredAnswer(200, (), bytes(range(256)) * 8192)
    await store.claim(mine)
    assert await store.store(mine, large, make_record(mine.request_id))

    found = await store.claim(wanted(clock))
    assert isinstance(found, Answered) and found.answer == large


async def test_a_record_that_the_ledger_refuses_does_not_take_the_answer_with_it(
    store: IdempotencyStore, database: Database, clock: SetClock
) -> None:
    """The journal has the record too, and its flusher puts it aside for people; the answer is kept."""
    mine = wanted(clock)
    await store.claim(mine)
    assert await store.store(mine, ANSWER, make_record(mine.request_id, key_id="nul\0"))

    assert await store.claim(wanted(clock)) == Answered(mine.request_id, ANSWER)
    assert await ask(database, "SELECT * FROM usage_records") == []
