# Where work on bodies runs.

from __future__ import annotations

import asyncio
import threading

from protocol.serving.off_loop import HEAVY, HUGE, in_parallel, off_loop


async def test_work_on_few_bytes_is_done_at_once() -> None:
    """Handing it to a thread would cost more than the work."""
    assert await off_loop(HEAVY, threading.current_thread) is threading.current_thread()


async def test_a_huge_body_keeps_no_long_prompt_waiting() -> None:
    """Each has a thread of its own: one that is stuck in a huge body is not asked for a prompt."""
    is_done = threading.Event()
    huge = asyncio.create_task(off_loop(HUGE + 1, lambda: is_done.wait(20)))
    await asyncio.sleep(0)

    await off_loop(HUGE, is_done.set)
    assert await huge


async def test_work_of_libraries_runs_in_several_threads_at_once() -> None:
    """They let the interpreter go, so a second one need not wait for the first."""
    is_done = threading.Event()
    first = asyncio.create_task(in_parallel(8, 8, lambda: is_done.wait(20)))
    await asyncio.sleep(0)

    await in_parallel(8, 8, is_done.set)
    assert await first
    assert await in_parallel(7, 8, threading.current_thread) is threading.current_thread()
