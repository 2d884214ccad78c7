# Deadlines in the time that this process runs, whatever becomes of the task in them.

from __future__ import annotations

import asyncio
import gc

import pytest

from protocol.serving.deadlines import running_timeout


async def wait(seconds: float) -> None:
    """Wait for what never comes."""
    async with running_timeout(seconds):
        await asyncio.get_running_loop().create_future()


async def test_it_ends_what_takes_longer() -> None:
    """With TimeoutError, as asyncio's does."""
    with pytest.raises(TimeoutError):
        await wait(0.02)


async def test_what_is_done_in_time_is_left_alone() -> None:
    """And nothing of the deadline remains."""
    async with running_timeout(0.02):
        await asyncio.sleep(0)

    await asyncio.sleep(0.04)


def test_a_task_that_is_thrown_away_leaves_nothing() -> None:
    """A loop that is closed under it, as at the end of a process: its end waits for nothing, and is not told of."""
    loop = asyncio.new_event_loop()
    task = loop.create_task(wait(60))
    loop.run_until_complete(asyncio.sleep(0))
    coroutine = task.get_coro()
    loop.close()
    assert coroutine is not None

    coroutine.close()
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    del coroutine, task
    gc.collect()
