# Refusals by real quotas, as a client reads them: every limit of every scope, and nobody refused who has headroom.

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from typing import Any

import pytest
from msgspec.structs import replace
from redis.asyncio import Redis
from sqlalchemy import text

from billing.core.errors import refusal_error
from billing.core.holds import Hold, HoldRequest, Leg, LimitName, Limits, RefusedHold, Scope, Settlement
from billing.ledger.ledger import insert_records
from billing.quotas.quotas import Quotas
from gateway.calls.rate_limits import rate_limit_headers
from gateway.storage.database import Database
from protocol.errors import ServiceError
from protocol.usage import Usage
from tests.support.clock import SetClock
from tests.support.factories import make_record
from tests.support.limited import LimitedQuotas, open_quotas
from tests.support.waiting import until_found

NO_LIMITS = Limits()
TOKENS, COST = 100, 1_000  # of every request here: tokens, and nano-dollars
ROOM_FOR_TWO = {  # of every limit that a team or a key can have
    LimitName.REQUESTS_PER_MINUTE: Limits(requests_per_minute=2),
    LimitName.TOKENS_PER_MINUTE: Limits(tokens_per_minute=2 * TOKENS + 99),
    LimitName.CONCURRENT_REQUESTS: Limits(concurrent_requests=2),
    LimitName.TOKENS_PER_DAY: Limits(tokens_per_day=2 * TOKENS + 99),
    LimitName.USD_PER_DAY: Limits(nanousd_per_day=2 * COST + 999),
    LimitName.USD_PER_MONTH: Limits(nanousd_per_month=2 * COST + 999),
}
ROOM_FOR_THREE = Limits(
    requests_per_minute=3,
    tokens_per_minute=3 * TOKENS,
    concurrent_requests=3,
    tokens_per_day=3 * TOKENS,
    nanousd_per_day=3 * COST,
    nanousd_per_month=3 * COST,
)
BUDGETS = (LimitName.TOKENS_PER_DAY, LimitName.USD_PER_DAY, LimitName.USD_PER_MONTH)
WORDS = {
    LimitName.REQUESTS_PER_MINUTE: "2 requests per minute",
    LimitName.TOKENS_PER_MINUTE: "299 tokens per minute",
    LimitName.CONCURRENT_REQUESTS: "2 requests at a time",
    LimitName.TOKENS_PER_DAY: "299 tokens per day (UTC)",
    LimitName.USD_PER_DAY: "$0.000002999 per day (UTC)",
    LimitName.USD_PER_MONTH: "$0.000002999 per month (UTC)",
}
HELD_BY_TWO = {
    LimitName.TOKENS_PER_MINUTE: "200 tokens",
    LimitName.CONCURRENT_REQUESTS: "2 requests",
    LimitName.TOKENS_PER_DAY: "200 tokens",
    LimitName.USD_PER_DAY: "$0.000002",
    LimitName.USD_PER_MONTH: "$0.000002",
}
every_limit = pytest.mark.parametrize("limit", ROOM_FOR_TWO)
every_scope = pytest.mark.parametrize("kind", ["team", "key"])


@every_limit
@every_scope
async def test_room_held_by_running_calls_is_worth_a_retry(
    quotas: Quotas, clock: SetClock, limit: LimitName, kind: str
) -> None:
    """429 rate_limit_exceeded, a wait of a second, and how much is held. Only requests of a minute go by their bucket:
    those are used up when they begin."""
    await quotas.open(ask(clock, limit, kind))
    clock.move(19.5)
    await quotas.open(ask(clock, limit, kind))

    error = await refusal(quotas, ask(clock, limit, kind))

    is_used_up = limit is LimitName.REQUESTS_PER_MINUTE
    assert (error.status, error.type, error.code) == (429, "rate_limit_error", "rate_limit_exceeded")
    assert error.headers["retry-after"] == ("41" if is_used_up else "1")  # 60 - 19.5 = 40.5
    assert is_used_up or f"and {HELD_BY_TWO[limit]} held by running requests" in error.message
    assert "x-should-retry" not in error.headers and error.param is None
    assert WORDS[limit] in error.message and ("this key" if kind == "key" else "team team_a") in error.message


@pytest.mark.parametrize("limit", BUDGETS)
@every_scope
async def test_a_budget_that_is_spent_is_not(quotas: Quotas, clock: SetClock, limit: LimitName, kind: str) -> None:
    """429 insufficient_quota, once what is settled leaves no room, and no SDK tries again."""
    for _ in range(2):
        await spend(quotas, ask(clock, limit, kind))

    error = await refusal(quotas, ask(clock, limit, kind))

    assert (error.status, error.type, error.code) == (429, "insufficient_quota", "insufficient_quota")
    assert error.headers["x-should-retry"] == "false" and "retry-after" not in error.headers
    assert WORDS[limit] in error.message


@every_scope
async def test_a_minute_whose_tokens_are_used_says_when_they_leave_it(
    quotas: Quotas, clock: SetClock, kind: str
) -> None:
    """What calls have used of a minute comes back with its bucket, what they hold when they end: the wait is for
    whichever the request cannot do without."""
    limit = LimitName.TOKENS_PER_MINUTE
    await spend(quotas, ask(clock, limit, kind), tokens=150)
    clock.move(19.5)
    running = await quotas.open(ask(clock, limit, kind))
    assert isinstance(running, Hold)

    beside = await refusal(quotas, ask(clock, limit, kind))
    quotas.release(running)
    clock.move(40.75)  # what was used has left the minute
    await spend(quotas, ask(clock, limit, kind), tokens=150)
    await spend(quotas, ask(clock, limit, kind), tokens=100)
    used_up = await refusal(quotas, ask(clock, limit, kind))

    assert "150 tokens are used and 100 tokens held" in beside.message and beside.headers["retry-after"] == "1"
    assert "250 tokens are used. Try" in used_up.message and used_up.headers["retry-after"] == "60"


async def test_what_a_minute_holds_leaves_it_with_its_second(quotas: Quotas, clock: SetClock) -> None:
    """A call that runs for longer than the minute holds nothing of it any more, nor gives anything back twice."""
    limit = LimitName.TOKENS_PER_MINUTE
    running = await quotas.open(ask(clock, limit, "team"))
    assert isinstance(running, Hold)
    clock.move(61)
    for _ in range(2):
        assert isinstance(await quotas.open(ask(clock, limit, "team")), Hold)

    beside = await refusal(quotas, ask(clock, limit, "team"))
    quotas.settle(running, Settlement(Usage(1), 1))
    clock.move(1)
    after = await refusal(quotas, ask(clock, limit, "team"))

    assert all("0 tokens are used and 200 tokens held" in error.message for error in (beside, after))


@pytest.mark.parametrize("limit", BUDGETS)
@every_scope
async def test_a_budget_half_spent_and_half_held_is_worth_a_retry(
    quotas: Quotas, clock: SetClock, limit: LimitName, kind: str
) -> None:
    """What is settled leaves room for the request; only running calls are in its way."""
    await spend(quotas, ask(clock, limit, kind))
    running = await quotas.open(ask(clock, limit, kind))
    assert isinstance(running, Hold)

    error = await refusal(quotas, ask(clock, limit, kind))
    quotas.release(running)
    after = await quotas.open(ask(clock, limit, kind))

    assert (error.code, error.headers["retry-after"]) == ("rate_limit_exceeded", "1")
    assert isinstance(after, Hold)


@pytest.mark.parametrize("limit", [LimitName.TOKENS_PER_MINUTE, *BUDGETS])
@every_scope
async def test_a_request_larger_than_its_limit_names_max_tokens(
    quotas: Quotas, clock: SetClock, limit: LimitName, kind: str
) -> None:
    """Also while the limit is used up: waiting for that would end in the same refusal."""
    for _ in range(2):
        await spend(quotas, ask(clock, limit, kind))

    refused = await quotas.open(ask(clock, limit, kind, times=3))
    assert isinstance(refused, RefusedHold)
    error = refusal_error(refused, fits=42)

    assert (error.status, error.code, error.param) == (429, "rate_limit_exceeded", "max_tokens")
    assert "max_tokens of 42 or less" in error.message
    assert error.headers["x-should-retry"] == "false" and "retry-after" not in error.headers


@every_scope
@pytest.mark.parametrize("day", [400, 200])
async def test_what_fits_fits_the_minute_as_well(quotas: Quotas, clock: SetClock, kind: str, day: int) -> None:
    """A budget's refusal names no more tokens than a minute lets through."""
    limits: dict[str, Any] = {kind: Limits(tokens_per_day=day, tokens_per_minute=300)}

    refused = await quotas.open(request_of(clock, times=5, **limits))

    assert isinstance(refused, RefusedHold)
    assert (refused.limit, refused.headroom.tokens) == (LimitName.TOKENS_PER_DAY, min(day, 300))
    fits = await quotas.open(request_of(clock, times=min(day, 300) // TOKENS, **limits))
    assert isinstance(fits, Hold)


@every_limit
@every_scope
async def test_a_refused_request_consumes_nothing(
    quotas: LimitedQuotas, clock: SetClock, limit: LimitName, kind: str
) -> None:
    """However often one asks in vain, all other limits of both scopes stay as they were: once the one in the way is
    lifted there is room for one call more, and no further."""
    held = [await quotas.open(ask(clock, limit, kind, beside=ROOM_FOR_THREE)) for _ in range(2)]
    before = await drawn(quotas)

    for _ in range(20):
        await refusal(quotas, ask(clock, limit, kind, beside=ROOM_FOR_THREE))

    assert all(isinstance(hold, Hold) for hold in held)

    async def is_as_before() -> bool:
        after = await drawn(quotas)
        return all(after[scope] <= before[scope] for scope in before)

    await until_found(is_as_before)  # what was drawn for a call that its minute refused goes back soon
    both: dict[str, Any] = {"team": ROOM_FOR_THREE, "key": ROOM_FOR_THREE}
    third = await quotas.open(request_of(clock, **both))
    assert isinstance(third, Hold), third
    await refusal(quotas, request_of(clock, **both))
    assert len(quotas.leases.holding.calls) == 3


@every_limit
async def test_500_callers_at_once_share_a_cap_of_100_to_the_last(
    database: Database, redis: Redis, clock: SetClock, limit: LimitName
) -> None:
    """Through two gateways: a hundred are held and not one more, and what ends makes room for exactly as many."""
    unit = COST if "usd" in limit else TOKENS if "tokens" in limit else 1
    limits = Limits(**{limit.value.replace("usd_", "nanousd_"): 100 * unit})
    async with AsyncExitStack() as stack:
        opened = [open_quotas(database, redis, clock, name, living=2) for name in "ab"]
        gateways = [await stack.enter_async_context(each) for each in opened]
        for gateway in gateways:
            hold = await gateway.open(request_of(clock, team=limits))
            assert isinstance(hold, Hold)
            gateway.release(hold)

        async def ask_all() -> list[tuple[Quotas, Hold | RefusedHold]]:
            turns = [gateways[number % 2] for number in range(500)]
            answers = await asyncio.gather(*(quotas.open(request_of(clock, team=limits)) for quotas in turns))
            return [pair for pair in zip(turns, answers, strict=True) if isinstance(pair[1], Hold)]

        held = await ask_all()
        for quotas, one in held[::3]:
            assert isinstance(one, Hold)
            quotas.release(one)
        again = await ask_all()

        assert (len(held), len(again)) == (100, 34)
        if limit in BUDGETS:
            assert (await drawn(gateways[0]))["team:team_a", limit is LimitName.TOKENS_PER_DAY] == 100 * unit


@every_limit
async def test_a_keys_own_limit_stops_that_key_alone(quotas: Quotas, clock: SetClock, limit: LimitName) -> None:
    """Another key of the team has the team's headroom; the tighter key is told that it is its own."""
    for _ in range(2):
        await quotas.open(ask(clock, limit, "key"))

    error = await refusal(quotas, ask(clock, limit, "key"))
    other = await quotas.open(ask(clock, limit, "key", key_id="key_b"))

    assert "this key" in error.message
    assert isinstance(other, Hold)


async def test_what_a_minute_gets_back_is_room_at_once(quotas: Quotas, clock: SetClock) -> None:
    """Calls are held at their most and settled at what they used: the difference may be held by the next."""
    limit = LimitName.TOKENS_PER_MINUTE
    answers = []
    for _ in range(29):
        answers.append(await spend(quotas, ask(clock, limit, "team"), tokens=6, cost=1))
        clock.move(0.5)

    assert all(isinstance(hold, Hold) for hold in answers)  # 28 × 6 + 100 tokens are 268 of 299
    assert isinstance(await quotas.open(ask(clock, limit, "team")), Hold)
    assert isinstance(await quotas.open(ask(clock, limit, "team")), RefusedHold)


@pytest.mark.parametrize(
    ("limit", "last_second"),
    [
        (LimitName.TOKENS_PER_DAY, datetime(2026, 4, 5, 23, 59, 59, tzinfo=UTC)),
        (LimitName.USD_PER_DAY, datetime(2026, 4, 5, 23, 59, 59, tzinfo=UTC)),
        (LimitName.USD_PER_MONTH, datetime(2026, 4, 30, 23, 59, 59, tzinfo=UTC)),
        (LimitName.USD_PER_MONTH, datetime(2026, 12, 31, 23, 59, 59, tzinfo=UTC)),
    ],
)
@every_scope
async def test_a_new_period_opens_at_midnight(
    quotas: Quotas, clock: SetClock, limit: LimitName, last_second: datetime, kind: str
) -> None:
    """The first request of the new day or month (UTC) has all of its headroom; what still runs belongs to the old."""
    clock.time = last_second.timestamp()
    await spend(quotas, ask(clock, limit, kind))
    running = await quotas.open(ask(clock, limit, kind))
    assert isinstance(running, Hold)
    before = await quotas.open(ask(clock, limit, kind))
    clock.move(1.0)

    after = [await quotas.open(ask(clock, limit, kind)) for _ in range(2)]
    quotas.settle(running, Settlement(Usage(TOKENS), COST))
    error = await refusal(quotas, ask(clock, limit, kind))

    assert isinstance(before, RefusedHold)
    assert all(isinstance(hold, Hold) for hold in after)
    assert error.code == "rate_limit_exceeded"  # held by the two of today: yesterday's settlement is yesterday's


async def test_a_month_is_not_over_at_midnight(quotas: LimitedQuotas, clock: SetClock) -> None:
    """Only the day's limits open again."""
    spent = [await spend(quotas, ask(clock, LimitName.USD_PER_MONTH, "team")) for _ in range(2)]
    rows = [make_record(hold.request.request_id, owner=hold.owner, cost_nanousd=COST) for hold in spent]
    async with quotas.database.begin() as connection:
        await insert_records(connection, rows, today=clock.today())
    clock.move(86_400)

    error = await refusal(quotas, ask(clock, LimitName.USD_PER_MONTH, "team"))

    assert error.code == "insufficient_quota"


@every_scope
async def test_headers_say_what_is_left_of_both_minutes(quotas: Quotas, clock: SetClock, kind: str) -> None:
    """On answers and on refusals alike; a duration is written as Go writes it."""
    limits: dict[str, Any] = {kind: Limits(requests_per_minute=2, tokens_per_minute=1_000)}
    first = await quotas.open(request_of(clock, **limits))
    second = await quotas.open(request_of(clock, **limits))
    third = await quotas.open(request_of(clock, **limits))

    assert isinstance(third, RefusedHold)
    assert [rate_limit_headers(each) for each in (first, second, third)] == [
        {
            "x-ratelimit-limit-requests": "2",
            "x-ratelimit-remaining-requests": requests,
            "x-ratelimit-reset-requests": "1m0s",
            "x-ratelimit-limit-tokens": "1000",
            "x-ratelimit-remaining-tokens": tokens,
            "x-ratelimit-reset-tokens": "1m0s",
        }
        for requests, tokens in (("1", "900"), ("0", "800"), ("0", "800"))
    ]


def ask(
    clock: SetClock,
    limit: LimitName,
    kind: str,
    *,
    key_id: str = "key_a",
    times: int = 1,
    beside: Limits = NO_LIMITS,
) -> HoldRequest:
    """Return a request under a limit with room for two like it, and ``beside`` it others; ``times`` makes it larger."""
    limits = dict.fromkeys(("team", "key"), beside)
    if key_id == "key_a" or kind == "team":
        two = ROOM_FOR_TWO[limit]
        limits[kind] = replace(beside, **{name: getattr(two, name) for name in two.__struct_fields__
                                          if getattr(two, name) is not None})  # fmt: skip
    return request_of(clock, key_id=key_id, times=times, **limits)


def request_of(
    clock: SetClock, *, team: Limits | None = None, key: Limits | None = None, key_id: str = "key_a", times: int = 1
) -> HoldRequest:
    """Return a request for a hold under these limits."""
    return HoldRequest(
        request_id=clock.new_id(),
        team_id="team_a",
        scopes=(Scope("team", "team_a", team or Limits()), Scope("key", key_id, key or Limits())),
        legs=(Leg("dear", times * TOKENS, times * COST), Leg("cheap", TOKENS // 2, COST // 2)),
    )


async def drawn(quotas: LimitedQuotas) -> dict[tuple[str, bool], int]:
    """Return what is drawn of today's balances: by scope, and whether it is of tokens."""
    query = text("SELECT scope, unit = 'tokens', drawn FROM balances WHERE length(period) = 10")
    async with quotas.database.begin() as connection:
        return {(scope, of_tokens): drawn for scope, of_tokens, drawn in await connection.execute(query)}


async def spend(quotas: Quotas, request: HoldRequest, *, tokens: int = TOKENS, cost: int = COST) -> Hold:
    """Hold what must have room, and use it."""
    hold = await quotas.open(request)
    assert isinstance(hold, Hold)
    quotas.settle(hold, Settlement(Usage(tokens), cost))
    return hold


async def refusal(quotas: Quotas, request: HoldRequest) -> ServiceError:
    """Return the error that a request gets which must be refused."""
    refused = await quotas.open(request)
    assert isinstance(refused, RefusedHold)
    return refusal_error(refused)
