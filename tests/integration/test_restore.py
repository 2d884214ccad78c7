# The counters after Redis was away, or lost something: rebuilt from the statements and from what every owner knows.

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import pytest
from redis.asyncio import Redis
from redis.exceptions import ResponseError
from sqlalchemy import text

from billing import rebuild, rebuild_store, restore
from billing.epochs import EPOCH_KEY
from billing.holds import Hold, Limits, RefusedHold, Settlement
from billing.ids import day_of
from billing.ledger import insert_records
from gateway.clock import Clock
from gateway.database import Database
from protocol.usage import Usage
from tests.support.clock import SetClock
from tests.support.factories import make_record
from tests.support.owners import Owner, open_owner
from tests.support.redis_proxy import RedisProxy, Way, redis_proxy

TEAM = "team_a"
CLOCK = Clock()
Start = Callable[..., Awaitable[Owner]]


@pytest.fixture
async def start(database: Database, redis: Redis, redis_url: str, tmp_path: Path) -> AsyncIterator[Start]:
    """Start owners in a house with one team, on an empty Redis; all end with the test."""
    await add_team(database, TEAM)
    owners: list[Owner] = []

    async def start_owner(name: str, *, by: RedisProxy | None = None) -> Owner:
        owner = await open_owner(tmp_path / name, database, by.url if by else redis_url)
        owners.append(owner)
        return owner

    yield start_owner
    for owner in owners:
        await owner.stop()


@pytest.fixture
async def proxy(redis_url: str) -> AsyncIterator[RedisProxy]:
    """A way to Redis that the test can cut."""
    async with redis_proxy(redis_url) as proxy:
        yield proxy


async def test_an_empty_redis_is_filled_before_the_first_call(start: Start, database: Database) -> None:
    """A fresh house counts in Redis at once, from what the statements say."""
    async with database.begin() as connection:
        await insert_records(connection, [make_record(CLOCK.new_id(), cost_nanousd=700)], today=CLOCK.today())

    owner = await start("a")
    hold = await owner.quotas.open(owner.ask(team=Limits(requests_per_minute=10)))

    assert isinstance(hold, Hold) and not hold.standalone
    state = await owner.quotas.usage(TEAM)
    assert (state.day_nanousd, state.month_nanousd, state.requests_per_minute) == (700, 700, 2)


async def test_a_wipe_under_load_loses_nothing(start: Start, database: Database, redis: Redis) -> None:
    """Three owners call, close and flush while Redis is wiped again and again: the counters end as the ledger."""
    owners = [await start(name) for name in "abc"]
    calls = [asyncio.create_task(owner.call_for_ever()) for owner in owners for _ in range(5)]
    for _ in range(3):
        await asyncio.sleep(0.7)
        await redis.flushall()
    await asyncio.sleep(1.2)
    for owner in owners:
        owner.is_calling = False
    await asyncio.gather(*calls)

    await settled(*owners)

    assert await counted(owners[0]) == await owed(database)
    assert (await owners[0].quotas.usage(TEAM)).live == 0


async def test_a_wipe_puts_running_calls_back(start: Start, redis: Redis) -> None:
    """A call that runs while Redis is wiped is held again, and settles in place of its hold."""
    first, second = await start("a"), await start("b")
    running = [await first.begin(first.ask()), await second.begin(second.ask())]
    await redis.flushall()
    await rebuilt(first, second)

    assert (await first.quotas.usage(TEAM)).day_nanousd_held == 2_000_000
    for owner, account in zip((first, second), running, strict=True):
        owner.close(account, cost=300_000)
        await account.settle()

    state = await first.quotas.usage(TEAM)
    assert (state.day_nanousd, state.day_nanousd_held, state.live) == (600_000, 0, 0)


async def test_calls_held_while_redis_was_away_are_told_before_it_counts_again(start: Start, proxy: RedisProxy) -> None:
    """Redis comes back as it was: what settled and what still runs is in it before the first call is held there."""
    owner = await start("a", by=proxy)
    await owner.begin(owner.ask(team=Limits(nanousd_per_day=100_000_000)))
    proxy.turn(Way.CUT)
    running = await owner.begin(owner.ask())
    over = await owner.begin(owner.ask())
    owner.close(over, cost=400_000)
    await over.settle()
    assert running.hold.standalone and owner.quotas.is_standalone

    proxy.turn(Way.OPEN)
    await settled(owner)

    state = await owner.quotas.usage(TEAM)
    assert (state.day_nanousd, state.day_nanousd_held, state.live) == (400_000, 2_000_000, 2)


async def test_an_answer_that_was_not_heard_holds_once(start: Start, proxy: RedisProxy) -> None:
    """Redis held the call and the answer was lost: held against the share as well, it settles once."""
    owner = await start("a", by=proxy)
    proxy.turn(Way.DEAF)
    account = await owner.begin(owner.ask())
    proxy.turn(Way.OPEN)
    await settled(owner)
    assert (await owner.quotas.usage(TEAM)).live == 1

    owner.close(account, cost=400_000)
    await account.settle()

    state = await owner.quotas.usage(TEAM)
    assert (state.day_nanousd, state.day_nanousd_held, state.live) == (400_000, 0, 0)


async def test_a_second_outage_gives_no_second_share(start: Start, proxy: RedisProxy) -> None:
    """What was spent of a remainder stays spent until Redis tells a newer one."""
    owner = await start("a", by=proxy)
    limits = Limits(nanousd_per_day=41_000_000)
    await owner.begin(owner.ask(team=limits))
    proxy.turn(Way.CUT)
    first = [await owner.quotas.open(owner.ask(team=limits)) for _ in range(12)]
    proxy.turn(Way.OPEN)
    await settled(owner)
    proxy.turn(Way.CUT)
    second = await owner.quotas.open(owner.ask(team=limits))
    proxy.turn(Way.OPEN)
    await settled(owner)
    hold = await owner.quotas.open(owner.ask(team=limits))
    proxy.turn(Way.CUT)
    third = [await owner.quotas.open(owner.ask(team=limits)) for _ in range(9)]

    assert [isinstance(each, Hold) for each in first] == [True] * 10 + [False] * 2
    assert isinstance(second, RefusedHold)
    assert isinstance(hold, Hold) and not hold.standalone
    assert [isinstance(each, Hold) for each in third] == [True] * 7 + [False] * 2  # a quarter of 29 million


async def test_the_statements_bound_the_share(start: Start, proxy: RedisProxy, database: Database) -> None:
    """A gateway that knows nothing of a team spends its share of what the statements leave, not of the whole limit."""
    async with database.begin() as connection:
        await insert_records(connection, [make_record(CLOCK.new_id(), cost_nanousd=90_000_000)], today=CLOCK.today())
    proxy.turn(Way.CUT)
    owner = await start("a", by=proxy)
    limits = Limits(nanousd_per_day=100_000_000)

    answers = [await owner.quotas.open(owner.ask(team=limits)) for _ in range(4)]

    assert [isinstance(each, Hold) for each in answers] == [True, True, False, False]


async def test_with_nothing_known_nothing_is_spent(
    start: Start, proxy: RedisProxy, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With Redis and Postgres away, a limit of which nothing is known cannot be checked: try again in a second."""
    proxy.turn(Way.CUT)
    owner = await start("a", by=proxy)

    async def lost(*_: object) -> None:
        raise OSError("connection refused")

    monkeypatch.setattr(rebuild_store, "read_scope_sums", lost)
    refused = await owner.quotas.open(owner.ask(team=Limits(nanousd_per_day=100_000_000)))
    unlimited = await owner.quotas.open(owner.ask())

    assert isinstance(refused, RefusedHold) and refused.is_unknown and refused.retry_after == 1.0
    assert isinstance(unlimited, Hold)


async def test_a_new_team_needs_no_rebuild(start: Start, database: Database, redis: Redis) -> None:
    """The first call of a team that is younger than the epoch is held in Redis, and the epoch stays."""
    owner = await start("a")
    before = await redis.hget(EPOCH_KEY, "id")
    await add_team(database, "team_new")

    holds = await asyncio.gather(*(owner.quotas.open(owner.ask("team_new")) for _ in range(5)))

    assert all(isinstance(hold, Hold) and not hold.standalone for hold in holds)
    assert (await owner.quotas.usage("team_new")).live == 5
    assert await redis.hget(EPOCH_KEY, "id") == before


async def test_an_older_team_without_books_gets_them_rebuilt(start: Start, database: Database, redis: Redis) -> None:
    """A marker that is gone tells of a loss: all books are built anew."""
    owner = await start("a")
    account = await owner.begin(owner.ask())
    owner.close(account)
    await account.settle()
    await redis.delete(f"tollgate:{{{TEAM}}}:epoch")

    await owner.quotas.open(owner.ask())
    await rebuilt(owner)

    assert (await owner.quotas.usage(TEAM)).day_nanousd == 400_000


async def test_an_owner_that_comes_late_starts_a_rebuild(start: Start, proxy: RedisProxy, redis: Redis) -> None:
    """An epoch that began without an owner lacks what only it knows; its coming puts that right."""
    late, other = await start("late", by=proxy), await start("other")
    await late.pause_flushing()
    account = await late.begin(late.ask())
    late.close(account)
    await account.settle()
    proxy.turn(Way.CUT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rebuild, "PATIENCE", 0.0)  # as after 35 s
        await redis.flushall()
        await rebuilt(other)
    assert (await other.quotas.usage(TEAM)).day_nanousd == 0

    proxy.turn(Way.OPEN)
    await rebuilt(late)
    await settled(other)

    assert (await other.quotas.usage(TEAM)).day_nanousd == 400_000


async def test_a_redis_that_was_started_again_is_not_believed(start: Start, redis: Redis) -> None:
    """Its append-only file may lack the last second: another server, another epoch."""
    owner = await start("a")
    account = await owner.begin(owner.ask())
    owner.close(account)
    await account.settle()
    day = f"tollgate:{{{TEAM}}}:{owner.quotas.epoch}:d:team:{today()}"
    await redis.hincrby(day, "c", -400_000)  # the settlement is lost
    await redis.hset(EPOCH_KEY, "run_id", "another server")

    await rebuilt(owner)

    assert (await owner.quotas.usage(TEAM)).day_nanousd == 400_000


async def test_what_others_wrote_over_the_markers_is_a_wipe(start: Start, database: Database, redis: Redis) -> None:
    """One key of another type neither keeps a house from its counters for ever, nor a team the others."""
    await add_team(database, "team_b")
    owner = await start("a")
    for team_id in (TEAM, "team_b"):
        await owner.begin(owner.ask(team_id))
    team_marker = f"tollgate:{{{TEAM}}}:epoch"
    await redis.delete(EPOCH_KEY, team_marker)
    await redis.set(EPOCH_KEY, "strange")
    await redis.hset(team_marker, "strange", "too")

    await rebuilt(owner)

    assert [(await owner.quotas.usage(team_id)).live for team_id in (TEAM, "team_b")] == [1, 1]


@pytest.mark.parametrize("name", ["holds", "live", "leases", "d:team:{today}", "w:key:key_a", "reaped"])
async def test_a_key_that_others_wrote_over_is_rebuilt_at_once(start: Start, redis: Redis, name: str) -> None:
    """Redis refuses what touches the key; the first refusal has the counters built anew, with nothing missing."""
    owner = await start("a")
    running, ending = await owner.begin(owner.ask()), await owner.begin(owner.ask())
    key = f"tollgate:{{{TEAM}}}:{owner.quotas.epoch}:{name.format(today=today())}"
    await redis.delete(key)
    await redis.set(key, "strange")
    owner.close(ending)
    await ending.settle()
    await owner.quotas.renew(running.hold, Settlement(Usage(), 0))
    with suppress(ResponseError):
        await owner.quotas.sweep(TEAM)

    await rebuilt(owner)

    state = await owner.quotas.usage(TEAM)
    assert (state.day_nanousd, state.live) == (400_000, 1)


async def test_a_booking_cut_off_before_it_counts_starts_a_rebuild(
    start: Start, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process dies after Postgres has its booking and before Redis has heard of it: the survivors find its note."""
    monkeypatch.setattr(restore, "ASK_FOR_DEAD_EVERY", 0.0)
    dying, other = await start("dying"), await start("other")
    async with dying.restorer.owing():
        await dying.restorer.look_once()  # it has nothing unsaid, but the note stays
        async with database.begin() as connection:
            await insert_records(connection, [make_record(CLOCK.new_id(), cost_nanousd=700)], today=CLOCK.today())
        await dying.die()
    async with database.begin() as connection:
        late = text("UPDATE flushers SET seen_at = seen_at - interval '31 s' WHERE id = :id")
        await connection.execute(late, {"id": dying.flusher.id})

    await rebuilt(other)

    assert (await other.quotas.usage(TEAM)).day_nanousd == 700


@pytest.mark.parametrize("who", ["itself", "another"])
async def test_a_booking_that_nobody_heard_of_starts_a_rebuild(
    start: Start, database: Database, monkeypatch: pytest.MonkeyPatch, who: str
) -> None:
    """A connection breaks while it commits: it may be booked, and the counters were not told. Whoever ends before it
    could see to that leaves a note."""
    monkeypatch.setattr(restore, "ASK_FOR_DEAD_EVERY", 0.0)
    owner, other = await start("a"), await start("b")
    with pytest.raises(ConnectionError):
        async with owner.restorer.owing():
            async with database.begin() as connection:
                await insert_records(connection, [make_record(CLOCK.new_id(), cost_nanousd=700)], today=CLOCK.today())
            raise ConnectionError
    if who == "another":
        await owner.stop()

    async with asyncio.timeout(30):
        while (await other.quotas.usage(TEAM)).day_nanousd != 700:
            await asyncio.sleep(0.02)


async def test_a_booking_that_was_counted_leaves_no_note(start: Start, database: Database) -> None:
    """The next look takes it back."""
    owner = await start("a")
    async with owner.restorer.owing():
        pass
    await owner.restorer.look_once()

    async with database.begin() as connection:
        noted = await connection.execute(
            text("SELECT unsettled FROM flushers WHERE id = :id"), {"id": owner.flusher.id}
        )
    assert noted.scalar_one() == 0


async def test_a_rebuild_can_be_asked_for(start: Start, redis: Redis) -> None:
    """By hand, when the audit has found the counters wrong (docs/operations.md)."""
    owner = await start("a")
    await redis.hset(f"tollgate:{{{TEAM}}}:{owner.quotas.epoch}:d:team:{today()}", "c", 5)

    await redis.hset(EPOCH_KEY, "wanted", "the audit found a difference")
    await rebuilt(owner)

    assert (await owner.quotas.usage(TEAM)).day_nanousd == 0


async def test_the_death_of_an_owner_with_unsaid_calls_starts_a_rebuild(
    start: Start, proxy: RedisProxy, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis is away, a call is held against the share, flushed, and its owner killed: the survivors find its note."""
    monkeypatch.setattr(restore, "ASK_FOR_DEAD_EVERY", 0.0)
    dying, other = await start("dying", by=proxy), await start("other")
    proxy.turn(Way.CUT)
    account = await dying.begin(dying.ask())
    dying.close(account)
    await account.settle()
    async with asyncio.timeout(10):
        while dying.flusher.backlog:
            await asyncio.sleep(0.02)
    await dying.die()
    async with database.begin() as connection:
        noted = await connection.execute(
            text("UPDATE flushers SET seen_at = seen_at - interval '31 s' WHERE id = :id RETURNING unsettled"),
            {"id": dying.flusher.id},
        )
        assert noted.scalar_one() == 1

    await rebuilt(other)

    assert (await other.quotas.usage(TEAM)).day_nanousd == 400_000


async def test_an_owner_that_ends_without_redis_leaves_a_note(
    start: Start, proxy: RedisProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked to end while Redis is away, it waits a moment, then leaves the rest to the others, who need not wait."""
    monkeypatch.setattr(restore, "ASK_FOR_DEAD_EVERY", 0.0)
    monkeypatch.setattr(restore, "LEAVE_WITHIN", 1.0)
    ending, other = await start("ending", by=proxy), await start("other")
    proxy.turn(Way.CUT)
    account = await ending.begin(ending.ask())
    ending.close(account)
    await account.settle()
    async with asyncio.timeout(10):
        while ending.flusher.backlog:
            await asyncio.sleep(0.02)
    await ending.stop()

    await rebuilt(other)

    assert (await other.quotas.usage(TEAM)).day_nanousd == 400_000


async def test_a_journal_that_comes_too_late_starts_a_rebuild(start: Start, database: Database) -> None:
    """After an hour no tombstone tells whether its calls were settled: they count once all the same."""
    owner = await start("a")
    old = make_record(uuid_of(CLOCK.now() - 7200), cost_nanousd=700)
    async with database.begin() as connection:
        await insert_records(connection, [old], today=CLOCK.today())

    await owner.quotas.book_adopted([old])
    await rebuilt(owner)

    assert (await owner.quotas.usage(TEAM, day=day_of(old.request_id))).day_nanousd == 700


async def test_an_owner_that_ends_is_waited_for_no_more(start: Start, database: Database) -> None:
    """A clean end takes the owner off the list."""
    owner = await start("a")
    await rebuilt(owner, even_if_done=True)
    await owner.stop()

    async with database.begin() as connection:
        assert (await connection.execute(text("SELECT count(*) FROM flushers"))).scalar_one() == 0


async def test_nobody_waits_for_a_neighbour_that_died(start: Start, redis: Redis, database: Database) -> None:
    """A lock that is free tells at once what a silence tells after half a minute; the dead one's last call counts."""
    alive, dying = await start("disk"), await start("disk")
    await dying.pause_flushing()
    dying.close(await dying.begin(dying.ask()))
    await dying.die()
    await redis.flushall()
    lost = time.monotonic()

    await rebuilt(alive)
    took = time.monotonic() - lost
    async with asyncio.timeout(30):
        while await owed(database) == [(0, 0, 0)] * 2:
            await asyncio.sleep(0.1)
    await settled(alive)

    assert took < rebuild_store.ALIVE / 2
    assert await counted(alive) == await owed(database)


def uuid_of(moment: float) -> str:
    """Return a request id of a moment in the past."""
    return SetClock(moment).new_id()


def today() -> int:
    """Return the day since 1970."""
    return int(CLOCK.now() // 86_400)


async def add_team(database: Database, team_id: str) -> None:
    """Make a team."""
    async with database.begin() as connection:
        await connection.execute(text("INSERT INTO teams (id, name) VALUES (:id, 'A team')"), {"id": team_id})


async def settled(*owners: Owner) -> None:
    """Wait until everything is flushed and said."""
    async with asyncio.timeout(30):
        while True:
            if not any(one.quotas.unsaid or one.quotas.is_standalone or one.flusher.backlog for one in owners):
                return
            await asyncio.sleep(0.02)


async def rebuilt(*owners: Owner, even_if_done: bool = False) -> None:
    """Wait until the owners count in an epoch that they have put back into."""
    before = [owner.quotas.epoch for owner in owners]
    async with asyncio.timeout(30):
        for owner, epoch in zip(owners, before, strict=True):
            while owner.quotas.is_standalone or (owner.quotas.epoch == epoch and not even_if_done):
                await asyncio.sleep(0.02)


async def counted(owner: Owner) -> list[tuple[int, int, int]]:
    """Return tokens and cost of today and the month's cost, as the counters of team and key have them."""
    states = [await owner.quotas.usage(TEAM), await owner.quotas.usage(TEAM, key_id="key_a")]
    return [(state.day_tokens, state.day_nanousd, state.month_nanousd) for state in states]


async def owed(database: Database) -> list[tuple[int, int, int]]:
    """Return the same by the statements: one key made all the calls."""
    query = "SELECT sum(input_tokens + output_tokens), sum(cost_nanousd) FROM usage_daily WHERE status = 'answered'"
    async with database.begin() as connection:
        tokens, cost = (await connection.execute(text(query))).one()
    return [(int(tokens or 0), int(cost or 0), int(cost or 0))] * 2
