# Deadlines in the time that this process runs. One that was stopped (a debugger, a virtual machine that moved, a busy
# host) finds on going on that each of its deadlines has passed, and would throw away the answers that came meanwhile.

from __future__ import annotations

import asyncio
from types import TracebackType

STEPS = 4  # a stop of any length costs one of them


class running_timeout:
    """Raise ``TimeoutError`` when the block has had so many seconds in which this process ran, to a quarter."""

    def __init__(self, seconds: float) -> None:
        self._step_seconds = seconds / STEPS
        self._deadline = asyncio.timeout(None)

    async def __aenter__(self) -> None:
        self._loop = asyncio.get_running_loop()
        await self._deadline.__aenter__()
        self._step(STEPS)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._timer.cancel()
        await self._deadline.__aexit__(kind, error, traceback)

    def _step(self, left: int) -> None:
        if left:
            self._timer = self._loop.call_later(self._step_seconds, self._step, left - 1)
        else:
            self._deadline.reschedule(self._loop.time())
