# The books of teams for whoever may not wait for Redis: what cannot be said now is said later, in the epoch in which it
# counts. While Redis does not answer, or its books are not ours, this process stands alone.

from __future__ import annotations

import asyncio
from itertools import islice

import structlog
from redis.asyncio import Redis

from billing.edges import Clock
from billing.epochs import DEADLINE
from billing.quota_verbs import Said, Words
from billing.store_errors import REDIS_AWAY, redis_refuses
from billing.team_books import TeamBooks

AWAY = 1.0  # seconds between tries while Redis does not answer
MOST = 256  # words in one go

log = structlog.get_logger(__name__)


class PatientBooks(TeamBooks):
    """Team books that lose no word. Somebody has to bring them back: the guard, or without one they themselves."""

    def __init__(
        self, redis: Redis, clock: Clock, *, uses_server_time: bool = True, deadline: float = DEADLINE
    ) -> None:
        super().__init__(redis, clock, uses_server_time=uses_server_time, deadline=deadline)
        self.refused = 0  # commands that Redis refused for good: its counters lack them, and the audit will say so
        self.is_standalone = False
        self._unsaid: dict[str, Words] = {}  # request id -> what Redis has yet to hear of it
        self._returning: asyncio.Task[None] | None = None

    @property
    def unsaid(self) -> int:
        """Calls of which Redis has yet to hear."""
        return len(self._unsaid)

    async def come_back(self) -> bool:
        """Say everything that Redis has yet to hear, then count in it again. False when it is still not ours."""
        while self._unsaid:
            batch = list(islice(self._unsaid.items(), MOST))
            said = await asyncio.gather(*(self._speak(words, self.epoch) for _, words in batch), return_exceptions=True)
            for (request_id, words), code in zip(batch, said, strict=True):
                if isinstance(code, BaseException):
                    if not isinstance(code, REDIS_AWAY):
                        raise code
                    self._failed(code, request_id)
                    if not redis_refuses(code):
                        return False
                elif code in (Said.UNKNOWN, Said.STALE):
                    self._estranged(words.team_id, code)
                    return False
                if self._unsaid.get(request_id) is words:
                    del self._unsaid[request_id]
        if self.is_standalone:
            log.info("quotas_in_redis", epoch=self.epoch)
        self.is_standalone = False
        return True

    def _turn_to(self, epoch: str) -> None:
        """Count in another epoch from now on, standing alone. What was still to be said in older ones is forgotten."""
        self.epoch, self.is_standalone = epoch, True
        self._unsaid.clear()

    async def _say(self, words: Words, epoch: str) -> None:
        """Tell Redis now, or as soon as it can be reached. Nobody needs to hear it in a later epoch."""
        if epoch != self.epoch:
            return
        if not self.is_standalone:
            try:
                code = await self._speak(words, epoch)
            except REDIS_AWAY as exc:
                self._failed(exc, words.request_id)
                if redis_refuses(exc):
                    return
            else:
                if code not in (Said.UNKNOWN, Said.STALE) or epoch != self.epoch:
                    return
                self._estranged(words.team_id, code)
        if epoch == self.epoch:
            self._say_later(words)

    def _say_later(self, words: Words) -> None:
        self._unsaid[words.request_id] = words
        if self._guard is None:
            self._return_soon()

    def _estranged(self, team_id: str, code: int) -> None:
        """Redis's books are not of our epoch: stand alone until the guard has seen to it."""
        reason = Said(code).name.lower()
        if not self.is_standalone:
            log.warning("epoch_lost", team_id=team_id, epoch=self.epoch, books=reason)
        self._stand_alone(reason)

    def _failed(self, exc: BaseException, request_id: str) -> None:
        """Note what a failed call tells of Redis: that it is away, or that it is there and refuses this command."""
        if redis_refuses(exc):
            self.refused += 1
            log.error("redis_refused", request_id=request_id, error=repr(exc))
            return
        if not self.is_standalone:
            log.error("redis_lost", error=repr(exc))
        self._stand_alone("redis_lost")

    def _stand_alone(self, reason: str) -> None:
        self.is_standalone = True
        if self._guard is None:
            self._return_soon()
        else:
            self._guard.alarm(reason)

    def _return_soon(self) -> None:
        if self._returning is None or self._returning.done():
            self._returning = asyncio.create_task(self._return())

    async def _return(self) -> None:
        """Without a guard: try to come back until it works."""
        while self.is_standalone or self._unsaid:
            try:
                await self._speak(Words("ping", "", ""), "")
            except REDIS_AWAY as exc:
                self._failed(exc, "")
                await asyncio.sleep(AWAY)
                continue
            if not await self.come_back():
                await asyncio.sleep(AWAY)
