# How the cost of work grows with what it is given: four times as much may take four times as long, not sixteen times.
# Both are measured over about as long a time, in turns: a machine that others keep busy slows both.

from __future__ import annotations

import gc
import time
from collections.abc import Callable

from msgspec import Struct

ENOUGH = 0.002  # seconds of work whose growth can be told from noise
SHORT = 0.05  # seconds in which a step, as from one cache to the next, can look like growth
FIRST, LAST = 1_000, 64_000  # sizes at which work is measured, each four times the one before
MOST = 2.5  # times as long for four times as much as for a quarter four times: linear work 1, quadratic work 4
CLEARLY = 1.5  # as long at most for work to be called linear by one run of each
TRIES = 8  # a slow run proves nothing, so the quickest of several counts

Work = Callable[[], object]


class Growth(Struct, frozen=True):
    """What work took, in seconds of this process: on so much, four times, and on four times as much."""

    size: int
    apart: float
    whole: float

    @property
    def is_linear(self) -> bool:
        return self.whole < max(MOST * self.apart, ENOUGH)


def growth_of(work_on: Callable[[int], Work], last: int = LAST) -> Growth:
    """Measure work at growing sizes, until it takes long enough to be judged; ``work_on`` prepares it."""
    size, whole = 4 * FIRST, work_on(4 * FIRST)
    taken = _seconds(whole, 1)
    while taken < ENOUGH and 4 * size <= last:
        size, whole = 4 * size, work_on(4 * size)
        taken = _seconds(whole, 1)
    if taken < ENOUGH:
        return Growth(size // 4, taken, taken)
    part = work_on(size // 4)
    once = 4 * _seconds(part, 1)
    if taken < CLEARLY * once:
        return Growth(size // 4, once, taken)
    found = Growth(size // 4, _seconds(part, 4), taken)
    for _ in range(TRIES):
        if found.is_linear:
            break
        apart, taken = _seconds(part, 4), _seconds(whole, 1)
        found = Growth(found.size, min(found.apart, apart), min(found.whole, taken))
    if found.is_linear or found.whole > SHORT:
        return found
    return _measured_longer(work_on, found)


def _measured_longer(work_on: Callable[[int], Work], found: Growth) -> Growth:
    """Measure again on four times as much. A step in the cost of memory is behind it; quadratic work grows on."""
    part, whole = work_on(4 * found.size), work_on(16 * found.size)
    tries = [(_seconds(part, 4), _seconds(whole, 1)) for _ in range(TRIES)]
    return Growth(4 * found.size, min(apart for apart, _ in tries), min(taken for _, taken in tries))


def _seconds(work: Work, times: int) -> float:
    """Return what it takes to do work so many times."""
    gc.disable()
    try:
        began = time.process_time()
        for _ in range(times):
            work()
        return time.process_time() - began
    finally:
        gc.enable()
