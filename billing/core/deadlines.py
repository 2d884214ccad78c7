# Deadlines in the time that this process runs. One that was stopped (a debugger, a virtual machine that moved, a busy
# host) finds on going on that each of its deadlines has passed, and would throw away the answers that came meanwhile.

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

STEPS = 4  # a stop of any length costs one of them


@asynccontextmanager
async def running_timeout(seconds: float) -> AsyncIterator[None]:
    """Raise ``TimeoutError`` when the block has had so many seconds in which this process ran, to a quarter."""
    loop = asyncio.get_running_loop()
    timer: asyncio.TimerHandle

    def step(left: int) -> None:
        nonlocal timer
        if left:
            timer = loop.call_later(seconds / STEPS, step, left - 1)
        else:
            deadline.reschedule(loop.time())

    async with asyncio.timeout(None) as deadline:
        timer = loop.call_later(seconds / STEPS, step, STEPS - 1)
        try:
            yield
        finally:
            timer.cancel()
