# Quotas on a real Valkey: every limit of every scope in one atomic step.

from __future__ import annotations

import asyncio
import socket
import time

import pytest
from msgspec.structs import replace
from redis.asyncio import Redis

from billing.holds import Hold, HoldRequest, Leg, LimitName, Limits, RefusedHold, Scope, Settlement, Sums
from billing.ids import day_of
from billing.quotas import Quotas
from billing.redis_line import Line
from billing.team_books import DEADLINE
from gateway.clock import Clock
from protocol.usage import Usage
from tests.support.clock import SetClock
from tests.support.factories import make_record

TEAM = "team_a"
UNLIMITED = Limits()


@pytest.mark.parametrize(
    ("limits", "limit", "fits"),
    [
        (Limits(requests_per_minute=3), LimitName.REQUESTS_PER_MINUTE, 3),
        (Limits(tokens_per_minute=250), LimitName.TOKENS_PER_MINUTE, 2),
        (Limits(concurrent_requests=4), LimitName.CONCURRENT_REQUESTS, 4),
        (Limits(tokens_per_day=599), LimitName.TOKENS_PER_DAY, 5),
        (Limits(nanousd_per_day=7000), LimitName.USD_PER_DAY, 7),
        (Limits(nanousd_per_month=6000), LimitName.USD_PER_MONTH, 6),
    ],
)
@pytest.mark.parametrize("kind", ["team", "key"])
async def test_each_limit_of_each_scope_holds(
    quotas: Quotas, clock: SetClock, limits: Limits, limit: LimitName, fits: int, kind: str
) -> None:
    """As many calls are held as fit to the last unit; the next is refused and told which limit it was."""
    request = [ask(clock, **{kind: limits}) for _ in range(fits + 1)]

    answers = [await quotas.open(each) for each in request]

    assert all(isinstance(each, Hold) for each in answers[:-1])
    refused = answers[-1]
    assert isinstance(refused, RefusedHold)
    assert (refused.limit, refused.scope.kind) == (limit, kind)


async def test_a_refusal_holds_nothing_anywhere(quotas: Quotas, clock: SetClock) -> None:
    """All or nothing: what one scope refuses, the other scope does not count."""
    await quotas.open(ask(clock, team=Limits(), key=Limits(nanousd_per_day=500)))

    state = await quotas.usage(TEAM)

    assert (state.live, state.day_nanousd_held, state.day_tokens_held) == (0, 0, 0)


async def test_what_is_aside_counts_in_days_and_months_alone(quotas: Quotas, clock: SetClock) -> None:
    """What the house asks for a team takes nothing from its minute and no place among its calls, held, renewed, freed
    or settled; its tokens and its money are the team's, and its limits on those hold."""
    limits = Limits(
        requests_per_minute=1, tokens_per_minute=100, concurrent_requests=1, nanousd_per_day=3000, tokens_per_day=300
    )
    asides = [replace(ask(clock, team=limits, key=limits), is_aside=True) for _ in range(3)]

    first, second = [await held(quotas, each) for each in asides[:2]]
    call = await held(quotas, ask(clock, team=limits, key=limits))
    refused = await quotas.open(asides[2])
    before = await quotas.usage(TEAM)
    await quotas.settle(first, used(tokens=10, cost=100))
    clock.move(31)
    assert set((await quotas.sweep(TEAM))[0]) == {second.request.request_id, call.request.request_id}
    assert await quotas.renew(second, used())
    after = await quotas.usage(TEAM)

    assert isinstance(refused, RefusedHold) and refused.limit in (LimitName.USD_PER_DAY, LimitName.TOKENS_PER_DAY)
    assert (before.requests_per_minute, before.tokens_per_minute, before.live) == (1, 100, 1)
    assert (before.day_tokens_held, before.day_nanousd_held) == (300, 3000)
    assert (after.requests_per_minute, after.tokens_per_minute, after.live) == (1, 100, 0)
    assert (after.day_tokens, after.day_nanousd, after.day_nanousd_held) == (10, 100, 1000)


async def test_what_is_aside_counts_so_without_redis(redis: Redis, clock: SetClock) -> None:
    """Against the share of a gateway that stands alone as well."""
    alone = Quotas(Redis(port=1), clock, uses_server_time=False)
    limits = Limits(requests_per_minute=4, concurrent_requests=4)
    asides = [replace(ask(clock, team=limits), is_aside=True) for _ in range(5)]

    answers = [await alone.open(each) for each in (*asides, ask(clock, team=limits))]

    assert all(isinstance(each, Hold) for each in answers)
    assert isinstance(await alone.open(ask(clock, team=limits)), RefusedHold)


async def test_a_clock_that_is_set_back_keeps_no_minute_for_an_hour(redis: Redis, clock: SetClock) -> None:
    """What a gateway that stands alone held more than a minute ago has flowed back, whatever the time of day says."""
    alone = Quotas(Redis(port=1), clock, standalone_share=1.0, uses_server_time=False)
    limits = Limits(requests_per_minute=2)
    assert [type(await alone.open(ask(clock, team=limits))) for _ in range(3)] == [Hold, Hold, RefusedHold]
    clock.set_back(3600)
    clock.move(61)

    assert isinstance(await alone.open(ask(clock, team=limits)), Hold)


async def test_settling_books_what_was_used(quotas: Quotas, clock: SetClock) -> None:
    """After settling, the hold is gone and the real cost stands in every counter, for team and key."""
    hold = await held(quotas, ask(clock))

    await quotas.settle(hold, used(tokens=30, cost=300))

    for key_id in (None, "key_a"):
        state = await quotas.usage(TEAM, key_id=key_id)
        assert (state.live, state.day_tokens_held, state.day_nanousd_held, state.month_nanousd_held) == (0, 0, 0, 0)
        assert (state.day_tokens, state.day_nanousd, state.month_nanousd) == (30, 300, 300)


async def test_settling_twice_books_once(quotas: Quotas, clock: SetClock) -> None:
    """Settle is idempotent by id, also when a release comes between or after."""
    hold = await held(quotas, ask(clock))

    await quotas.settle(hold, used(cost=300))
    await quotas.release(hold)
    await quotas.settle(hold, used(cost=300))

    assert (await quotas.usage(TEAM)).day_nanousd == 300


async def test_a_settlement_after_the_hold_was_freed_books_it_all(quotas: Quotas, clock: SetClock) -> None:
    """An owner that was paused beyond its lease still owes what it used."""
    hold = await held(quotas, ask(clock))
    clock.move(31)
    assert (await quotas.sweep(TEAM))[0] == [hold.request.request_id]
    assert (await quotas.usage(TEAM)).day_nanousd_held == 0

    await quotas.settle(hold, used(cost=300))

    assert (await quotas.usage(TEAM)).day_nanousd == 300


async def test_a_renewed_hold_lives_on(quotas: Quotas, clock: SetClock) -> None:
    """A lease lasts 30 s from its last renewal."""
    hold = await held(quotas, ask(clock))
    clock.move(29)

    assert await quotas.renew(hold, used(cost=1))
    clock.move(29)

    assert (await quotas.sweep(TEAM))[0] == []


async def test_an_open_after_its_own_release_is_refused(quotas: Quotas, clock: SetClock) -> None:
    """An open that overslept finds the tombstone of its release and holds nothing."""
    request = ask(clock)
    await quotas.release(Hold(request=request))

    assert isinstance(await quotas.open(request), RefusedHold)


async def test_an_open_that_comes_too_late_is_refused(quotas: Quotas, clock: SetClock) -> None:
    """After valid_until a hold may no longer be opened."""
    request = ask(clock)
    clock.move(6)

    assert isinstance(await quotas.open(request), RefusedHold)


async def test_an_open_said_twice_holds_once(quotas: Quotas, clock: SetClock) -> None:
    """A retry of the same open is answered again, not counted again."""
    request = ask(clock, team=Limits(requests_per_minute=1, nanousd_per_day=1000))

    assert isinstance(await quotas.open(request), Hold)
    assert isinstance(await quotas.open(request), Hold)

    assert (await quotas.usage(TEAM)).requests_per_minute == 1


async def test_waiting_as_told_is_enough(quotas: Quotas, clock: SetClock) -> None:
    """retry_after comes from the very bucket that refuses: just before it there is no room, right after there is."""
    limits = Limits(requests_per_minute=2)
    await held(quotas, ask(clock, team=limits))
    clock.move(10.4)
    await held(quotas, ask(clock, team=limits))
    refused = await quotas.open(ask(clock, team=limits))
    assert isinstance(refused, RefusedHold) and refused.retry_after == pytest.approx(49.6, abs=0.01)

    clock.move(refused.retry_after - 0.1)
    assert isinstance(await quotas.open(ask(clock, team=limits)), RefusedHold)
    clock.move(0.2)
    assert isinstance(await quotas.open(ask(clock, team=limits)), Hold)


async def test_a_minute_refund_goes_to_its_own_bucket(quotas: Quotas, clock: SetClock) -> None:
    """Tokens that were held and not used can be held again at once, and leave the window with their bucket."""
    limits = Limits(tokens_per_minute=100)
    hold = await held(quotas, ask(clock, team=limits))
    clock.move(30)
    await quotas.settle(hold, used(tokens=40))

    assert (await quotas.usage(TEAM)).tokens_per_minute == 40
    clock.move(30)
    assert (await quotas.usage(TEAM)).tokens_per_minute == 0


async def test_a_settled_limit_and_a_held_one_are_told_apart(quotas: Quotas, clock: SetClock) -> None:
    """Room taken by running calls comes back; room that is settled does not."""
    limits = Limits(nanousd_per_day=1500)
    hold = await held(quotas, ask(clock, team=limits))
    first = await quotas.open(ask(clock, team=limits))
    await quotas.settle(hold, used(cost=1000))
    second = await quotas.open(ask(clock, team=limits))
    third = await quotas.open(ask(clock, team=limits, cost=1501))

    assert isinstance(first, RefusedHold) and isinstance(second, RefusedHold) and isinstance(third, RefusedHold)
    assert (first.is_settled, first.retry_after, first.held) == (False, 1.0, 1000)
    assert (second.is_settled, second.retry_after, second.used) == (True, None, 1000)
    assert third.alone_exceeds


async def test_many_callers_at_once_never_pass_a_cap(redis: Redis) -> None:
    """300 concurrent callers of three gateways at a cap of 50 calls' worth: 50 are held, no more and no fewer."""
    clock = Clock()
    gateways = [Quotas(redis, clock, deadline=5.0) for _ in range(3)]
    limits = Limits(nanousd_per_day=50_000)

    answers = await asyncio.gather(*(gateways[n % 3].open(ask(clock, team=limits)) for n in range(300)))

    assert sum(isinstance(answer, Hold) for answer in answers) == 50
    assert (await gateways[0].usage(TEAM)).day_nanousd_held == 50_000


async def test_a_gateway_that_stood_still_refuses_nobody_for_it(redis: Redis) -> None:
    """Redis's answer was read seconds after it was given: the next call must not pay for the clock so misjudged."""
    clock = SetClock(time.time())
    quotas = Quotas(redis, clock, deadline=5.0)
    clock.move(10)  # between Redis's answer and our reading of it
    await held(quotas, ask(clock))
    clock.move(-10)  # as if Redis's answer had been young

    answer = await quotas.open(ask(clock))

    assert isinstance(answer, Hold)


async def test_a_transport_that_closes_under_a_call_is_a_lost_connection(
    quotas: Quotas, clock: SetClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """uvloop raises RuntimeError when it writes to one: the call goes on over another, and money is settled."""
    hold = await held(quotas, ask(clock))
    write = Line.write
    closed = ["unable to perform operation on <TCPTransport closed=True>; the handler is closed"]

    class Closed:
        """A transport whose socket went between two calls."""

        def write(self, data: bytes) -> None:
            """Say what uvloop says."""
            raise RuntimeError(closed.pop())

        def abort(self) -> None:
            """Nothing is left to end."""

    def write_once_closed(line: Line, commands: list[bytes]) -> None:
        if closed:
            monkeypatch.setattr(line, "_transport", Closed())
        write(line, commands)

    monkeypatch.setattr(Line, "write", write_once_closed)
    await quotas.settle(hold, used(cost=400))

    assert (quotas.is_standalone, (await quotas.usage(TEAM)).day_nanousd) == (False, 400)


async def test_headers_show_the_tightest_minute_limits(quotas: Quotas, clock: SetClock) -> None:
    """The hold tells what is left of requests and tokens per minute in the scope that has least."""
    hold = await held(
        quotas,
        ask(clock, team=Limits(requests_per_minute=10, tokens_per_minute=900), key=Limits(requests_per_minute=3)),
    )

    assert hold.requests is not None and (hold.requests.limit, hold.requests.remaining) == (3, 2)
    assert hold.tokens is not None and (hold.tokens.limit, hold.tokens.remaining) == (900, 800)


async def test_the_dead_are_booked_from_their_journals(quotas: Quotas, clock: SetClock) -> None:
    """A call whose owner died counts once, whether its hold is still there, was freed, or was settled."""
    holds = [await held(quotas, ask(clock)) for _ in range(3)]
    await quotas.settle(holds[0], used(cost=400))
    await quotas.release(holds[1])

    await quotas.book([make_record(hold.request.request_id, cost_nanousd=400) for hold in holds])

    assert (await quotas.usage(TEAM)).day_nanousd == 1200
    assert (await quotas.usage(TEAM)).live == 0


async def test_a_closed_connection_is_opened_again(quotas: Quotas, clock: SetClock, redis: Redis) -> None:
    """A restarted Redis costs no call its hold: the trip is made again, and the script loaded again."""
    await held(quotas, ask(clock))
    await redis.script_flush()
    await redis.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")

    hold = await held(quotas, ask(clock))

    assert not hold.standalone
    assert (await quotas.usage(TEAM)).live == 2


async def test_a_loop_that_stood_still_is_not_a_lost_redis(redis: Redis) -> None:
    """When this process was too busy to read the reply in time, the reply still counts."""
    clock = Clock()
    quotas = Quotas(redis, clock)
    await held(quotas, ask(clock))
    asyncio.get_running_loop().call_later(0, time.sleep, 0.4)

    holds = await asyncio.gather(*(held(quotas, ask(clock)) for _ in range(5)))

    assert not any(hold.standalone for hold in holds)


async def test_without_redis_a_share_of_the_last_remainder_is_spent(redis: Redis) -> None:
    """Away, Redis costs no call more than its deadline; what is held is a quarter of what was left."""
    clock = Clock()
    quotas = Quotas(redis, clock)
    limits = Limits(nanousd_per_day=41_000)
    await held(quotas, ask(clock, team=limits))
    with socket.socket() as deaf:  # accepts connections and never answers
        deaf.bind(("127.0.0.1", 0))
        deaf.listen()
        await quotas.disconnect()
        quotas._script.redis, working = Redis(port=deaf.getsockname()[1]), quotas._script.redis
        start = time.monotonic()

        answers = [await quotas.open(ask(clock, team=limits)) for _ in range(20)]

        assert time.monotonic() - start < 10 * DEADLINE  # twenty calls, of which the first has waited for it
        holds = [answer for answer in answers if isinstance(answer, Hold)]
        assert len(holds) == 10 and all(hold.standalone for hold in holds)
        await asyncio.gather(*(quotas.settle(hold, used(cost=900)) for hold in holds))
        await quotas.disconnect()
        await quotas._script.redis.aclose()

    quotas._script.redis = working
    for _ in range(300):
        if not quotas.is_standalone and not quotas._unsaid:
            break
        await asyncio.sleep(0.01)
    state = await quotas.usage(TEAM)
    assert (state.day_nanousd, state.day_nanousd_held) == (9_000, 1_000)


async def test_a_freed_hold_takes_its_room_again_while_it_is_there(quotas: Quotas, clock: SetClock) -> None:
    """An owner that slept beyond its lease renews: its hold comes back, settles in place, and cannot come back then."""
    limits = Limits(nanousd_per_day=2500, tokens_per_minute=1000)
    hold = await held(quotas, ask(clock, team=limits))
    clock.move(31)
    await quotas.sweep(TEAM)

    assert await quotas.renew(hold, used(cost=1))
    assert (await quotas.usage(TEAM)).day_nanousd_held == 1000
    assert (await quotas.usage(TEAM)).tokens_per_minute == 100
    await quotas.settle(hold, used(cost=300))
    assert not await quotas.renew(hold, used(cost=1))

    assert (await quotas.usage(TEAM)).day_nanousd == 300


async def test_a_freed_hold_does_not_push_others_over_a_cap(quotas: Quotas, clock: SetClock) -> None:
    """Its room was given to another call: it stays freed, and what it uses is settled late."""
    limits = Limits(nanousd_per_day=1500)
    hold = await held(quotas, ask(clock, team=limits))
    clock.move(31)
    await quotas.sweep(TEAM)
    await held(quotas, ask(clock, team=limits))

    assert not await quotas.renew(hold, used(cost=1))
    assert (await quotas.usage(TEAM)).day_nanousd_held == 1000
    await quotas.settle(hold, used(cost=1200))

    assert (await quotas.usage(TEAM)).day_nanousd == 1200
    assert quotas.exceeded == 1


async def test_freed_calls_are_remembered_until_they_are_settled(quotas: Quotas, clock: SetClock) -> None:
    """A row may come from a dead owner's journal long after its hold was freed: for an hour it is looked for."""
    first, second = await held(quotas, ask(clock)), await held(quotas, ask(clock))
    ids = {first.request.request_id, second.request.request_id}
    clock.move(31)
    freed, unsettled = await quotas.sweep(TEAM)
    assert set(freed) == set(unsettled) == ids

    await quotas.book([make_record(first.request.request_id, cost_nanousd=400)])
    assert await quotas.sweep(TEAM) == ([], [second.request.request_id])
    clock.move(3601)

    assert await quotas.sweep(TEAM) == ([], [])
    assert (await quotas.usage(TEAM)).day_nanousd == 400


async def test_sums_can_be_taken_before_a_minute(quotas: Quotas, clock: SetClock) -> None:
    """What is settled of calls with older ids, over midnight too, is the total without the later minutes."""
    clock.move(12 * 3600 - 150)
    day = int(clock.now() // 86_400)
    costs = {}
    for cost in (1, 10, 100, 1000, 10_000):
        hold = await held(quotas, ask(clock))
        costs[clock.now()] = cost
        clock.move(20)
        await quotas.settle(hold, used(tokens=cost, cost=cost))
        clock.move(40)
    for ago in (0, 60, 120, 180, 240, 300):
        before = clock.now() - ago
        whole = before // 60 * 60
        for of_day in (day, day + 1):
            due = sum(cost for at, cost in costs.items() if at < whole and int(at // 86_400) == of_day)
            month = sum(cost for at, cost in costs.items() if at < whole)

            sums = await quotas.settled_before(TEAM, of_day, before)

            assert sums == Sums(due, due, month)
    assert await quotas.settled_before(TEAM, day, clock.now() - 7300) is None


async def test_a_correction_counts_once_and_opens_no_room_below_nothing(quotas: Quotas, clock: SetClock) -> None:
    """Signed amounts, for team and key; a negative balance is exact in the books and no headroom beyond the cap."""
    day, correction_id = int(clock.now() // 86_400), clock.new_id()
    for _ in range(2):
        await quotas.correct(correction_id, TEAM, "key_a", day, -50, -600)

    state = await quotas.usage(TEAM, key_id="key_a")
    assert (state.day_tokens, state.day_nanousd, state.month_nanousd) == (-50, -600, -600)
    assert (await quotas.usage(TEAM)).day_nanousd == -600
    assert isinstance(await quotas.open(ask(clock, team=Limits(nanousd_per_day=1000))), Hold)
    assert isinstance(await quotas.open(ask(clock, team=Limits(nanousd_per_day=1000), cost=100)), RefusedHold)


async def test_what_redis_refuses_holds_up_nobody(quotas: Quotas, clock: SetClock, redis: Redis) -> None:
    """A settlement that Redis itself will not take is counted and left; Redis is not away, and the next is booked."""
    first, second = await held(quotas, ask(clock)), await held(quotas, ask(clock))
    counter = f"tollgate:{{{TEAM}}}:0:d:team:{day_of(first.request.request_id)}"
    await redis.hset(counter, "c", str(2**63 - 1))

    await quotas.settle(first, used(cost=900))
    assert (quotas.refused, quotas.is_standalone, quotas._unsaid) == (1, False, {})
    await redis.hset(counter, "c", "0")
    await quotas.settle(second, used(cost=800))

    state = await quotas.usage(TEAM)
    assert (state.day_nanousd, state.day_nanousd_held, state.live) == (800, 0, 0)


async def test_an_unsaid_settlement_that_redis_refuses_is_not_said_again(
    quotas: Quotas, clock: SetClock, redis: Redis
) -> None:
    """It leaves the queue, so that those behind it are heard and the gateway counts in Redis again."""
    first, second = await held(quotas, ask(clock)), await held(quotas, ask(clock))
    counter = f"tollgate:{{{TEAM}}}:0:d:key:key_a:{day_of(first.request.request_id)}"
    await redis.hset(counter, "c", str(2**63 - 500))
    quotas._failed(TimeoutError(), "")

    await quotas.settle(first, used(cost=900))
    await quotas.settle(second, used(cost=300))
    for _ in range(300):
        if not quotas._unsaid:
            break
        await asyncio.sleep(0.01)

    assert (quotas.refused, quotas.is_standalone, quotas._unsaid) == (1, False, {})
    assert (await quotas.usage(TEAM)).live == 0


def ask(
    clock: Clock, *, team: Limits = UNLIMITED, key: Limits = UNLIMITED, tokens: int = 100, cost: int = 1000
) -> HoldRequest:
    """Return a request for a hold, valid for five seconds."""
    request_id = clock.new_id()
    assert day_of(request_id) == int(clock.now() // 86_400)
    return HoldRequest(
        request_id=request_id,
        team_id=TEAM,
        scopes=(Scope("team", TEAM, team), Scope("key", "key_a", key)),
        legs=(Leg("a", tokens, cost), Leg("b", tokens // 2, cost // 2)),
        valid_until=clock.now() + 5,
    )


async def held(quotas: Quotas, request: HoldRequest) -> Hold:
    """Open a hold that must have room."""
    hold = await quotas.open(request)
    assert isinstance(hold, Hold)
    return hold


def used(*, tokens: int = 10, cost: int = 100) -> Settlement:
    """Return what a call used."""
    return Settlement(Usage(input_tokens=tokens), cost)
