# How long a closed call waits for its row beside a slow database, in made-up time.

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import pytest

from billing.core.edges import Database
from billing.core.records import UsageRecord
from billing.journal.journal import Journal
from billing.quotas.leases import Leases
from billing.upkeep.flusher import GATHER_MOST, Flusher
from tests.simulation.loop import VirtualLoop
from tests.support.clock import SetClock
from tests.support.factories import make_record

EVERY = 0.1  # seconds between calls
CALLS = 100


class SlowFlusher(Flusher):
    """Its transactions take as long as it is told."""

    takes = 0.0

    def __init__(self, journal: Journal, clock: SetClock) -> None:
        leases = Leases(None, clock, "o", share=1.0)  # type: ignore[arg-type]
        leases.living = 200
        super().__init__(journal, cast(Database, None), clock, leases)
        self.began: list[float] = []
        self.written: dict[str, float] = {}

    async def _write(self, records: Sequence[UsageRecord], stuck: set[str]) -> set[str]:
        loop = asyncio.get_running_loop()
        self.began.append(loop.time())
        await asyncio.sleep(self.takes)
        self.written |= {record.request_id: loop.time() for record in records}
        return set()


@pytest.mark.parametrize("takes", [0.01, 0.8])
def test_a_row_waits_for_one_flush_beside_its_own(tmp_path: Path, takes: float) -> None:
    """And not again for others to share a transaction, which it did while that one ran. So many owners still flush no
    more often than that each waits for others."""
    clock, closed = SetClock(), dict[str, float]()
    flusher = SlowFlusher(Journal.open(tmp_path, clock=clock), clock)
    flusher.takes = takes

    async def make_calls() -> None:
        flushing = asyncio.create_task(flusher.run())
        for _ in range(CALLS):
            record = make_record(request_id=clock.new_id())
            flusher._journal.opened(record)
            flusher._journal.closed(record)
            closed[record.request_id] = asyncio.get_running_loop().time()
            await asyncio.sleep(EVERY)
        await asyncio.sleep(2 * takes + GATHER_MOST)
        flushing.cancel()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(make_calls())

    late = [flusher.written[request_id] - moment for request_id, moment in closed.items()]
    assert len(late) == CALLS and max(late) <= max(takes, GATHER_MOST) + takes + 0.001
    assert len(flusher.began) <= CALLS * EVERY / GATHER_MOST + 2
