# Whose prompts are counted when. One count is computed at a time, others wait in the order that they came, and those
# for which there is no room are refused: all who count take one processor at the most from the engine's own requests.

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from protocol.errors import Overloaded

MOST_WAITING = 8 * 2**20  # bytes of bodies: a tokenizer reads some MB a second, and who counts waits for seconds
LEAST_SIZE = 4096  # bytes that a shorter one counts for

T = TypeVar("T")


class Counts:
    """The counts of one front."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._waiting = 0  # bytes
        self._running: asyncio.Task[Any] | None = None

    async def take(self, size: int, count: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Return what ``count`` of a body of ``size`` bytes comes to, in its turn. Raises ``Overloaded`` without room.

        If this is cancelled while it waits, nothing of it is begun. What has begun goes on to its end, before another
        begins: a thread cannot be stopped.
        """
        size = max(size, LEAST_SIZE)
        if self._waiting and self._waiting + size > MOST_WAITING:
            raise Overloaded(
                f"Prompts of {self._waiting:,} bytes wait to be counted by this engine, and no more than "
                f"{MOST_WAITING:,} may. Count again in a second, or take a token for every four bytes."
            )
        self._waiting += size
        try:
            await self._turn.acquire()
        finally:
            self._waiting -= size
        self._running = running = asyncio.create_task(count())
        running.add_done_callback(self._end)
        return await asyncio.shield(running)

    def _end(self, ended: asyncio.Task[Any]) -> None:
        self._turn.release()
        if not ended.cancelled():
            ended.exception()  # its client, if it is still there, is told
