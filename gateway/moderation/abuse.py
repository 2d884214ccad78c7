# Keys that keep breaking the content policy, or are used as never before, are paused. Every gateway counts what it
# blocks in Redis and asks each second which keys are paused; while Redis is away, each goes by what it saw itself.

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable
from typing import Any

import structlog
from redis.asyncio import Redis

from billing.core.store_errors import told_if_away
from billing.quotas.rate_wire import REDIS_AWAY
from gateway.core.background import Background
from gateway.core.clock import Clock
from gateway.core.settings import AbuseSettings
from protocol.serving.deadlines import running_timeout

PREFIX = "tollgate:{abuse}"
PAUSED = f"{PREFIX}:paused"  # a sorted set: key id, unix seconds until when
DEADLINE = 0.25  # seconds for any call to Redis
EVERY = 1.0  # seconds between looks

log = structlog.get_logger()


class AbuseWatch:
    """Counts blocked calls by key. ``paused``: unix seconds until when, by key id."""

    def __init__(self, redis: Redis, clock: Clock, background: Background) -> None:
        self.paused: dict[str, float] = {}
        self._redis = redis
        self._clock = clock
        self._background = background
        self._policy = AbuseSettings()
        self._seen: dict[str, deque[float]] = {}  # unix seconds of what was blocked here, by key id

    def follow(self, policy: AbuseSettings) -> None:
        """Go by another policy from now on."""
        if policy.blocks != self._policy.blocks:
            self._seen.clear()
        self._policy = policy

    def pause_of(self, key_id: str) -> int:
        """Return for how many whole seconds more a key is paused; 0: it is not."""
        return max(0, math.ceil(self.paused.get(key_id, 0.0) - self._clock.now()))

    def count(self, key_id: str, team_id: str, tell: Callable[[], None]) -> None:
        """Count a blocked or refused call of a key; ``tell`` is called where that pauses it, here or by what other
        gateways counted."""
        policy, now = self._policy, self._clock.now()
        if not policy.blocks:
            return
        seen = self._seen.setdefault(key_id, deque(maxlen=policy.blocks))
        seen.append(now)
        is_too_much = len(seen) == policy.blocks and now - seen[0] <= policy.window
        if is_too_much:
            self._pause(key_id, team_id, now + policy.pause, tell)
        self._background.spawn(self._share(key_id, team_id, now, tell))

    async def pause(self, key_id: str, team_id: str, seconds: float) -> None:
        """Pause a key at every gateway. Raises one of REDIS_AWAY."""
        until = self._clock.now() + seconds
        self._pause(key_id, team_id, until, lambda: None)
        async with running_timeout(DEADLINE):
            await self._redis.zadd(PAUSED, {key_id: until}, gt=True)

    async def run(self) -> None:
        """Learn of the pauses that other gateways made, for ever."""
        while True:
            await asyncio.sleep(EVERY)
            with told_if_away(log, "abuse_not_shared", errors=REDIS_AWAY):
                await self.sync()

    async def sync(self) -> None:
        """Take over which keys are paused. Raises one of REDIS_AWAY."""
        now = self._clock.now()
        async with running_timeout(DEADLINE):
            shared: Any = await self._redis.zrangebyscore(PAUSED, now, math.inf, withscores=True)
        for member, until in shared:
            key_id = member.decode() if isinstance(member, bytes) else member
            self.paused[key_id] = max(until, self.paused.get(key_id, 0.0))
        self.paused = {key_id: until for key_id, until in self.paused.items() if until > now}
        horizon = now - self._policy.window
        self._seen = {key_id: seen for key_id, seen in self._seen.items() if seen[-1] > horizon}

    async def _share(self, key_id: str, team_id: str, now: float, tell: Callable[[], None]) -> None:
        policy = self._policy
        counted = f"{PREFIX}:{key_id}"
        with told_if_away(log, "abuse_not_shared", errors=REDIS_AWAY):
            async with running_timeout(DEADLINE):
                async with self._redis.pipeline(transaction=True) as pipe:
                    pipe.zadd(counted, {self._clock.new_id(): now})
                    pipe.zremrangebyscore(counted, 0, now - policy.window)
                    pipe.zcard(counted)
                    pipe.expire(counted, math.ceil(policy.window))
                    count = (await pipe.execute())[2]
                if count >= policy.blocks:
                    self._pause(key_id, team_id, now + policy.pause, tell)
                if (until := self.paused.get(key_id, 0.0)) > now:
                    await self._redis.zadd(PAUSED, {key_id: until})
                    await self._redis.zremrangebyscore(PAUSED, 0, now)

    def _pause(self, key_id: str, team_id: str, until: float, tell: Callable[[], None]) -> None:
        if until - self.paused.get(key_id, 0.0) < 1.0:
            return
        self.paused[key_id] = until
        log.warning("key_paused", key_id=key_id, team=team_id, seconds=round(until - self._clock.now(), 1))
        tell()
