# Small pieces of work that outlive the request that caused them, finished before the process ends.

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from contextlib import suppress
from typing import Any, TypeVar

import structlog

from protocol.serving.deadlines import running_timeout

T = TypeVar("T")

END_WITHIN = 1.0  # seconds for what was cancelled

log = structlog.get_logger()


class Background:
    """Runs coroutines and remembers them until they are done. A failure is logged, never raised."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run ``work`` soon, whatever becomes of the caller."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    async def drain(self, seconds: float) -> None:
        """Wait until everything is done, or ``seconds`` have passed; then cancel the rest and let it end."""
        await self._until_done(seconds)
        for task in self._tasks:
            task.cancel()
        await self._until_done(END_WITHIN)  # calls among them close their accounting

    async def _until_done(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with running_timeout(seconds):
                while self._tasks:  # what ends may have begun something new
                    await asyncio.wait(self._tasks)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("background_work_failed", error=repr(error), exc_info=error)


async def stop_all(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks until they have ended: libraries that are busy connecting may swallow a cancellation."""
    running = {task for task in tasks if not task.done()}
    while running:
        for task in running:
            task.cancel()
        _, running = await asyncio.wait(running, timeout=0.5)
