# Keys that keep breaking the content policy: paused everywhere, for as long as was said, and without Redis too.

from __future__ import annotations

import pytest
from redis.asyncio import Redis

from gateway.core.background import Background
from gateway.core.settings import AbuseSettings
from gateway.moderation.abuse import AbuseWatch
from tests.support.clock import SetClock

POLICY = AbuseSettings(blocks=4, window=60.0, pause=30.0)


def watch_of(redis: Redis, clock: SetClock) -> tuple[AbuseWatch, Background]:
    background = Background()
    watch = AbuseWatch(redis, clock, background)
    watch.follow(POLICY)
    return watch, background


async def test_gateways_add_up_what_they_block(redis: Redis, clock: SetClock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two here and two there pause the key at both, and another key at neither."""
    monkeypatch.setattr("gateway.moderation.abuse.DEADLINE", 10.0)  # a busy machine is no fault here
    one, ones = watch_of(redis, clock)
    other, others = watch_of(redis, clock)
    told: list[str] = []
    for _ in range(2):
        assert not told
        one.count("key_a", "team", lambda: told.append("one"))
        other.count("key_a", "team", lambda: told.append("other"))
        one.count("key_b", "team", lambda: told.append("key_b"))
        await ones.drain(5)
        await others.drain(5)
    await one.sync()
    await other.sync()

    assert len(told) == 1 and told != ["key_b"]  # whoever counted the fourth
    assert (one.pause_of("key_a"), other.pause_of("key_a")) == (30, 30)
    assert (one.pause_of("key_b"), other.pause_of("key_b")) == (0, 0)
    clock.move(31)
    await other.sync()
    assert other.pause_of("key_a") == 0 and not other.paused


async def test_a_gateway_alone_goes_by_what_it_saw(clock: SetClock) -> None:
    """Redis away: the fourth within the window pauses, a slow dripping does not."""
    away, background = watch_of(Redis(port=1), clock)
    told: list[str] = []
    for _ in range(3):
        away.count("key_a", "team", lambda: told.append("key_a"))
        clock.move(25)
    away.count("key_a", "team", lambda: told.append("key_a"))  # the first is 75 seconds old
    assert not told
    clock.move(5)

    away.count("key_a", "team", lambda: told.append("key_a"))
    assert told == ["key_a"]
    assert away.pause_of("key_a") == 30
    await background.drain(5)


async def test_a_deployment_may_pause_no_team(redis: Redis, clock: SetClock) -> None:
    """Zero blocks: any number is fine."""
    watch, _ = watch_of(redis, clock)
    watch.follow(AbuseSettings(blocks=0))

    for _ in range(100):
        watch.count("key_a", "team", pytest.fail)
    assert not watch.paused
