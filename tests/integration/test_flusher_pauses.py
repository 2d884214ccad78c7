# A paused flusher: between an owner's snapshot and the reading of the sums no row reaches the ledger, whoever writes.

from __future__ import annotations

import asyncio
from pathlib import Path

from billing.flusher import Flusher
from billing.journal import Journal
from gateway.database import Database
from tests.support.clock import SetClock


async def test_a_pause_waits_for_rows_that_are_being_written(database: Database, tmp_path: Path) -> None:
    """Whoever writes a row beside the flusher has closed its call before the pause begins."""
    flusher = Flusher(Journal.open(tmp_path, clock=SetClock()), database, SetClock())
    told: list[str] = []

    async def pause() -> None:
        async with flusher.paused():
            told.append("paused")

    async with flusher.writing(), flusher.writing():
        pausing = asyncio.create_task(pause())
        await asyncio.sleep(0.01)
        told.append("written")
    told.append("closed")
    await pausing

    assert told == ["written", "closed", "paused"]


async def test_rows_wait_for_the_end_of_a_pause(database: Database, tmp_path: Path) -> None:
    """A row that comes while the sums are read is written after them, even if another pause follows at once."""
    flusher = Flusher(Journal.open(tmp_path, clock=SetClock()), database, SetClock())
    told: list[str] = []

    async def write() -> None:
        async with flusher.writing():
            told.append("written")

    async with flusher.paused():
        writing = asyncio.create_task(write())
        await asyncio.sleep(0.01)
        told.append("paused")
    async with flusher.paused():
        told.append("paused again")
    await writing

    assert told.index("paused") < told.index("written")
    assert len(told) == 3
