# Waiting for what is under way and cannot be awaited: looked for again and again, with patience enough for a machine
# that does ten other things. How fast it comes is a matter for benchmarks.

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

PATIENCE = 30.0  # seconds
SHORTEST_PAUSE, LONGEST_PAUSE = 0.003, 0.05  # seconds between two looks

T = TypeVar("T")


def until(look: Callable[[], T], within: float = PATIENCE) -> T:
    """Return what ``look()`` returns as soon as that is true; fail with the last of it after ``within`` seconds."""
    deadline, pause = time.monotonic() + within, SHORTEST_PAUSE
    while not (seen := look()):
        assert time.monotonic() < deadline, f"it did not come about within {within:g} s: {seen!r}"
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)
    return seen


async def until_found(look: Callable[[], Awaitable[T]], within: float = PATIENCE) -> T:
    """The same, of what has to be asked for."""
    deadline, pause = time.monotonic() + within, SHORTEST_PAUSE
    while not (seen := await look()):
        assert time.monotonic() < deadline, f"it did not come about within {within:g} s: {seen!r}"
        await asyncio.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)
    return seen
