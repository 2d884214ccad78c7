# What becomes of a provider where teams' own keys fail: nothing, to all others.

from __future__ import annotations

import pytest
from redis.asyncio import Redis

from gateway.core.background import Background
from gateway.core.settings import BreakerPolicy, ProviderSettings
from gateway.upstreams.registry import ProviderRegistry
from gateway.upstreams.resilience.breaker import State
from gateway.upstreams.resilience.breakers import Breakers
from gateway.upstreams.resilience.keys import TargetAway
from gateway.upstreams.wire.errors import UpstreamBusy, UpstreamError
from router.catalog.targets import Endpoint, Target, TeamKeys
from tests.support.clock import SetClock
from tests.support.house import model

US = Endpoint("us", "http://us/v1")
KEYS = {"mine": ("sk-mine", "sk-spare"), "theirs": ("sk-mine",)}
PROVIDER = ProviderSettings(
    name="upstream",
    format="openai",
    api_keys=("sk-common",),
    team_keys=KEYS,
    endpoints=(US,),
    breaker=BreakerPolicy(min_requests=4, failure_ratio=0.5),
)
COMMON, MINE, THEIRS = (Target(model("small"), US, own) for own in (None, TeamKeys("mine"), TeamKeys("theirs")))


@pytest.fixture
def breakers() -> Breakers:
    """Breakers that stand alone."""
    return Breakers(ProviderRegistry({"upstream": PROVIDER}), [COMMON], SetClock(), Background(), Redis(port=1))


async def fail(breakers: Breakers, target: Target, failure: UpstreamError | UpstreamBusy, team: str) -> str | None:
    permit = await breakers.enter(target)
    breakers.failed(permit, failure, team, 10)
    return permit.api_key


async def key_now(breakers: Breakers, target: Target) -> str | None:
    return (await breakers.enter(target)).api_key


@pytest.mark.parametrize("why", ["refused_key", "spend_cap", "rate_limited"])
async def test_a_key_rests_for_its_team_alone(breakers: Breakers, why: str) -> None:
    """Its team goes on with the next of its keys; the same key in other hands, and the deployment's, go on."""
    used = await fail(breakers, MINE, UpstreamBusy("", outcome=why, retry_after=30), "mine")
    keys = [await key_now(breakers, target) for target in (MINE, THEIRS, COMMON)]

    assert (used, keys) == ("sk-mine", ["sk-spare", "sk-mine", "sk-common"])
    assert not breakers.health() and not breakers.count_refused_keys()["upstream", why]


async def test_a_team_whose_keys_are_all_at_their_limit_is_away_and_no_other(breakers: Breakers) -> None:
    """It is told for how long; the target stays well for all who are asked otherwise."""
    for _ in range(2):
        await fail(breakers, MINE, UpstreamBusy("", retry_after=30), "mine")
    away = breakers.why_away(MINE)
    with pytest.raises(TargetAway):
        await breakers.enter(MINE)

    assert away is not None and away.is_busy and breakers.why_away(COMMON) is None
    assert breakers.health(lambda target: [MINE]).keys() == {COMMON.key} and not breakers.health()


async def test_what_one_team_meets_with_its_own_key_opens_no_breaker(breakers: Breakers) -> None:
    """Its account may be ill; two teams that meet the same speak for all."""
    for _ in range(20):
        await fail(breakers, MINE, UpstreamError("", outcome="status_500"), "mine")
    [(_, alone)] = breakers.states()
    for _ in range(2):
        await fail(breakers, THEIRS, UpstreamError("", outcome="status_500"), "theirs")
    [(_, together)] = breakers.states()

    assert (alone, together) == (State.CLOSED, State.OPEN)


async def test_no_key_shows_in_what_may_be_logged(breakers: Breakers) -> None:
    """Leave to ask, a target and the names of what rests."""
    permit = await breakers.enter(MINE)
    breakers.failed(permit, UpstreamError("", outcome="refused_key"), "mine", 10)

    assert "sk-" not in repr(permit) + repr(MINE) + str(breakers.health(lambda target: [MINE]))
