# Rates on a real Valkey, and without one: a call is counted where it began, no store is asked twice, shares carry an
# outage, and nothing is lost or counted twice whichever answer is lost.

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest
from msgspec.structs import replace
from redis.asyncio import Connection, Redis

from billing.core.holds import HoldRequest, Leg, LimitName, Limits, Scope
from billing.quotas.rate_wire import SHA, Command
from billing.quotas.rates import RENEW, TELL, RateLimits
from gateway.core.clock import Clock
from tests.support.clock import SetClock
from tests.support.redis_proxy import RedisProxy, Way, redis_proxy
from tests.support.temporary_stores import temporary_valkey

TEAM = "team_a"
MINUTE = "tollgate:{team_a}:rates:minute:team"
SLOTS = "tollgate:{team_a}:rates:slots:team"
NONE = Limits()
MakeRates = Callable[..., RateLimits]


@pytest.fixture
async def make_rates(redis: Redis, clock: SetClock) -> AsyncIterator[MakeRates]:
    """Makes processes whose time the test decides."""
    made: list[RateLimits] = []

    def make(client: Redis | None = None, owners: int = 1, deadline: float = 10.0) -> RateLimits:
        rates = RateLimits(
            redis if client is None else client,
            clock,
            owner=f"o{len(made)}",
            uses_server_time=False,
            deadline=deadline,
        )
        rates.owners = owners
        made.append(rates)
        return rates

    yield make
    for rates in made:
        await rates.close()


@pytest.fixture
async def proxy(redis: Redis, redis_url: str) -> AsyncIterator[RedisProxy]:
    """A way to an empty Valkey."""
    async with redis_proxy(redis_url) as way:
        yield way


@pytest.fixture
async def by_proxy(proxy: RedisProxy) -> AsyncIterator[Redis]:
    """A client that goes by the proxy."""
    client: Redis = Redis.from_url(proxy.url, socket_timeout=1.0)
    yield client
    await client.aclose()


def ask(
    clock: Clock, team: Limits = NONE, key: Limits = NONE, tokens: int = 100, *, internal: bool = False
) -> HoldRequest:
    """Return a request of this moment."""
    return HoldRequest(
        request_id=clock.new_id(),
        team_id=TEAM,
        scopes=(Scope("team", TEAM, team), Scope("key", "k", key)),
        legs=(Leg("a", tokens, 0),),
        is_internal=internal,
    )


async def admit(rates: RateLimits, request: HoldRequest) -> bool:
    """Whether a call is counted, by a slice or by Redis."""
    return bool(rates.take(request)) or await rates.ask(request) is None


async def told(redis: Redis, *names: str) -> list[int]:
    """Return the sums that Redis has of the team: r requests, t tokens, h tokens held."""
    sums = (await redis.hget(MINUTE, "sums") or b"0 0 0 0").split()
    return [int(sums["?rth".index(name)]) for name in names]


async def until(condition: Callable[[], Awaitable[bool]] | Callable[[], bool], seconds: float = 10.0) -> None:
    """Wait for what must come to pass."""
    async with asyncio.timeout(seconds):
        while True:
            found = condition()
            if found if isinstance(found, bool) else await found:
                return
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("limits", "limit", "fits"),
    [
        (Limits(requests_per_minute=3), LimitName.REQUESTS_PER_MINUTE, 3),
        (Limits(tokens_per_minute=250), LimitName.TOKENS_PER_MINUTE, 2),
        (Limits(concurrent_requests=4), LimitName.CONCURRENT_REQUESTS, 4),
    ],
)
@pytest.mark.parametrize("kind", ["team", "key"])
async def test_each_limit_of_each_scope_holds_over_processes(
    make_rates: MakeRates, clock: SetClock, limits: Limits, limit: LimitName, fits: int, kind: str
) -> None:
    """As many calls are counted as fit to the last unit; the next is refused and told which limit it was."""
    processes = [make_rates(owners=2), make_rates(owners=2)]
    for number in range(fits):
        assert await admit(processes[number % 2], ask(clock, **{kind: limits}))

    refused = await processes[fits % 2].ask(ask(clock, **{kind: limits}))

    assert refused is not None
    assert (refused.limit, refused.scope.kind, refused.alone_exceeds) == (limit, kind, False)
    assert refused.used + refused.held <= refused.cap < refused.used + refused.held + refused.wanted


async def test_a_refusal_counts_nowhere(make_rates: MakeRates, clock: SetClock, redis: Redis) -> None:
    """What the key's limit refuses is not counted at the team, and a refusal of more than the cap says so."""
    rates = make_rates()

    refused = await rates.ask(ask(clock, Limits(requests_per_minute=9), Limits(tokens_per_minute=99)))

    assert refused is not None and refused.alone_exceeds and refused.retry_after is None
    assert await told(redis, "r", "t") == [0, 0]


async def test_without_rates_and_internally_nothing_is_counted(
    make_rates: MakeRates, clock: SetClock, redis: Redis
) -> None:
    """A call without such limits, or of the deployment itself, is taken without a word to Redis."""
    rates = make_rates()
    free, internal = ask(clock, Limits(tokens_per_day=1)), ask(clock, Limits(requests_per_minute=0), internal=True)

    assert (
        rates.take(free)
        and rates.take(internal)
        and await rates.ask(free) is None
        and await rates.ask(internal) is None
    )
    rates.settle(free, 10)
    assert await redis.keys() == []


async def test_a_busy_team_costs_a_few_trips(make_rates: MakeRates, clock: SetClock, redis: Redis) -> None:
    """Two seconds of 200 calls each: two trips a call before, now a few in a second, and the books are exact."""
    rates, limits = make_rates(), Limits(requests_per_minute=60_000, tokens_per_minute=10**7, concurrent_requests=99)
    asked = 0
    for _ in range(400):
        clock.move(0.005)
        await rates.tell()
        request = ask(clock, limits, limits)
        if not rates.take(request):
            asked += 1
            assert await rates.ask(request) is None
        rates.settle(request, 60)
    clock.move(TELL)
    await rates.tell()

    assert asked < 30
    assert await told(redis, "r", "t", "h") == [400, 400 * 60, 0]
    assert await redis.exists(SLOTS) == 0


async def test_callers_that_wait_share_a_trip(make_rates: MakeRates, clock: SetClock, redis: Redis) -> None:
    """A hundred at once are one command, and exactly as many are admitted as fit."""
    rates = make_rates(owners=100)
    before = (await redis.info("commandstats")).get("cmdstat_evalsha", {"calls": 0})["calls"]

    answers = await asyncio.gather(*(rates.ask(ask(clock, Limits(requests_per_minute=60))) for _ in range(100)))

    assert sum(answer is None for answer in answers) == 60
    assert (await redis.info("commandstats"))["cmdstat_evalsha"]["calls"] - before <= 2  # and once without the script


async def test_waiting_as_told_is_enough(make_rates: MakeRates, clock: SetClock) -> None:
    """retry_after comes from the very bucket that refuses: just before it there is no room, right after there is."""
    rates, limits = make_rates(), Limits(requests_per_minute=2)
    assert await admit(rates, ask(clock, limits))
    clock.move(10.4)
    assert await admit(rates, ask(clock, limits))
    refused = await rates.ask(ask(clock, limits))
    assert refused is not None and refused.retry_after == pytest.approx(49.85, abs=0.01)

    clock.move(refused.retry_after - 0.1)
    assert await rates.ask(ask(clock, limits)) is not None
    clock.move(0.2)
    assert await rates.ask(ask(clock, limits)) is None


async def test_room_of_running_calls_is_worth_another_try_soon(make_rates: MakeRates, clock: SetClock) -> None:
    """Tokens that running calls hold may be free in a moment; those that were used are not."""
    rates, limits = make_rates(), Limits(tokens_per_minute=150)
    running = ask(clock, limits)
    assert await admit(rates, running)
    held = await rates.ask(ask(clock, limits))
    rates.settle(running, 90)
    used = await rates.ask(ask(clock, limits))

    assert held is not None and used is not None
    assert (held.retry_after, held.used, held.held) == (1.0, 0, 100)
    assert (used.retry_after, used.used, used.held) == (60.0, 90, 0)


async def test_a_minute_refund_goes_to_its_own_bucket(make_rates: MakeRates, clock: SetClock, redis: Redis) -> None:
    """Tokens that were held and not used can be held again soon, and leave the window with their bucket."""
    rates, limits = make_rates(), Limits(tokens_per_minute=100)
    call = ask(clock, limits)
    assert await admit(rates, call)
    clock.move(30)
    rates.settle(call, 40)
    rates.settle(call, 40)
    clock.move(TELL)
    await rates.tell()

    assert await told(redis, "r", "t", "h") == [1, 40, 0]
    clock.move(30.1)
    assert await admit(rates, ask(clock, limits))
    assert await told(redis, "r", "t", "h") == [1, 100, 100]


async def test_what_never_ran_is_given_back_whole(make_rates: MakeRates, clock: SetClock, redis: Redis) -> None:
    """Request, tokens and slot."""
    rates = make_rates()
    call = ask(clock, Limits(requests_per_minute=1, tokens_per_minute=100, concurrent_requests=1))
    assert await admit(rates, call)
    rates.release(call)
    clock.move(TELL)
    await rates.tell()

    assert await told(redis, "r", "t", "h") == [0, 0, 0]
    assert await redis.exists(SLOTS) == 0


async def test_closing_tells_what_is_left(make_rates: MakeRates, clock: SetClock, redis: Redis) -> None:
    """A process that ends gives its slice back, and the slots of calls that have ended, before their time."""
    rates, limits = make_rates(), Limits(requests_per_minute=1000, concurrent_requests=100)
    calls = [ask(clock, limits) for _ in range(30)]
    for call in calls:
        assert await admit(rates, call)
        rates.settle(call, 100)
    assert await told(redis, "r") > [30]
    await rates.close()

    assert await told(redis, "r", "h") == [30, 0] and await redis.exists(SLOTS) == 0


async def test_a_caller_that_leaves_while_it_waits_is_not_counted(
    make_rates: MakeRates, clock: SetClock, redis: Redis
) -> None:
    """Cancelled before or after the answer: the room is free again."""
    rates, limits = make_rates(), Limits(requests_per_minute=10, concurrent_requests=10)
    for turns in range(12):
        request = ask(clock, limits)
        task = asyncio.create_task(rates.ask(request))
        for _ in range(turns):
            await asyncio.sleep(0.0003)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        if not task.cancelled():
            rates.release(request)  # answered before it could leave
        await rates.tell()
        clock.move(TELL)
        await rates.tell()
        assert await told(redis, "r") == [0] and await redis.exists(SLOTS) == 0


async def test_a_process_that_dies_frees_its_slots(make_rates: MakeRates, clock: SetClock) -> None:
    """After thirty seconds, and not before; those of a living one stay as long as their calls run."""
    dead, living, limits = make_rates(owners=2), make_rates(owners=2), Limits(concurrent_requests=3)
    assert await admit(dead, ask(clock, limits)) and await admit(dead, ask(clock, limits))
    assert await admit(living, ask(clock, limits))
    for _ in range(5):
        clock.move(RENEW)
        await living.tell()
        clock.move(TELL)
        await living.tell()
    assert await living.ask(ask(clock, limits)) is not None
    clock.move(RENEW)
    await living.tell()

    assert await living.ask(ask(clock, limits)) is None and await living.ask(ask(clock, limits)) is None
    assert await living.ask(ask(clock, limits)) is not None


async def test_keys_are_of_one_slot_and_end(make_rates: MakeRates, clock: SetClock, redis: Redis) -> None:
    """All keys of a team carry its hash tag and a time to live."""
    limits = Limits(requests_per_minute=9, tokens_per_minute=999, concurrent_requests=9)
    assert await admit(make_rates(), ask(clock, limits, limits))

    keys = [key.decode() for key in await redis.keys()]
    assert len(keys) == 5 and all(key.startswith("tollgate:{team_a}:") for key in keys)
    assert all([0 < await redis.ttl(key) <= 120 for key in keys])


async def test_headers_show_the_tightest_minute_limits(make_rates: MakeRates, clock: SetClock) -> None:
    """What is left of requests and tokens per minute in the scope that has least, also of calls out of a slice; what
    was told a while ago leaves the minute, though nothing is asked."""
    rates = make_rates()
    team, key = Limits(requests_per_minute=100, tokens_per_minute=9000), Limits(requests_per_minute=50)
    for number in range(1, 20):
        call = ask(clock, team, key)
        assert await admit(rates, call)
        requests, tokens = rates.remaining(call)
        assert requests is not None and (requests.limit, requests.remaining) == (50, 50 - number)
        assert tokens is not None and (tokens.limit, tokens.remaining) == (9000, 9000 - 100 * number)
        clock.move(0.01)
    clock.move(30)
    requests, tokens = rates.remaining(call)
    assert requests is not None and tokens is not None
    assert (requests.remaining, tokens.remaining) == (pytest.approx(41, abs=1), pytest.approx(8050, abs=20))
    clock.move(30)
    assert [left and left.remaining for left in rates.remaining(call)] == [50, 9000]


async def test_a_clock_that_is_set_back_keeps_no_minute_for_an_hour(make_rates: MakeRates, clock: SetClock) -> None:
    """A server whose clock is behind, after a failover: the minute lasts a minute more, or begins anew."""
    rates, limits = make_rates(), Limits(requests_per_minute=1)
    assert await admit(rates, ask(clock, limits))
    clock.set_back(20)
    assert await rates.ask(ask(clock, limits)) is not None
    clock.move(81)
    assert await rates.ask(ask(clock, limits)) is None
    clock.set_back(3600)
    assert await rates.ask(ask(clock, limits)) is None


async def test_another_limit_counts_from_the_next_call_on(make_rates: MakeRates, clock: SetClock) -> None:
    """Lowered, raised, and where there was none."""
    rates = make_rates()
    for _ in range(5):
        assert await admit(rates, ask(clock, Limits(requests_per_minute=1000)))
    assert not await admit(rates, ask(clock, Limits(requests_per_minute=5)))
    assert await admit(rates, ask(clock, Limits(requests_per_minute=6)))
    assert not await admit(rates, ask(clock, Limits(requests_per_minute=1000, concurrent_requests=6)))
    assert not await admit(rates, ask(clock, Limits(requests_per_minute=1000, tokens_per_minute=600)))


async def test_what_others_write_to_its_keys_costs_no_outage(
    make_rates: MakeRates, clock: SetClock, redis: Redis
) -> None:
    """A key of another type, or a value that is no number: that key begins anew."""
    rates, limits = make_rates(), Limits(requests_per_minute=9, concurrent_requests=9)
    for key in await _keys_of(redis, rates, clock, limits):
        await redis.delete(key)
        await redis.lpush(key, "x")
        assert await admit(rates, ask(clock, limits))
        await redis.delete(key)
        await (redis.set(key, b"\xc1") if b"told" in key else redis.hset(key, mapping={"r": "x", "at": "y", "o9": "z"}))
        assert await admit(rates, ask(clock, limits))
        clock.move(1)

    assert (rates.is_away, rates.refusals) == (False, 0)


async def _keys_of(redis: Redis, rates: RateLimits, clock: SetClock, limits: Limits) -> list[bytes]:
    assert await admit(rates, ask(clock, limits))
    return list(await redis.keys())


async def test_a_wiped_redis_hears_of_running_calls_at_once(
    make_rates: MakeRates, clock: SetClock, redis: Redis
) -> None:
    """The first answer that shows it has the slots of all running calls stated again."""
    rates, limits = make_rates(owners=2), Limits(concurrent_requests=5)
    for _ in range(4):
        assert await admit(rates, ask(clock, limits))
    for _ in range(2):
        assert await admit(rates, replace(ask(clock, key=limits), team_id="team_b"))
    await redis.flushall()
    clock.move(0.3)
    assert await admit(rates, replace(ask(clock, key=limits), team_id="team_b"))
    clock.move(TELL)
    await rates.tell()

    another = make_rates(owners=2)
    assert await admit(another, ask(clock, limits)) and not await admit(another, ask(clock, limits))


@pytest.mark.parametrize("way", [way for way in Way if way is not Way.OPEN])
async def test_an_answer_that_is_lost_is_counted_once(
    make_rates: MakeRates, clock: SetClock, redis: Redis, proxy: RedisProxy, by_proxy: Redis, way: Way
) -> None:
    """Whether Redis has executed the command or not: afterwards its books are those of the calls that were admitted."""
    rates, limits = make_rates(by_proxy, deadline=0.4), Limits(requests_per_minute=100, tokens_per_minute=10**5)
    running = ask(clock, limits)
    assert await admit(rates, running)
    rates.settle(running, 30)
    proxy.turn(way)
    admitted = 1 + sum([await admit(rates, ask(clock, limits)) for _ in range(5)])
    assert rates.is_away and admitted == 6
    await rates.tell()
    assert rates.is_away
    proxy.turn(Way.OPEN)

    await until(lambda: _looked(rates))
    clock.move(TELL)
    await rates.tell()
    assert await told(redis, "r", "t", "h") == [6, 530, 500]


async def test_redis_may_be_further_away_than_a_call_waits(
    make_rates: MakeRates, clock: SetClock, redis: Redis, redis_url: str
) -> None:
    """As behind sentinels, which are asked first: a process finds it before its first call, which goes by what others
    have used, and finds it again after an outage."""

    class Slow(Connection):
        async def connect(self) -> None:
            await asyncio.sleep(0.15)
            await super().connect()

    limits, rates = Limits(requests_per_minute=5), make_rates()
    assert [await admit(rates, ask(clock, limits)) for _ in range(6)] == [True] * 5 + [False]
    async with Redis.from_url(redis_url, socket_timeout=1.0) as far:
        far.connection_pool.connection_class = Slow
        new = make_rates(far, deadline=0.25)
        await new.start()

        assert not await admit(new, ask(clock, limits)) and not new.is_away
        assert new._wire._connection is not None
        await new._wire._connection.disconnect()
        new.is_away = True
        assert await _looked(new)
        await new.close()


async def _looked(rates: RateLimits) -> bool:
    await rates.tell()
    return not rates.is_away


async def test_a_frozen_redis_holds_up_one_deadline_of_calls(clock: SetClock) -> None:
    """Those that wait when it freezes hear after the deadline at most, later ones at once; what it executes late, after
    it was asked again, changes nothing."""
    with temporary_valkey() as server:
        client: Redis = Redis.from_url(server.url)
        rates = RateLimits(client, clock, owner="o", uses_server_time=False, deadline=1.0)
        limits = Limits(requests_per_minute=100)
        assert await admit(rates, ask(clock, limits))
        pid = int((await client.info("server"))["process_id"])
        os.kill(pid, signal.SIGSTOP)
        try:
            first = asyncio.create_task(admit(rates, ask(clock, limits)))
            await asyncio.sleep(0.1)  # its command is on its way
            async with asyncio.timeout(3.0):
                assert all(await asyncio.gather(first, *(admit(rates, ask(clock, limits)) for _ in range(19))))
            assert rates.is_away
            async with asyncio.timeout(0.8):  # less than a deadline for all of them
                assert all([await admit(rates, ask(clock, limits)) for _ in range(20)])
            await rates.tell()
        finally:
            os.kill(pid, signal.SIGCONT)
        await until(lambda: _looked(rates))
        clock.move(TELL)
        await rates.tell()

        assert await told(client, "r") == [41]
        await rates.close()
        await client.aclose()


async def test_a_process_that_stood_still_does_not_take_redis_for_away(
    make_rates: MakeRates, clock: SetClock, redis: Redis
) -> None:
    """Its timer is late, not the answer: the command is said again, and counted once."""
    rates, limits = make_rates(deadline=0.4), Limits(requests_per_minute=100)
    assert await admit(rates, ask(clock, limits))
    for turns in (4, 5, 7, 8):  # of the loop: the command is about to be said, or on its way
        asking = asyncio.create_task(admit(rates, ask(clock, limits)))
        for _ in range(turns):
            await asyncio.sleep(0)
        time.sleep(0.25)  # the loop stands still for longer than an answer may take
        assert await asking and not rates.is_away
    clock.move(TELL)
    await rates.tell()

    assert await told(redis, "r") == [5]


async def test_a_command_that_is_executed_late_changes_nothing(
    make_rates: MakeRates, clock: SetClock, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of an older one, out of a connection that was given up, after a newer one was answered."""
    rates, limits = make_rates(), Limits(requests_per_minute=100, concurrent_requests=9)
    carry, said = rates._wire.carry, list[Command]()

    async def listen(waiting: list[Command], hear: Callable[[Command, Any], None], deadline: float) -> None:
        said.extend(waiting)
        await carry(waiting, hear, deadline=deadline)

    monkeypatch.setattr(rates._wire, "carry", listen)
    assert await admit(rates, ask(clock, limits)) and await admit(rates, ask(clock, limits))
    before = await redis.hgetall(MINUTE), await redis.hgetall(SLOTS)

    assert await redis.evalsha(SHA, len(said[0].keys), *said[0].keys, said[0].packed) is None
    assert (await redis.hgetall(MINUTE), await redis.hgetall(SLOTS)) == before


async def test_a_demoted_primary_is_away_and_comes_back(make_rates: MakeRates, clock: SetClock, redis: Redis) -> None:
    """READONLY is an outage; when the address leads to a primary again, the process finds it."""
    rates, limits = make_rates(), Limits(requests_per_minute=100)
    assert await admit(rates, ask(clock, limits))
    assert rates._wire._connection is not None
    way = rates._wire._connection._writer
    await redis.replicaof("127.0.0.1", 1)
    try:
        assert await admit(rates, ask(clock, limits)) and rates.is_away
        assert rates._wire._connection._writer is not way  # another connection may lead to another server
        await rates.tell()
        assert rates.is_away
    finally:
        await redis.replicaof("NO", "ONE")
    await until(lambda: _looked(rates))
    clock.move(TELL)
    await rates.tell()

    assert await told(redis, "r") == [2]


async def test_run_tells_by_itself(redis: Redis) -> None:
    """What is free again is told within a quarter of a second, and an outage ends by itself; idle, nothing is said."""
    rates = RateLimits(redis, Clock(), owner="o", deadline=10.0)
    running = asyncio.create_task(rates.run())
    call = ask(Clock(), Limits(requests_per_minute=9, concurrent_requests=2))
    assert await admit(rates, call)
    rates.settle(call, 0)

    await until(lambda: _has_ended(redis))
    calls = (await redis.info("commandstats"))["cmdstat_evalsha"]["calls"]
    await asyncio.sleep(0.5)
    assert (await redis.info("commandstats"))["cmdstat_evalsha"]["calls"] == calls
    running.cancel()
    await rates.close()


async def _has_ended(redis: Redis) -> bool:
    return await redis.exists(SLOTS) == 0
