# Answers in Redis, under keys of their own and within a bound of bytes. Redis only makes calls cheaper: what goes wrong
# there is a miss, and no call waits for it longer than a moment.

from __future__ import annotations

from importlib import resources

import structlog
from redis.asyncio import Redis

from gateway.cache.kept_answers import Place
from gateway.core.clock import Clock
from protocol.serving.deadlines import running_timeout

PREFIX = "tollgate:{cache}"
DEADLINE = 0.05  # seconds that a call waits for its answer
PUT_WITHIN = 0.25  # seconds, behind the calls
FORGOTTEN, FORGOTTEN_AT_ONCE = 50_000, 1000  # answers of a scope that goes: in all, and in one step of Redis
AWAY_AFTER = 3  # failures, one after the other: a busy moment is none
AWAY_FOR = 1.0  # seconds for which a Redis that did not answer is then left alone

SCRIPT = resources.files(__package__).joinpath("keep.lua").read_text()

log = structlog.get_logger(__name__)


class CacheStore:
    """The sealed answers of all gateways."""

    def __init__(self, redis: Redis, clock: Clock) -> None:
        self._redis = redis
        self._keep = redis.register_script(SCRIPT)
        self._clock = clock
        self._failures = 0  # since it last answered
        self._away_until = 0.0  # monotonic seconds

    @property
    def is_away(self) -> bool:
        """Whether Redis has just failed to answer, again and again."""
        return self._clock.monotonic() < self._away_until

    async def find(self, place: Place) -> bytes | None:
        """Return what is kept there, ``None`` where nothing is or Redis does not say."""
        if self.is_away:
            return None
        try:
            async with running_timeout(DEADLINE):
                found = await self._redis.get(f"{PREFIX}:answer:{place.scope}:{place.name}")
                self._failures = 0
                return found if isinstance(found, bytes) else None
        except Exception as exc:  # the library raises anything where an answer makes no sense
            self._note_away(exc)
            return None

    async def keep(self, place: Place, sealed: bytes, *, ttl: float, most: int) -> bool:
        """Keep an answer for ``ttl`` seconds, all of them together within ``most`` bytes; return whether it is kept.

        The oldest answers of the scope that has most make room.
        """
        if self.is_away:
            return False
        try:
            async with running_timeout(PUT_WITHIN):
                said: list[str | bytes | int] = [place.scope, place.name, sealed, round(ttl * 1000), most]
                return bool(await self._keep(keys=[PREFIX], args=said))
        except Exception as exc:  # the library raises anything where an answer makes no sense
            self._note_away(exc)
            return False

    async def forget(self, scope: str) -> None:
        """Erase the answers of a scope, so many of them at the most; where Redis is away they end by themselves."""
        if self.is_away:
            return
        try:
            for _ in range(FORGOTTEN // FORGOTTEN_AT_ONCE):
                async with running_timeout(PUT_WITHIN):
                    kept = await self._redis.zrange(f"{PREFIX}:of:{scope}", 0, FORGOTTEN_AT_ONCE - 1)
                    if not kept:
                        return
                    names = [entry.partition(b":")[2].decode() for entry in kept if isinstance(entry, bytes)]
                    await self._redis.unlink(*(f"{PREFIX}:answer:{scope}:{name}" for name in names))
                    await self._redis.zrem(f"{PREFIX}:of:{scope}", *kept)
        except Exception as exc:
            self._note_away(exc)

    def _note_away(self, exc: Exception) -> None:
        self._failures += 1
        if self._failures >= AWAY_AFTER:
            self._away_until = self._clock.monotonic() + AWAY_FOR
            log.warning("cache_away", error=repr(exc))
