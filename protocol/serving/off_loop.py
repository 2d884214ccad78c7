# Work on long bodies leaves the event loop. Threads that compute take the interpreter from each other and from the
# loop, so more of them would make none quicker: one does what long prompts need, in turn, and one what the few huge
# bodies do, each of which may take it a second. Libraries that let the interpreter go run in as many as there are.

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

HEAVY = 64 * 1024  # bytes; as many are decoded in a millisecond or a few, which is more than a thread costs
HUGE = 1024 * 1024  # bytes; more than nearly all models read

T = TypeVar("T")

_long, _huge = ThreadPoolExecutor(1, "long-bodies"), ThreadPoolExecutor(1, "huge-bodies")  # begun with their first work


async def off_loop(size: int, work: Callable[[], T]) -> T:
    """Return the result of ``work`` on ``size`` bytes: done at once where they are few, else beside the event loop."""
    if size <= HEAVY:
        return work()
    return await asyncio.get_running_loop().run_in_executor(_long if size <= HUGE else _huge, work)


async def in_parallel(size: int, least: int, work: Callable[[], T]) -> T:
    """Return the result of ``work``, nearly all of it a library's that lets the interpreter go (zlib, ciphers,
    tokenizers): done at once below ``least``, in whatever unit ``size`` is, else beside the event loop and others."""
    return work() if size < least else await asyncio.to_thread(work)
