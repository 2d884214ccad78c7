# What all share who listen to streams of responses in the background: one look into Postgres, for all of a process.

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence

import structlog

from billing.core.store_errors import POSTGRES_AWAY
from gateway.idempotency.stored_answers import Place

EVERY = 0.2  # seconds between looks
AWAY = 2.0  # seconds more, where Postgres does not answer

Asked = tuple[Place, int]  # a response, and the last event that is known of it
Find = Callable[[Sequence[Asked]], Awaitable[Iterable[int]]]  # the places of those with news

log = structlog.get_logger(__name__)


class EventWatch:
    """Tells who waits when there is news of a stream; while none waits, nothing is looked for."""

    def __init__(self, find: Find, every: float = EVERY, away: float = AWAY) -> None:
        self._find, self._every, self._away = find, every, away
        self._waiting: dict[asyncio.Future[None], Asked] = {}
        self._looking: asyncio.Task[None] | None = None

    async def news(self, place: Place, after: int) -> None:
        """Return once ``find`` has news of a response after an event. Raises what it raises, but for a Postgres that is
        away: then this waits on."""
        future = asyncio.get_running_loop().create_future()
        self._waiting[future] = place, after
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look())
        try:
            await future
        finally:
            del self._waiting[future]

    async def _look(self) -> None:
        await asyncio.sleep(self._every)
        while waiting := list(self._waiting.items()):
            try:
                for number in await self._find([asked for _, asked in waiting]):
                    if not (future := waiting[number][0]).done():
                        future.set_result(None)
            except POSTGRES_AWAY as exc:
                log.warning("background_events_not_read", listeners=len(waiting), error=repr(exc))
                await asyncio.sleep(self._away)
            except Exception as exc:
                for future, _ in waiting:
                    if not future.done():
                        future.set_exception(exc)
            await asyncio.sleep(self._every)
