# One process and its neighbours inside their leases, on a real Postgres: who asks when, how much lies where, what a
# refusal says, what comes back, and what an outage or the end of a day leaves.

from __future__ import annotations

import asyncio
import operator
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import asyncpg
import msgspec
import pytest
from sqlalchemy import event, text

from billing.core.holds import HoldRequest, Leg, LimitName, Limits, RefusedHold, Scope
from billing.quotas import draws
from billing.quotas.callers import WAIT_FOR_ROOM
from billing.quotas.lease_store import TIGHT_CHANNEL, PostgresLeases
from billing.quotas.leases import Leases
from gateway.storage.database import Database
from protocol.serving.deadlines import running_timeout
from tests.support.clock import SetClock

NONE = Limits()
SOON = 0.25  # seconds within which room must be found
BUSY = 16.0  # times as long, on a machine that is busy, or stands still for a while


class House:
    """A database with a team and its key, and processes that draw from it."""

    def __init__(self, database: Database, clock: SetClock) -> None:
        self.database, self.clock = database, clock
        self.statements = 0
        self.team, self.key = NONE, NONE

    async def limit(self, *, team: Limits = NONE, key: Limits = NONE) -> None:
        """Give team and key other limits, as the administration does."""
        self.team, self.key = team, key
        async with self.database.begin() as connection:
            for table, scope, limits in (("teams", "team:team_a", team), ("api_keys", "key:key_a", key)):
                values = {"limits": msgspec.json.encode(limits).decode(), "id": scope.partition(":")[2]}
                await connection.execute(
                    text(f"UPDATE {table} SET limits = CAST(:limits AS jsonb) WHERE id = :id"), values
                )
                await connection.execute(text("SELECT follow_limits(:scope)"), {"scope": scope})

    async def process(self, name: str, *, share: float = 0.25, living: int = 1) -> Leases:
        """Start one."""
        store = PostgresLeases(self.database, self.clock, uses_server_time=False)
        await store.begin(name, "")
        leases = Leases(store, self.clock, name, share=share)
        leases.living = living
        return leases

    def ask(self, tokens: int = 100, cost: int = 1000) -> HoldRequest:
        """Return the request of one more call."""
        return HoldRequest(
            request_id=self.clock.new_id(),
            team_id="team_a",
            scopes=(Scope("team", "team_a", self.team), Scope("key", "key_a", self.key)),
            legs=(Leg("a", tokens, cost),),
        )

    async def hold(self, leases: Leases, tokens: int = 100, cost: int = 1000) -> HoldRequest:
        """Hold a call that must have room."""
        request = self.ask(tokens, cost)
        refused = None if leases.try_hold(request) else await leases.hold(request)
        assert refused is None, refused
        return request

    @staticmethod
    def give_up(leases: Leases, request: HoldRequest) -> None:
        """End a call that used nothing."""
        leases.settle(request.request_id, 0, 0)

    async def refused(self, leases: Leases, tokens: int = 100, cost: int = 1000) -> RefusedHold:
        """Ask for a call that must have none; return what is said."""
        request = self.ask(tokens, cost)
        assert not leases.try_hold(request)
        refused = await leases.hold(request)
        assert refused is not None
        assert request.request_id not in leases.holding.calls
        return refused

    async def drawn(self, scope: str = "team:team_a", unit: str = "tokens", period: str = "2026-04-05") -> int:
        """Return what is drawn of a balance."""
        query = text("SELECT drawn FROM balances WHERE scope = :scope AND unit = :unit AND period = :period")
        async with self.database.begin() as connection:
            values = {"scope": scope, "unit": unit, "period": period}
            return int((await connection.execute(query, values)).scalar_one_or_none() or 0)

    @asynccontextmanager
    async def bell(self, *processes: Leases) -> AsyncIterator[list[str]]:
        """Let processes hear of balances that become tight."""
        heard: list[str] = []
        listening = await asyncpg.connect(self.database.url)

        def ring(*said: Any) -> None:
            heard.append(said[-1])
            for leases in processes:
                leases.recall([said[-1]])

        await listening.add_listener(TIGHT_CHANNEL, ring)
        try:
            yield heard
        finally:
            await listening.close()


@pytest.fixture
async def house(database: Database, clock: SetClock) -> House:
    """A house with one team and one key, without limits."""
    house = House(database, clock)
    async with database.begin() as connection:
        await connection.execute(text("INSERT INTO teams (id, name) VALUES ('team_a', '')"))
        await connection.execute(
            text("INSERT INTO api_keys (id, team_id, digest, prefix) VALUES ('key_a', 'team_a', 'x', '')")
        )

    def count(*_: Any) -> None:
        house.statements += 1

    event.listen(database.engine.sync_engine, "before_cursor_execute", count)
    return house


async def comes(condition: Callable[[], Any], within: float = SOON * BUSY) -> bool:
    """Wait until something is so."""
    until = time.monotonic() + within
    while not (found := condition()):
        if asyncio.iscoroutine(found) or time.monotonic() > until:
            return False
        await asyncio.sleep(0.005)
    return True


# -- asking


@pytest.mark.parametrize("limits", [NONE, Limits(tokens_per_day=100_000, nanousd_per_month=10_000_000)])
async def test_only_the_first_call_asks(limits: Limits, house: House) -> None:
    """A scope's first call in a process waits for one statement; those after it hold and settle without any."""
    await house.limit(team=limits)
    leases = await house.process("a")
    house.statements = 0
    first = await house.hold(leases)

    assert house.statements == 1
    leases.settle(first.request_id, 90, 900)
    for _ in range(3):
        request = house.ask()
        assert leases.try_hold(request)
        leases.settle(request.request_id, 10, 100)
    assert house.statements == 1


async def test_a_lease_is_an_hour_of_spending_and_never_more_than_its_share(house: House) -> None:
    """What is drawn beyond the need follows what was spent of late; over all owners it stays in its share."""
    await house.limit(team=Limits(tokens_per_day=1_000_000))
    leases = await house.process("a", living=5)
    await house.hold(leases)
    modest = await house.drawn()
    request = house.ask()
    assert leases.try_hold(request)
    leases.settle(request.request_id, 100, 1000)
    leases.turn(1.0, house.clock.now())
    for _ in range(6):
        await house.hold(leases)

    assert modest <= 1000
    rate = 100 / 60  # a second, of late: one second of a minute
    assert modest < await house.drawn() <= modest + 600 + rate * 3600
    rich = await house.drawn()
    leases.rooms.by_day[int(house.clock.now() // 86_400)]["team:team_a"][0].rate = 1e6
    await house.hold(leases, tokens=rich)
    assert rich + 0.03 * (1_000_000 - rich) < await house.drawn() <= rich + 0.05 * (1_000_000 - rich) + rich


async def test_streams_that_begin_together_ask_ever_less_often(house: House) -> None:
    """None has used anything yet; each grant is worth what is held already."""
    await house.limit(team=Limits(tokens_per_day=10_000_000, nanousd_per_day=10**12))
    leases = await house.process("a")
    house.statements = 0
    for _ in range(1000):
        await house.hold(leases)

    assert house.statements <= 12
    assert await house.drawn() <= 2 * 1000 * 100


async def test_callers_near_a_cap_share_their_asks(house: House) -> None:
    """Who comes while an ask is under way is in the next one: an ask and a wait for the disk, for one or for fifty."""
    await house.limit(team=Limits(tokens_per_day=10_000))
    leases = await house.process("a", living=50)
    await house.hold(leases)
    house.statements = 0
    first = asyncio.create_task(house.hold(leases))
    await asyncio.sleep(0.001)
    await asyncio.gather(first, *(house.hold(leases) for _ in range(49)))

    assert house.statements <= 4
    assert await house.drawn() == 51 * 100


async def test_a_need_above_the_share_is_granted(house: House) -> None:
    """One call may take what the cap has left, however small the share is."""
    await house.limit(team=Limits(tokens_per_day=1000))
    leases = await house.process("a", share=0.25, living=10)
    await house.hold(leases, tokens=990)

    assert await house.drawn() == 990


async def test_all_or_nothing(house: House) -> None:
    """Where the key has no room nothing is drawn of the team, and the other way round."""
    await house.limit(team=Limits(tokens_per_day=1000), key=Limits(nanousd_per_day=500))
    leases = await house.process("a")
    refused = await house.refused(leases, tokens=100, cost=501)

    assert (refused.scope.kind, refused.limit) == ("key", LimitName.USD_PER_DAY)
    assert await house.drawn() == 0
    refused = await house.refused(leases, tokens=1001, cost=1)
    assert (refused.scope.kind, refused.limit) == ("team", LimitName.TOKENS_PER_DAY)
    assert await house.drawn("key:key_a", "nanousd") == 0
    assert not leases.holding.calls


async def test_owners_together_never_pass_a_cap(house: House) -> None:
    """Four processes with more callers than there is room: as many are let in as fit, to the last token."""
    await house.limit(team=Limits(tokens_per_day=3000))
    processes = [await house.process(name, living=4) for name in "abcd"]

    async def call(leases: Leases) -> bool:
        request = house.ask()
        return leases.try_hold(request) or await leases.hold(request) is None

    async with house.bell(*processes):
        let_in = await asyncio.gather(*(call(leases) for leases in processes for _ in range(15)))

    assert 24 <= sum(let_in) <= 30  # what lies idle when the last are refused is less than a share
    assert await house.drawn() <= 3000
    more = 0
    async with house.bell(*processes):
        for _ in range(10):
            request = house.ask()
            more += processes[0].try_hold(request) or await processes[0].hold(request) is None
    assert sum(let_in) + more == 30


async def test_idle_room_of_another_comes_by_the_bell(house: House) -> None:
    """A caller waits a quarter of a second for what another owner holds unused, and is let in."""
    await house.limit(team=Limits(tokens_per_day=1000))
    rich, poor = await house.process("a"), await house.process("b")
    request = await house.hold(rich, tokens=100)
    rich.settle(request.request_id, 0, 0)
    assert await house.drawn() > 100
    async with house.bell(rich, poor) as heard:
        began = time.monotonic()
        await house.hold(poor, tokens=1000)

        assert time.monotonic() - began < SOON * BUSY
        assert set(heard) == {"team:team_a"}
        assert len(heard) == 1  # once for a turn to tight, not for each ask
    assert await house.drawn() == 1000


async def test_a_bell_that_rings_while_an_answer_is_on_its_way_is_heard(house: House) -> None:
    """The answer was given before the balance became tight: what it brought beyond the need goes back all the same."""
    await house.limit(team=Limits(tokens_per_day=1000))
    rich, poor = await house.process("a"), await house.process("b")
    take, answered = rich.store.take, asyncio.Event()

    async def take_late(*asked: Any, **more: Any) -> Any:
        taken = await take(*asked, **more)
        await answered.wait()
        return taken

    rich.store.take = take_late  # type: ignore[method-assign]
    async with house.bell(rich, poor):
        holding = asyncio.create_task(house.hold(rich, tokens=100))
        while await house.drawn() <= 100:
            await asyncio.sleep(0.005)
        asking = asyncio.create_task(house.hold(poor, tokens=900))
        while not rich.rooms.by_day[int(house.clock.now() // 86_400)]["team:team_a"][0].is_tight:
            await asyncio.sleep(0.001)
        answered.set()
        await asyncio.gather(holding, asking)

    assert await house.drawn() == 1000


async def test_room_that_comes_back_while_an_answer_is_written_is_asked_for_again(house: House) -> None:
    """The answer refuses, late, and tells of balances that have room by now: no reason to refuse the caller."""
    await house.limit(team=Limits(tokens_per_day=1000))
    one, other = await house.process("a"), await house.process("b")
    running = await house.hold(one, tokens=1000)
    take = other.store.take

    async def take_slowly(owner: str, day: str, asks: Any, share: float, **said: Any) -> Any:
        other.store.take = take  # type: ignore[method-assign]
        refused = await take(owner, day, asks, share, **said)
        one.release(running.request_id)
        one.return_idle()
        await one.returns.tell()
        await asyncio.sleep(2 * WAIT_FOR_ROOM)
        nothing = [[msgspec.structs.replace(need, need=0, want=0) for need in ask] for ask in asks]
        later = await take(owner, day, nothing, share, **said)
        return msgspec.structs.replace(refused, balances=later.balances)

    other.store.take = take_slowly  # type: ignore[method-assign]
    await house.hold(other, tokens=900)

    assert await house.drawn() == 900


async def test_what_a_call_leaves_of_a_tight_balance_goes_back(house: House) -> None:
    """Within 50 ms of its end, and another owner may have it."""
    await house.limit(team=Limits(tokens_per_day=1000))
    one, other = await house.process("a"), await house.process("b")
    request = await house.hold(one, tokens=900)
    assert await house.drawn() == 900
    one.settle(request.request_id, 10, 0)
    began = time.monotonic()
    while await house.drawn() > 10 and time.monotonic() - began < 0.05 * 5 * BUSY:
        await asyncio.sleep(0.005)

    assert await house.drawn() == 10
    await house.hold(other, tokens=990)


async def test_first_come_first_served(house: House) -> None:
    """Callers who wait in one process are let in by the order in which they came."""
    await house.limit(team=Limits(tokens_per_day=1000))
    leases = await house.process("a")
    running = await house.hold(leases, tokens=1000)
    order: list[int] = []

    async def call(number: int) -> None:
        await leases.hold(house.ask(tokens=400))
        order.append(number)

    store, leases.store = leases.store, Slow(leases.store)
    calls = [asyncio.create_task(call(number)) for number in range(5)]
    await asyncio.sleep(0.02)
    leases.settle(running.request_id, 0, 0)
    await comes(lambda: len(order) == 2)

    assert order == [0, 1]
    leases.store = store
    await asyncio.gather(*calls)
    assert order == list(range(5))


class Slow:
    """A store that takes a while to answer asks."""

    def __init__(self, store: Any) -> None:
        self._store = store

    async def take(self, *args: Any, **more: Any) -> Any:
        """Draw room, later."""
        await asyncio.sleep(0.1)
        return await self._store.take(*args, **more)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


# -- refusals


async def test_a_refusal_says_what_is_used_and_held(house: House) -> None:
    """Used by rows and closed calls, held by running ones of all owners; what waiting can help, and headroom."""
    await house.limit(team=Limits(tokens_per_day=1000, nanousd_per_day=50_000))
    one, other = await house.process("a", living=2), await house.process("b", living=2)
    done = await house.hold(one, tokens=300)
    one.settle(done.request_id, 200, 1000)
    await asyncio.sleep(0.1)
    await house.hold(other, tokens=600)
    async with house.bell(one, other):
        refused = await house.refused(one, tokens=400)

    assert (refused.limit, refused.cap, refused.wanted) == (LimitName.TOKENS_PER_DAY, 1000, 400)
    assert (refused.used, refused.held) == (200, 600)
    assert not refused.is_settled
    assert not refused.alone_exceeds
    assert refused.retry_after == 1.0
    assert refused.headroom.tokens == 200


async def test_a_refusal_says_that_waiting_does_not_help(house: House) -> None:
    """Where what is settled leaves no room, or none would even be enough."""
    await house.limit(team=Limits(tokens_per_day=1000))
    leases = await house.process("a")
    done = await house.hold(leases, tokens=900)
    leases.settle(done.request_id, 900, 0)
    settled = await house.refused(leases, tokens=200)
    alone = await house.refused(leases, tokens=1001)

    assert settled.is_settled
    assert settled.retry_after is None
    assert not settled.alone_exceeds
    assert settled.headroom.tokens == 100
    assert alone.alone_exceeds
    assert alone.retry_after is None


async def test_headroom_is_that_of_the_whole_scope(house: House) -> None:
    """Not of one process's lease: what nobody has drawn counts."""
    await house.limit(team=Limits(tokens_per_day=10_000))
    leases = await house.process("a", living=50)
    await house.hold(leases, tokens=10)
    refused = await house.refused(leases, tokens=9_995)

    assert refused.headroom.tokens == 9_990


async def test_the_refusal_with_no_room_anywhere_comes_at_once(house: House) -> None:
    """Where no owner holds anything unused, nobody waits a quarter of a second."""
    await house.limit(team=Limits(tokens_per_day=1000))
    leases = await house.process("a")
    await house.hold(leases, tokens=1000)
    asked = house.statements
    await house.refused(leases)

    assert house.statements - asked == 1


# -- what ends


async def test_a_call_settles_once(house: House) -> None:
    """However often it is said."""
    leases = await house.process("a")
    request = await house.hold(leases)
    for used in (70, 80, 0):
        leases.settle(request.request_id, used, used)
    leases.release(request.request_id)
    of_tokens = leases.rooms.by_day[int(house.clock.now() // 86_400)]["team:team_a"][0]

    assert (of_tokens.used, of_tokens.held, len(leases.holding.calls)) == (70, 0, 0)


async def test_a_caller_who_leaves_while_waiting_leaks_nothing(house: House) -> None:
    """Whether it was cancelled before its answer came, or with it."""
    await house.limit(team=Limits(tokens_per_day=1000))
    for pause in (0.0, 0.001, 0.002, 0.004, 0.008, 0.02):
        leases = await house.process(f"a{pause}")
        request = house.ask(tokens=500)
        asking = asyncio.create_task(leases.hold(request))
        await asyncio.sleep(pause)
        asking.cancel()
        await asyncio.wait([asking])
        if not asking.cancelled():
            leases.release(request.request_id)
        await comes(partial(operator.not_, leases.callers.waiting))

        assert not leases.holding.calls
        assert all(room.held == 0 for room in leases.rooms)
        leases.return_idle()
        await leases.returns.tell()
        assert await house.drawn() == 0


async def test_a_lowered_cap_stops_grants_and_calls_idle_room_back(house: House) -> None:
    """At once, for whoever holds it; what runs goes on."""
    await house.limit(team=Limits(tokens_per_day=100_000))
    one, other = await house.process("a"), await house.process("b")
    running = await house.hold(one, tokens=500)
    idle = await house.drawn() - 500
    assert idle > 0
    async with house.bell(one, other):
        await house.limit(team=Limits(tokens_per_day=600))
        await house.refused(other, tokens=200)
        assert await comes(lambda: not one.try_hold(house.ask(tokens=200)))
        began = time.monotonic()
        while await house.drawn() > 500 and time.monotonic() - began < SOON * BUSY:
            await asyncio.sleep(0.01)

    assert await house.drawn() == 500
    assert running.request_id in one.holding.calls
    await house.hold(other, tokens=100)


async def test_a_limit_that_is_set_again_calls_back_what_was_drawn_without_it(house: House) -> None:
    """A balance that was tight before its limit was taken away: what owners drew since comes to a caller in need."""
    await house.limit(team=Limits(tokens_per_day=1000))
    rich, poor = await house.process("a"), await house.process("b")
    house.give_up(rich, await house.hold(rich, tokens=900))
    while await house.drawn():
        await asyncio.sleep(0.005)
    await house.limit()
    for tokens in (100, 200):
        house.give_up(rich, await house.hold(rich, tokens=tokens))
    await house.limit(team=Limits(tokens_per_day=await house.drawn() + 10))
    async with house.bell(rich, poor):
        held = await house.hold(poor, tokens=200)

    assert held.request_id in poor.holding.calls


async def test_the_end_of_a_day_returns_what_is_left_to_the_month(house: House) -> None:
    """A lease is drawn on its day and its month; the rest of a day that is over is the month's again."""
    await house.limit(team=Limits(nanousd_per_day=10_000, nanousd_per_month=12_000))
    leases = await house.process("a")
    yesterday = await house.hold(leases, cost=2000)
    leases.settle(yesterday.request_id, 10, 1500)
    still = await house.hold(leases, cost=1000)
    house.clock.move(86_400)
    leases.turn(1.0, house.clock.now())
    await leases.returns.tell()

    assert await house.drawn("team:team_a", "nanousd", "2026-04") == 1500 + 1000
    assert await house.drawn("team:team_a", "nanousd") == 2500
    leases.settle(still.request_id, 10, 0)
    leases.turn(1.0, house.clock.now())
    await leases.returns.tell()
    assert await house.drawn("team:team_a", "nanousd", "2026-04") == 1500
    await house.hold(leases, cost=10_000)


# -- Postgres away


@asynccontextmanager
async def outage(leases: Leases) -> AsyncIterator[list[int]]:
    """Let the database answer nothing at all; how often it is asked meanwhile."""
    asked = [0]

    class Silent:
        async def take(self, *_: Any, **__: Any) -> Any:
            asked[0] += 1
            await asyncio.sleep(3600)

        give_back = take

    store, leases.store = leases.store, Silent()  # type: ignore[assignment]
    yield asked
    leases.store = store


async def test_calls_go_on_inside_leases_while_postgres_is_away(house: House) -> None:
    """Inside what was drawn calls are held and settled as ever."""
    await house.limit(team=Limits(tokens_per_day=100_000))
    leases = await house.process("a")
    await house.hold(leases)
    async with outage(leases) as asked:
        for _ in range(2):
            request = house.ask()
            assert leases.try_hold(request)
            leases.settle(request.request_id, 10, 10)

        assert asked == [0]


@pytest.mark.parametrize("seconds", [0.4, 0.5, 1.0])
async def test_a_process_that_was_stopped_does_not_take_the_database_for_lost(
    seconds: float, house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its deadlines are over when it goes on: however long it stood still, the answer that came meanwhile is heard."""
    await house.limit(team=Limits(tokens_per_day=1000))
    leases = await house.process("a")
    monkeypatch.setattr("billing.quotas.draws.ASK_WITHIN", 0.4)
    take = leases.store.take
    asks: list[float] = []

    async def take_slowly(*args: Any) -> Any:
        asks.append(time.monotonic())
        asyncio.get_running_loop().call_later(0.05, time.sleep, seconds)
        await asyncio.sleep(0.15)
        return await take(*args)

    monkeypatch.setattr(leases.store, "take", take_slowly)
    await house.hold(leases)

    assert len(asks) == 1
    assert not leases.is_away


async def test_what_was_asked_as_the_process_was_stopped_is_asked_again(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Postgres ends a statement of a client that says no more: that it is away does not follow."""
    await house.limit(team=Limits(tokens_per_day=1000))
    leases = await house.process("a")
    take, asks = leases.store.take, list[float]()

    async def take_through_a_stop(*args: Any) -> Any:
        asks.append(house.clock.monotonic())
        if len(asks) == 1:
            house.clock.move(40.0)
            raise TimeoutError
        return await take(*args)

    monkeypatch.setattr(leases.store, "take", take_through_a_stop)
    await house.hold(leases)

    assert len(asks) == 2 and not leases.is_away


async def test_who_waited_while_its_process_was_stopped_waits_on_for_room_that_comes(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its time was over as the process went on; what is on its way back to the database is waited for as ever."""
    monkeypatch.setattr("billing.quotas.callers.LONGEST_ASK", 0.4)
    monkeypatch.setattr("billing.quotas.callers.ROOM_IS_THERE", 0.3)
    await house.limit(team=Limits(tokens_per_day=100))
    leases = await house.process("a")
    first = await house.hold(leases, tokens=50)
    take, give_back, may_tell = leases.store.take, leases.store.give_back, asyncio.Event()
    asks: list[float] = []

    async def take_through_a_stop(*args: Any) -> Any:
        asks.append(time.monotonic())
        taken = await take(*args)
        if len(asks) == 1:
            leases.return_idle()
            time.sleep(0.7)
        elif len(asks) == 4:
            may_tell.set()
        return taken

    async def give_back_late(*args: Any) -> Any:
        await may_tell.wait()
        return await give_back(*args)

    monkeypatch.setattr(leases.store, "take", take_through_a_stop)
    monkeypatch.setattr(leases.store, "give_back", give_back_late)
    house.give_up(leases, first)
    await house.hold(leases, tokens=100)

    assert len(asks) > 4


async def test_the_driver_need_not_look_types_up(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """In each new connection that would take it longer than the statement, when all processes start at once."""
    looked_up: list[object] = []
    introspect = asyncpg.Connection._introspect_types

    async def note(self: Any, types: object, timeout: object) -> Any:
        looked_up.append(types)
        return await introspect(self, types, timeout)

    monkeypatch.setattr(asyncpg.Connection, "_introspect_types", note)
    await house.limit(team=Limits(tokens_per_day=1000))
    leases = await house.process("a")
    request = await house.hold(leases)
    leases.settle(request.request_id, 10, 10)
    leases.return_idle()
    await leases.returns.tell()

    assert looked_up == []


async def test_an_answer_that_comes_too_late_for_its_caller_is_still_heard(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A statement given up would cost a slow database its connection, and another look at what was drawn after all."""
    await house.limit(team=Limits(tokens_per_day=1000))
    leases = await house.process("a")
    monkeypatch.setattr("billing.quotas.draws.ASK_WITHIN", 0.1)
    take, answered = leases.store.take, asyncio.Event()
    asks: list[float] = []

    async def take_late(*args: Any) -> Any:
        asks.append(time.monotonic())
        taken = await take(*args)
        await answered.wait()
        return taken

    monkeypatch.setattr(leases.store, "take", take_late)
    refused = await house.refused(leases)
    assert refused.is_unknown
    assert leases.is_away

    answered.set()
    assert await comes(lambda: not leases.draws.late)
    await house.hold(leases)
    assert len(asks) == 1
    assert not leases.draws.unread


async def test_what_a_beat_that_is_cancelled_has_drawn_for_tomorrow_is_looked_for(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A beat that takes too long is cancelled, and its ask was executed: room that no one knew of would lie idle."""
    limits = Limits(tokens_per_day=100_000)
    await house.limit(team=limits, key=limits)
    leases = await house.process("a")
    leases.settle((await house.hold(leases)).request_id, 100, 1000)
    leases.turn(1.0)
    take = leases.store.take

    async def take_unheard(*asked: Any) -> Any:
        await take(*asked)
        raise asyncio.CancelledError

    with monkeypatch.context() as patch:
        patch.setattr(leases.store, "take", take_unheard)
        with pytest.raises(asyncio.CancelledError):
            await leases.take_tomorrow()
    scopes, tomorrow = ("team:team_a", "key:key_a"), int(house.clock.now() // 86_400) + 1
    drawn = [await house.drawn(scope, period="2026-04-06") for scope in scopes]
    house.clock.move(draws.LOOK_AGAIN + 0.1)
    await leases.draws.read_again()  # as each beat does

    assert any(drawn)
    known = leases.rooms.by_day[tomorrow]
    assert [known[scope][0].granted if scope in known else 0 for scope in scopes] == drawn


async def test_an_answer_to_an_owner_that_was_ended_meanwhile_gives_the_next_one_no_room(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it had went back when it ended, and another process has it: two calls would be held of a cap for one."""
    await house.limit(team=Limits(tokens_per_day=1000))
    leases, other = await house.process("a"), await house.process("c")
    take, request = leases.store.take, house.ask(tokens=1000)

    async def take_while_it_ends(*asked: Any) -> Any:
        taken = await take(*asked)
        assert await leases.store.end("a")
        leases.owner = "b"
        leases.forget()
        await leases.store.begin("b", "")
        leases.rooms.of(request)  # as the next caller of the team does
        await house.hold(other, tokens=1000)
        return taken

    monkeypatch.setattr(leases.store, "take", take_while_it_ends)
    refused = await leases.hold(request)

    assert refused is not None and refused.is_unknown
    assert not leases.holding.calls and leases.acknowledged == 0


async def test_an_acknowledgement_of_an_owner_that_was_ended_is_none_of_the_next_one(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its beats begin anew: one that counts less than was acknowledged says that the database forgot, and all owners
    wait until each has told its leases again."""
    leases = await house.process("a")
    await house.hold(leases)
    leases.return_idle()
    give_back = leases.store.give_back

    async def give_back_while_it_ends(*said: Any) -> Any:
        beat = await give_back(*said)
        assert beat
        leases.owner = "b"
        leases.forget()
        return beat

    monkeypatch.setattr(leases.store, "give_back", give_back_while_it_ends)
    await leases.returns.tell()

    assert leases.acknowledged == 0


async def test_a_mistake_of_the_program_is_not_taken_for_a_database_that_is_away(house: House) -> None:
    """An ask whose callers have left may fail by one: the loop tells of it."""
    leases = await house.process("a")

    async def fail() -> Any:
        raise TypeError

    asking = asyncio.create_task(fail())
    await asyncio.wait([asking])

    with pytest.raises(TypeError):
        leases.draws._hear_late(asking)


async def test_a_scope_whose_row_is_locked_takes_the_database_away_from_no_other(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its callers are refused after their time; who asks for another scope is answered, as long as anything is."""
    await house.limit(team=Limits(tokens_per_day=1000))
    leases = await house.process("a")
    deadline = asyncio.timeout(None)  # it passes when the test says so
    monkeypatch.setattr(
        draws, "running_timeout", lambda seconds: deadline if seconds == draws.ASK_WITHIN else running_timeout(seconds)
    )
    async with house.database.begin() as connection:
        await connection.execute(text("UPDATE teams SET name = 'open' WHERE id = 'team_a'"))
        await connection.execute(text("SELECT FROM teams WHERE id = 'team_a' FOR UPDATE"))
        refusal = asyncio.create_task(house.refused(leases))
        assert await comes(lambda: leases.callers.waiting)
        await asyncio.sleep(0)
        await leases.returns.set_again()
        beat = await leases.store.give_back("a", [])
        leases.heard(leases.mark, beat)
        deadline.reschedule(0.0)

        assert (await refusal).is_unknown
        assert not leases.is_away


async def test_a_capped_scope_without_room_hears_so_at_once(house: House) -> None:
    """The first caller waits for the database's deadline; those after it are told without asking again, and what they
    wanted makes no later lease larger."""
    await house.limit(team=Limits(tokens_per_day=100_000))
    leases = await house.process("a")
    async with outage(leases) as asked:
        first = await house.refused(leases)
        assert leases.is_away
        more = [await house.refused(leases, tokens=2000) for _ in range(20)]

        assert asked == [1]
        assert max(room.hold for room in leases.rooms if room.unit == "tokens") == 100
        assert all(refused.is_unknown for refused in (first, *more))
    leases.is_away = False  # as the next beat finds
    await house.hold(leases)


async def test_a_team_without_limits_goes_on_without_postgres(house: House) -> None:
    """It needs no room; a limit set later knows what it used."""
    leases = await house.process("a")
    async with outage(leases):
        requests = [await house.hold(leases) for _ in range(5)]
        assert leases.is_away
    assert len(leases.holding.calls) == 5
    for request in requests:
        leases.settle(request.request_id, 10, 10)
    leases.is_away = False
    await house.hold(leases, tokens=1)
    assert await house.drawn() >= 51


async def test_what_postgres_refuses_is_not_asked_again(house: House) -> None:
    """A number that no column holds has drawn nothing: to look after it would fail at every beat."""
    await house.limit(team=Limits(tokens_per_day=100_000))
    leases = await house.process("a")
    await house.refused(leases, cost=2**70)
    leases.is_away = False  # as the next beat finds
    house.clock.move(60)
    await leases.draws.read_again()  # as each beat does: where it fails, the database counts as away

    assert not leases.draws.unread and not leases.is_away
