# A year's ledger of ten million rows: reports stay quick, the flusher keeps its speed, and a day goes at once.
# The table lands in benchmarks/results/. Takes some minutes and 6 GB of disk.

from __future__ import annotations

import asyncio
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

import migrations
from benchmarks.ledger import make_calls
from billing.journal.journal import Journal
from billing.ledger.ledger import ROLLUP_KEY, SUMS
from billing.ledger.partitions import drop_partition, ensure_partitions, partition_of
from billing.ledger.statement_queries import STATUSES, GroupBy, query_for
from billing.ledger.statements import period
from billing.upkeep.audit import audit
from billing.upkeep.flusher import Flusher
from gateway.core.clock import Clock
from gateway.reports.usage_period import Period
from gateway.reports.usage_report import usage_of
from gateway.storage.database import Database
from tests.support.temporary_stores import temporary_postgres

ROWS = int(os.environ.get("TOLLGATE_SOAK_ROWS", "10000000"))
DAYS = 366
TEAMS = 100
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
NEEDED = 900 * ROWS  # bytes of disk, generously

pytestmark = pytest.mark.soak


@pytest.mark.timeout(3600)
def test_a_year_of_ten_million_calls_answers_at_once() -> None:
    """The daily report stays below 50 ms, by index; the flusher above 5,000 rows/s; a day's rows go within a second."""
    if shutil.disk_usage(tempfile.gettempdir()).free < NEEDED:
        pytest.skip(f"SKIPPED: {NEEDED / 1e9:.0f} GB of disk are needed")
    with temporary_postgres(on_disk=True) as server:
        migrations.upgrade(server.url)
        measured = asyncio.run(measure(server.url))
    write_table(measured)

    assert measured["daily report"] < 0.050
    assert measured["GET /v1/usage of a day"] < 0.050
    assert measured["flusher, rows/s"] > 5000
    assert measured["partition dropped"] < 1.0


async def measure(url: str) -> dict[str, Any]:
    """Generate the ledger and return what was measured, times in seconds."""
    database = Database(url)
    today = Clock().today()
    first = today - timedelta(days=DAYS - 1)
    measured: dict[str, Any] = {}
    started = time.perf_counter()
    await generate(database, first)
    measured["rows generated"] = ROWS
    measured["seconds to generate"] = time.perf_counter() - started
    for name, query in (("rows", "usage_records"), ("lines of daily sums", "usage_daily")):
        async with database.begin() as connection:
            measured[name] = (await connection.execute(text(f"SELECT count(*) FROM {query}"))).scalar_one()
    async with database.begin() as connection:
        size = (await connection.execute(text("SELECT pg_database_size(current_database())"))).scalar_one()
    measured["MB on disk"] = size // 10**6

    days = iter([first + timedelta(days=(37 * number) % DAYS) for number in range(1000)])
    teams = iter([f"team_{(13 * number) % TEAMS}" for number in range(1000)])

    async def ask(question: Callable[[Any, str], Awaitable[Any]], times: int) -> float:
        taken = []
        for _ in range(times):
            async with database.begin() as connection:
                team = next(teams)
                began = time.perf_counter()
                await question(connection, team)
                taken.append(time.perf_counter() - began)
        return statistics.median(taken)

    async def daily(connection: Any, team: str) -> Any:
        day = next(days)
        return await period(connection, team, day, day)

    async def of_a_day(connection: Any, team: str) -> Any:
        day = next(days)
        return await usage_of(connection, team, Period(first=day, last=day), for_admin=False)

    measured["daily report"] = await ask(daily, 50)
    measured["GET /v1/usage of a day"] = await ask(of_a_day, 50)
    for group in (GroupBy.MODEL, GroupBy.DAY, GroupBy.KEY):
        measured[f"a year by {group.value}"] = await ask(
            lambda connection, team, group=group: period(connection, team, first, today, group), 9
        )
    measured["plan"] = await plan_of(database, "team_7", first + timedelta(days=100))
    measured["audit of a day"] = await ask(lambda *_: audit(database, first + timedelta(days=50)), 3)
    measured["flusher, rows/s"] = await flush_some(database, 20_000)
    began = time.perf_counter()
    async with database.begin() as connection:
        await drop_partition(connection, partition_of(first))
    measured["partition dropped"] = time.perf_counter() - began
    await database.close()
    return measured


async def generate(database: Database, first: date) -> None:
    """Fill the ledger a day at a time, and the sums by one GROUP BY."""
    per_day = ROWS // DAYS
    for number in range(DAYS):
        day = first + timedelta(days=number)
        last = (number + 1) * per_day - 1 if number < DAYS - 1 else ROWS - 1
        some = {"day": day, "first": number * per_day, "last": last}
        async with database.begin() as connection:
            if number == DAYS - 1:
                await ensure_partitions(connection, day)
            else:
                bounds = f"FROM ('{day}') TO ('{day + timedelta(days=1)}')"
                made = f"CREATE TABLE {partition_of(day)} PARTITION OF usage_records FOR VALUES {bounds}"
                await connection.execute(text(made))
            await connection.execute(CALLS, some)
            await connection.execute(SUMMED, {"day": day})
    for statement in ("ANALYZE usage_records", "ANALYZE usage_daily"):
        async with database.begin() as connection:
            await connection.execute(text("SET LOCAL statement_timeout = 0"))
            raw = (await connection.get_raw_connection()).driver_connection
            assert raw is not None
            await raw.execute(statement, timeout=600)


async def plan_of(database: Database, team: str, day: date) -> str:
    """Return how Postgres reads a daily report; it must find the lines by their key."""
    query = query_for(())
    asked = {"teams": [team], "first": day, "last": day, "most": 100, **STATUSES}
    async with database.begin() as connection:
        lines = (await connection.execute(text(f"EXPLAIN (ANALYZE, BUFFERS) {query.text}"), asked)).scalars().all()
    plan = "\n".join(lines)
    assert "Seq Scan on usage_daily" not in plan and "usage_daily_pkey" in plan, plan
    return plan


async def flush_some(database: Database, number: int) -> float:
    """Return the rows per second of a flusher whose calls are of today."""
    with tempfile.TemporaryDirectory() as folder:
        journal = Journal.open(Path(folder), clock=Clock())
        for record in make_calls(number):
            journal.closed(record)
        flusher = Flusher(journal, database, Clock())
        began = time.perf_counter()
        while await flusher.flush_once():
            pass
        seconds = time.perf_counter() - began
        journal.close()
    return number / seconds


def write_table(measured: dict[str, Any]) -> None:
    """Write what was measured where results are kept."""
    plan = measured.pop("plan")
    lines = [f"| {name} | {shown(value)} |" for name, value in measured.items()]
    load = [round(each, 1) for each in os.getloadavg()]
    page = (
        f"# A year's ledger, {date.today()}\n\n"
        f"`python -m pytest -m soak tests/soak/test_large_ledger.py` on {os.cpu_count()} cores ({platform.machine()}), "
        f"load average {load}, an embedded Postgres with 32 MB of shared buffers that does not wait for the disk. "
        f"{TEAMS} teams, {DAYS} days; medians of 50 reports, of 9 for a year.\n\n"
        "| what | measured |\n| --- | --- |\n" + "\n".join(lines) + "\n\n"
        f"How Postgres reads a daily report:\n\n```\n{plan}\n```\n"
    )
    print(page)
    if ROWS >= 10_000_000:
        (RESULTS / f"large-ledger-{date.today()}.md").write_text(page)


def shown(value: Any) -> str:
    """Return a count as it is, and a time in milliseconds."""
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value * 1000:.1f} ms" if value < 5 else f"{value:,.0f}"


CALLS = text(f"""
    INSERT INTO usage_records (day, request_id, team_id, key_id, endpoint, model_asked, model_used, provider,
        provider_endpoint, tier, priority, status, input_tokens, cached_input_tokens, cache_write_tokens,
        output_tokens, reasoning_tokens, cost_nanousd, gpu_cost_nanousd, total_ms, route_reason, attempts, created_at)
    SELECT :day,
           CAST(lpad(to_hex(ms), 12, '0') || '7' || substr(dice, 1, 3) || '8' || substr(dice, 4, 15) AS uuid),
           'team_' || n % {TEAMS}, 'key_' || n % {TEAMS} || '_' || n / 7 % 2, 'chat.completions', 'auto',
           'model-' || n / 11 % 5, 'openai', 'us https://api.openai.com/v1',
           CASE WHEN n / 13 % 10 = 0 THEN 'batch' ELSE 'interactive' END, 'normal',
           CASE WHEN n / 17 % 20 = 0 THEN 'failed' ELSE 'answered' END,
           50 + n % 3950, 0, 0, 1 + n % 900, 0, CASE WHEN n / 17 % 20 = 0 THEN 0 ELSE 10000 + n % 9990000 END, 0,
           n % 9000, 'named', '[{{"target": "openai/us/model", "outcome": "ok", "ms": 412.5}}]',
           to_timestamp(ms / 1000.0)
    FROM (SELECT CAST(n AS integer) AS n, md5(CAST(n AS text)) AS dice,
                 CAST(extract(epoch FROM CAST(:day AS date)) AS bigint) * 1000 + (n - :first) * 3000 % 86400000 AS ms
          FROM generate_series(CAST(:first AS bigint), CAST(:last AS bigint)) AS n) AS calls
""")
SUMMED = text(f"""
    INSERT INTO usage_daily ({", ".join((*ROLLUP_KEY, *SUMS))})
    SELECT {", ".join(ROLLUP_KEY.values())}, count(*), {", ".join(f"sum({name})" for name in SUMS[1:])}
    FROM usage_records WHERE day = :day GROUP BY {", ".join(ROLLUP_KEY.values())}
""")
