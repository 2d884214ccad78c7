# Which owners of calls are cut off from a store: what they did last is in one book only. A process that cannot reach
# Postgres keeps rows that the counters know; one that cannot reach Redis keeps settlements of rows in the ledger.

from __future__ import annotations

import asyncio
import time
from datetime import datetime, timedelta

from msgspec import Struct
from sqlalchemy import text

from billing.edges import Database
from billing.flusher import REPORT_EVERY
from billing.sweep import LOST_AFTER

SILENT = 2 * REPORT_EVERY  # seconds since an owner's last report
OVERDUE = 1.2 * REPORT_EVERY  # seconds in which every owner that reaches Postgres reports
LOOK_EVERY = 0.5  # seconds


class CutOff(Struct, frozen=True, kw_only=True):
    """An owner that does not report, or has something that the counters have yet to hear of."""

    owner: str
    carried: datetime  # its calls from before this moment are in the ledger
    seen: datetime  # when it last reported
    unsettled: int  # calls that the counters had yet to hear of


async def owners_cut_off(database: Database, silent: float = SILENT) -> list[CutOff]:
    """Return the owners that are cut off, or dead, for ``silent`` seconds; not those that are lost for an hour."""
    times = {"silent": timedelta(seconds=silent), "lost": timedelta(seconds=LOST_AFTER)}
    async with database.begin() as connection:
        return [CutOff(**row) for row in (await connection.execute(FIND, times)).mappings()]


async def wait_for_reports(database: Database) -> list[CutOff]:
    """Wait until every owner has reported and has nothing to settle; return those that are cut off."""
    began = time.monotonic()
    while True:
        waited = time.monotonic() - began
        found = await owners_cut_off(database, waited)
        if not found or waited >= OVERDUE:
            return found
        await asyncio.sleep(LOOK_EVERY)


FIND = text("""
    SELECT id AS owner, watermark AS carried, seen_at AS seen, unsettled
    FROM flushers
    WHERE unsettled > 0
       OR (seen_at < clock_timestamp() - CAST(:silent AS interval)
           AND seen_at >= clock_timestamp() - CAST(:lost AS interval))
    ORDER BY id
""")
