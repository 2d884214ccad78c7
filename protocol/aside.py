# Work on long bodies leaves the event loop. One thread does it, in turn: threads that compute take the interpreter from
# each other and from the loop, so a second one would make none of them quicker and everything else slower.

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

HEAVY = 64 * 1024  # bytes; as many are decoded in a millisecond or a few, which is more than a thread costs

T = TypeVar("T")

_worker = ThreadPoolExecutor(1, "heavy")  # its thread begins with its first work


async def aside(size: int, work: Callable[[], T]) -> T:
    """Return the result of ``work`` on ``size`` bytes: done at once where they are few, else beside the event loop."""
    return work() if size <= HEAVY else await asyncio.get_running_loop().run_in_executor(_worker, work)
