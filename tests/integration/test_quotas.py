# Budgets and rates together, on a real Postgres and Valkey: a call is held in all of its limits or in none, and several
# processes with random calls never pass a cap.

from __future__ import annotations

import random
from contextlib import AsyncExitStack

import pytest
from redis.asyncio import Redis

from billing.core.holds import Hold, HoldRequest, Leg, LimitName, Limits, RefusedHold, Scope, Settlement
from gateway.storage.database import Database
from protocol.usage import Usage
from tests.support.clock import SetClock
from tests.support.limited import LimitedQuotas, open_quotas

CAP = 5_000  # tokens of a day


def ask(clock: SetClock, limits: Limits, *, tokens: int = 100, is_internal: bool = False) -> HoldRequest:
    """Return a request under a team's limits."""
    scopes = Scope("team", "team_a", limits), Scope("key", "key_a", Limits())
    return HoldRequest(
        request_id=clock.new_id(),
        team_id="team_a",
        scopes=scopes,
        legs=(Leg("a", tokens, 10),),
        is_internal=is_internal,
    )


async def test_what_a_rate_refuses_holds_no_budget(quotas: LimitedQuotas, clock: SetClock) -> None:
    """All or nothing, over Postgres and Redis too."""
    limits = Limits(requests_per_minute=1, tokens_per_day=1_000)
    first = await quotas.open(ask(clock, limits))
    assert isinstance(first, Hold)
    refused = await quotas.open(ask(clock, limits))

    assert isinstance(refused, RefusedHold)
    assert refused.limit is LimitName.REQUESTS_PER_MINUTE
    assert len(quotas.leases.holding.calls) == 1
    quotas.settle(first, Settlement(Usage(100), 10))
    clock.move(61)
    assert isinstance(await quotas.open(ask(clock, limits, tokens=900)), Hold)


async def test_shadow_traffic_counts_in_days_and_months_alone(quotas: LimitedQuotas, clock: SetClock) -> None:
    """What the house asks for a team takes nothing from its minute and no place among its calls."""
    limits = Limits(requests_per_minute=1, concurrent_requests=1, tokens_per_day=1_000)
    internal = [await quotas.open(ask(clock, limits, tokens=200, is_internal=True)) for _ in range(3)]

    assert all(isinstance(hold, Hold) for hold in internal)
    assert isinstance(await quotas.open(ask(clock, limits, tokens=400)), Hold)
    refused = await quotas.open(ask(clock, limits, tokens=100, is_internal=True))
    assert isinstance(refused, RefusedHold)
    assert refused.limit is LimitName.TOKENS_PER_DAY


@pytest.mark.parametrize("seed", range(3))
async def test_random_calls_of_three_processes_never_pass_a_cap(
    database: Database, redis: Redis, clock: SetClock, seed: int
) -> None:
    """Used and held stay within it after every call, and what is refused for good would not have fitted."""
    dice = random.Random(seed)
    limits = Limits(tokens_per_day=CAP)
    used, refusals, running = 0, 0, list[tuple[LimitedQuotas, Hold]]()
    async with AsyncExitStack() as stack:
        owners = [
            await stack.enter_async_context(open_quotas(database, redis, clock, name, living=3)) for name in "abc"
        ]
        for _ in range(120):
            if running and dice.random() < 0.5:
                quotas, hold = running.pop(dice.randrange(len(running)))
                tokens = dice.randrange(hold.request.tokens + 1)
                quotas.settle(hold, Settlement(Usage(tokens), 1))
                used += tokens
                continue
            quotas, request = dice.choice(owners), ask(clock, limits, tokens=dice.choice((10, 100, 700)))
            held = sum(hold.request.tokens for _, hold in running)
            answer = await quotas.open(request)
            if isinstance(answer, Hold):
                running.append((quotas, answer))
                assert used + held + request.tokens <= CAP
            else:
                refusals += 1
                assert not answer.is_settled or used + request.tokens > CAP
            clock.move(0.1)

    assert refusals
