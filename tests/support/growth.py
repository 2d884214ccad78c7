# How the cost of work grows with what it is given: four times as much may take four times as long, not sixteen times.

from __future__ import annotations

import gc
import time
from collections.abc import Callable

from msgspec import Struct

ENOUGH = 0.002  # seconds of work whose growth can be told from noise
FIRST, LAST = 1_000, 64_000  # sizes at which work is measured, each four times the one before
MOST = 9.0  # times as long for four times as much: linear work has 4, some more where caches end; quadratic work has 16
TRIES = 5  # on a busy machine a slow run proves nothing, so the quickest of several counts

Work = Callable[[], object]


class Growth(Struct, frozen=True):
    """What work took, in seconds of this process, on so much and on four times as much."""

    size: int
    once: float
    four: float

    @property
    def is_linear(self) -> bool:
        return self.four < max(MOST * self.once, ENOUGH)


def growth_of(work_on: Callable[[int], Work], last: int = LAST) -> Growth:
    """Measure work at growing sizes, until it takes long enough to be judged; ``work_on`` prepares it."""
    found = Growth(FIRST, _seconds(work_on(FIRST), 1), _seconds(work_on(4 * FIRST), 1))
    while found.four < ENOUGH and 16 * found.size <= last:
        found = Growth(4 * found.size, found.four, _seconds(work_on(16 * found.size), 1))
    for _ in range(TRIES):
        if found.is_linear:
            break
        once, four = _seconds(work_on(found.size), 3), _seconds(work_on(4 * found.size), 3)
        found = Growth(found.size, min(found.once, once), min(found.four, four))
    return found


def _seconds(work: Work, times: int) -> float:
    found = []
    gc.disable()
    try:
        for _ in range(times):
            began = time.process_time()
            work()
            found.append(time.process_time() - began)
    finally:
        gc.enable()
    return min(found)
