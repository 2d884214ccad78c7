# A day of ten million rows, audited: how long it takes, how many books it compares, and how long the event loop, on
# which calls are served meanwhile, stands still. Takes some minutes and 5 GB of disk.

from __future__ import annotations

import asyncio
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable
from datetime import date

import pytest
from sqlalchemy import text

import migrations
from billing.ledger.partitions import ensure_partitions
from billing.upkeep.audit import Report, audit
from gateway.core.clock import Clock
from gateway.storage.database import Database
from tests.soak.test_large_ledger import CALLS, SUMMED
from tests.support.temporary_stores import temporary_postgres

ROWS = int(os.environ.get("TOLLGATE_SOAK_ROWS", "10000000"))
AT_ONCE = 500_000  # rows in one statement of those that make the day
NEEDED = 900 * ROWS  # bytes of disk, generously
HELD = 0.5  # seconds that the loop may stand still, on a machine that others use, too


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_day_of_ten_million_calls_is_audited_beside_calls(record_property: Callable[[str, object], None]) -> None:
    """The loop goes on, the books agree, and one nano-dollar too much in them is found."""
    if shutil.disk_usage(tempfile.gettempdir()).free < NEEDED:
        pytest.skip(f"SKIPPED: {NEEDED / 1e9:.0f} GB of disk are needed")
    with temporary_postgres(on_disk=True) as server:
        migrations.upgrade(server.url)
        measured, found = asyncio.run(measure(server.url))
    measured["load"] = " ".join(f"{each:.1f}" for each in os.getloadavg())
    measured["machine"] = f"{os.cpu_count()} cores ({platform.machine()})"
    for name, value in measured.items():
        record_property(name, value)
        print(f"| {name} | {value} |")

    assert measured["differences"] == 0
    assert measured["books"] > 1000
    assert measured["longest hold of the loop, s"] < HELD
    differ = [(one.book, one.quantity, one.expected, one.found) for one in found.differences]
    assert differ == [("statements", "gpu_cost_nanousd", 0, 1)]


async def measure(url: str) -> tuple[dict[str, float | str], Report]:
    """Make the day, audit it, and audit it again with one figure changed."""
    database, day = Database(url), Clock().today()
    began = time.perf_counter()
    await generate(database, day)
    measured: dict[str, float | str] = {"rows": ROWS, "seconds to make them": round(time.perf_counter() - began)}
    held = asyncio.create_task(watch())
    began, worked = time.perf_counter(), time.process_time()
    report = await audit(database, day)
    measured |= {
        "seconds of the audit": round(time.perf_counter() - began, 1),
        "seconds of the process's CPU": round(time.process_time() - worked, 3),
        "books": report.books,
        "differences": len(report.differences),
    }
    held.cancel()
    measured["longest hold of the loop, s"] = round(max(await held), 4)
    async with database.begin() as connection:
        await connection.execute(
            text("UPDATE usage_daily SET gpu_cost_nanousd = 1 WHERE day = :day AND team_id = 'team_7' AND ctid = ("
                 "SELECT min(ctid) FROM usage_daily WHERE day = :day AND team_id = 'team_7')"), {"day": day}
        )  # fmt: skip
    found = await audit(database, day)
    await database.close()
    return measured, found


async def watch() -> list[float]:
    """Return how much longer than asked for each sleep of five milliseconds took, until cancelled."""
    late = [0.0]
    try:
        while True:
            began = time.perf_counter()
            await asyncio.sleep(0.005)
            late.append(time.perf_counter() - began - 0.005)
    except asyncio.CancelledError:
        return late


async def generate(database: Database, day: date) -> None:
    """Make the day's rows, their sums, and leases and balances that have spent them."""
    async with database.begin() as connection:
        await ensure_partitions(connection, day)
    calls = str(CALLS).replace("(n - :first) * 3000 % 86400000", f"CAST(n AS bigint) * 86400000 / {ROWS}")
    rows = [
        calls.replace(":first", f"{first}").replace(":last", f"{min(ROWS, first + AT_ONCE) - 1}")
        for first in range(0, ROWS, AT_ONCE)
    ]
    for statement in (*rows, str(SUMMED), LEASES, BALANCES, "ANALYZE"):
        async with database.begin() as connection:
            await connection.execute(text("SET LOCAL statement_timeout = 0"))
            raw = (await connection.get_raw_connection()).driver_connection
            assert raw is not None
            await raw.execute(statement.replace(":day", f"DATE '{day}'"), timeout=600)


LEASES = """
    INSERT INTO leases (owner, scope, unit, day, granted, spent)
    SELECT 'host:1', scope.name, unit.name, day, sum(unit.amount), sum(unit.amount)
    FROM usage_daily,
         LATERAL (VALUES ('team:' || team_id), ('key:' || key_id)) AS scope (name),
         LATERAL (VALUES ('tokens', input_tokens + output_tokens), ('nanousd', cost_nanousd)) AS unit (name, amount)
    WHERE status = 'answered' GROUP BY scope.name, unit.name, day
"""
BALANCES = """
    INSERT INTO balances (scope, unit, period, drawn)
    SELECT scope, unit, to_char(day, part.shape), granted
    FROM leases, (VALUES ('YYYY-MM-DD'), ('YYYY-MM')) AS part (shape)
    WHERE unit = 'nanousd' OR part.shape = 'YYYY-MM-DD'
"""
