# A quarter of an hour without Postgres: every call goes on as before, and once it is back the ledger has each of them
# once, soon. The table lands in benchmarks/results/. TOLLGATE_SOAK_OUTAGE=3600 makes it an hour; that keys go on for
# longer is in tests/integration/test_auth.py.

from __future__ import annotations

import asyncio
import json
import os
import platform
import random
import re
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import asyncpg
import pytest
from redis.asyncio import Redis

from tests.support import books
from tests.support.audits import differences
from tests.support.fault_house import FaultHouse, running_fault_house

OUTAGE = float(os.environ.get("TOLLGATE_SOAK_OUTAGE", "900"))  # seconds
PER_SECOND = 56  # calls: 50,000 in all
BEFORE = 20.0  # seconds of the same load with Postgres there, to compare with
STREAMED = 0.1  # of the calls
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
TEAM = "hourly"
TABLES = (("usage_records", "count(*)"), ("usage_daily", "sum(calls)"))

pytestmark = pytest.mark.soak


@dataclass
class Calls:
    """What the clients of one stretch of time saw."""

    seconds: list[float] = field(default_factory=list)  # of the plain ones that were answered
    answered: int = 0
    cost_nanousd: int = 0
    others: list[str] = field(default_factory=list)


@pytest.mark.timeout(OUTAGE + 900)
def test_an_outage_of_postgres_loses_nothing(tmp_path: Path) -> None:
    """Nobody is refused, each call has one row afterwards, the books agree, and the backlog drains at 5,000 rows/s."""
    with running_fault_house(tmp_path) as house:
        key = next(iter(house.make_team(TEAM, {"usd_per_day": 1000, "tokens_per_day": 10**9}, [{}]).values()))
        before = asyncio.run(call(house, key, BEFORE))
        rows = settled(house, before.answered)
        house.kill_server(house.postgres)
        during = asyncio.run(call(house, key, OUTAGE))
        backlog = sum(int(metric(house, number, "tollgate_journal_backlog")) for number in range(len(house.gateways)))
        memory = [memory_of(gateway.pid) for gateway in house.gateways]
        journal = sum(path.stat().st_size for path in (house.data_dir / "journal").glob("*.journal"))
        back = time.monotonic()
        house.postgres.start()
        first, last = asyncio.run(drained(house, rows, rows + backlog))
        speed = (backlog - (first[1] - rows)) / max(last - first[0], 0.1)
        wrong = asyncio.run(
            complaints_about(house, before.answered + during.answered, before.cost_nanousd + during.cost_nanousd)
        )
    write_table(
        {
            "seconds without Postgres": f"{OUTAGE:.0f}",
            "calls answered meanwhile, by two gateways": f"{during.answered:,}",
            "calls that were not, by what they were told": told(during.others),
            "plain call before, p50 and p99": percentiles(before.seconds),
            "plain call meanwhile, p50 and p99": percentiles(during.seconds),
            "calls in the journals when Postgres was back": f"{backlog:,} in {journal / 1e6:,.0f} MB",
            "memory of the gateways then": " and ".join(f"{each / 1e6:.0f} MB" for each in memory),
            "from Postgres's start to the first row": f"{first[0] - back:.1f} s",
            "rows/s from there to the last": f"{speed:,.0f}",
            "from Postgres's start until the ledger was whole": f"{last - back:.1f} s",
            "differences between clients, ledger, statements and counters": f"{len(wrong)}",
        }
    )

    assert wrong == []
    assert before.others + during.others == []
    assert backlog == during.answered
    assert speed > 5000 or OUTAGE < 600, "too few rows to tell"


async def call(house: FaultHouse, key: str, seconds: float) -> Calls:
    """Call both gateways at an even pace, whatever becomes of the calls, for so long."""
    calls, dice = Calls(), random.Random(f"{seconds}")
    running: set[asyncio.Task[None]] = set()
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=30)
    headers = {"authorization": f"Bearer {key}"}
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers) as session:
        start = time.monotonic()
        for number in range(int(seconds * PER_SECOND)):
            await asyncio.sleep(max(0.0, start + number / PER_SECOND - time.monotonic()))
            gateway = house.gateways[number % len(house.gateways)]
            task = asyncio.create_task(call_once(session, gateway.url, dice.random() < STREAMED, calls))
            running.add(task)
            task.add_done_callback(running.discard)
        await asyncio.gather(*running)
    return calls


async def call_once(session: aiohttp.ClientSession, url: str, streams: bool, calls: Calls) -> None:
    """Make one call and note how it went."""
    body: dict[str, Any] = {"model": "instant", "messages": [{"role": "user", "content": "Hello?"}], "max_tokens": 48}
    if streams:
        body |= {"model": "steady", "stream": True, "stream_options": {"include_usage": True}}
    began = time.monotonic()
    try:
        async with session.post(f"{url}/v1/chat/completions", json=body) as answer:
            text = await answer.text()
            whole = answer.status == 200 and (not streams or text.endswith("data: [DONE]\n\n"))
    except (aiohttp.ClientError, OSError, TimeoutError) as exc:
        calls.others.append(repr(exc))
        return
    if not whole:
        calls.others.append(f"{answer.status}: {text[-300:]}")
        return
    last = json.loads(text.rsplit("data: ", 2)[1] if streams else text)
    calls.answered += 1
    calls.cost_nanousd += round(float(last["usage"]["cost_usd"]) * 10**9)
    if not streams:
        calls.seconds.append(time.monotonic() - began)


def settled(house: FaultHouse, answered: int) -> int:
    """Wait until the ledger has the first calls; return how many."""
    asyncio.run(drained(house, 0, answered))
    while any(metric(house, number, "tollgate_journal_backlog") for number in range(len(house.gateways))):
        time.sleep(0.1)
    return asyncio.run(count_rows(house))


async def count_rows(house: FaultHouse) -> int:
    """Return how many calls the ledger has, however they ended."""
    connection = await asyncpg.connect(house.postgres.url, timeout=10)
    try:
        return int(await connection.fetchval("SELECT count(*) FROM usage_records"))
    finally:
        await connection.close()


async def drained(house: FaultHouse, have: int, rows: int) -> tuple[tuple[float, int], float]:
    """Wait until the ledger has ``rows`` rows; return when it first had more than ``have``, how many, and the end."""
    first: tuple[float, int] | None = None
    connection = await asyncpg.connect(house.postgres.url, timeout=10)
    try:
        async with asyncio.timeout(300):
            while True:
                found = await connection.fetchval("SELECT count(*) FROM usage_records")
                if first is None and found > have:
                    first = time.monotonic(), found
                if found >= rows:
                    return first or (time.monotonic(), found), time.monotonic()
                await asyncio.sleep(0.1)
    finally:
        await connection.close()


async def complaints_about(house: FaultHouse, calls: int, cost_nanousd: int) -> list[str]:
    """Hold ledger, statements, journals and counters against what the clients saw, and against each other."""
    wrong = []
    connection = await asyncpg.connect(house.postgres.url, timeout=10)
    try:
        for table, count in TABLES:
            query = f"SELECT {count}, sum(cost_nanousd) FROM {table} WHERE status = 'answered'"
            found = [int(value) for value in await connection.fetchrow(query)]
            if found != [calls, cost_nanousd]:
                wrong.append(f"{table} says {found}, the clients {[calls, cost_nanousd]}")
        sums = [
            f"SELECT status, {count}, sum(cost_nanousd) FROM {table} GROUP BY 1 ORDER BY 1" for table, count in TABLES
        ]
        ledger, statements = [[tuple(row) for row in await connection.fetch(query)] for query in sums]
        if ledger != statements:
            wrong.append(f"the ledger says {ledger}, the statements {statements}")
        wrong += await books.check_journals(connection, house.data_dir / "journal")
    finally:
        await connection.close()
    wrong += map(repr, await differences(house.postgres.url))
    redis = Redis.from_url(house.redis.url, socket_timeout=5)
    try:
        wrong += [str(await redis.hgetall(key)) async for key in redis.scan_iter(match="tollgate:*:holds")]
    finally:
        await redis.aclose()
    return wrong


def told(others: Sequence[str]) -> str:
    """Return how many calls were told what."""
    codes = Counter(next(iter(re.findall(r'"code":"(\w+)"', each)), each[:40]) for each in others)
    return ", ".join(f"{count:,} {code}" for code, count in codes.most_common()) or "none"


def metric(house: FaultHouse, number: int, name: str) -> float:
    """Return what a gateway says of itself."""
    lines = house.ask_admin(house.gateways[number], "/metrics").text.splitlines()
    return float(next(line for line in lines if line.startswith(name + " ")).split(" ")[1])


def memory_of(pid: int) -> int:
    """Return the resident bytes of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def percentiles(seconds: Sequence[float]) -> str:
    """Return p50 and p99 as people read them."""
    cuts = statistics.quantiles(seconds, n=100)
    return f"{1e3 * cuts[49]:.1f} ms and {1e3 * cuts[98]:.1f} ms"


def write_table(measured: dict[str, str]) -> None:
    """Write the results where the others are."""
    today = datetime.now(UTC).date()
    lines = [
        f"# {OUTAGE / 60:.0f} minutes without Postgres, {today}",
        "",
        f"`python -m pytest -m soak tests/soak/test_postgres_away.py` on {os.cpu_count()} cores "
        f"({platform.machine()}), load average {[round(load, 1) for load in os.getloadavg()]}: {PER_SECOND} calls a "
        f"second, {STREAMED:.0%} of them streams, at two `tollgate serve` with one journal folder; Postgres is killed "
        "and started again.",
        "",
        "| what | measured |",
        "| --- | --- |",
        *(f"| {name} | {value} |" for name, value in measured.items()),
    ]
    (RESULTS / f"postgres-away-{today}.md").write_text("\n".join(lines) + "\n")
