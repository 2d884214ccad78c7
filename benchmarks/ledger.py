# How fast closed calls reach the ledger: from real journals through real flushers into a real Postgres; and what of it
# is for those who look: the series of charts, and the index of a team's calls.
#   python -m benchmarks.ledger [--calls 40000] [--write]

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from sqlalchemy import text

from benchmarks.ledger_server import cpu_of, postgres_on_disk, show
from billing.core.records import Attempt, Status, UsageRecord
from billing.journal.journal import Journal
from billing.ledger import ledger, series
from billing.upkeep.flusher import BATCH, Flusher
from gateway.core.clock import Clock
from gateway.dev.embedded.postgres import EmbeddedPostgres
from gateway.storage.database import Database

SEED = 7
ROUNDS = 3
SIZE = "SELECT sum(pg_total_relation_size(relid)) FROM pg_partition_tree('usage_records')"
# Cases without a part of what is kept for those who look.
BLIND = {
    "one flusher, no series": ("series",),
    "one flusher, no series, no index of a team's calls": ("series", "index"),
}
HEADER = (
    "| case | rows/s, median (least – most) | gateway CPU µs a row | Postgres CPU µs a row | WAL bytes a row |\n"
    "| --- | --- | --- | --- | --- |"
)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure how fast closed calls reach the ledger.")
    parser.add_argument("--calls", type=int, default=40_000)
    parser.add_argument("--write", action="store_true", help="write the table to benchmarks/results/")
    options = parser.parse_args()
    with postgres_on_disk() as server:
        table = asyncio.run(_measure(server, options.calls))
    said = (
        "Postgres beside it with its own settings (commits reach the disk). Closed calls of 20 teams, 60 keys and 5 "
        f"models lie in journals; flushers carry them, {BATCH} rows a transaction, until nothing waits.\n\n{table}"
    )
    show("ledger", f"--calls {options.calls}", said, write=options.write)


async def _measure(server: EmbeddedPostgres, calls: int) -> str:
    """Return the table: each case several times in turns, so that a busy moment hits all alike."""
    cases: dict[str, Callable[[Sequence[UsageRecord]], list[list[UsageRecord]]]] = {
        "one flusher": lambda records: [list(records)],
        "two flushers, other calls of the same teams": lambda records: [list(records[::2]), list(records[1::2])],
        "two flushers with the same calls": lambda records: [list(records), list(records)[::-1]],
    }
    blind = dict.fromkeys(BLIND, cases["one flusher"])
    found: dict[str, list[tuple[float, float, float, float]]] = {name: [] for name in (*cases, *blind)}
    database = Database(server.url)
    expected = 0
    for _ in range(ROUNDS):
        for name, shared_out in (cases | blind).items():
            records = list(make_calls(calls))
            expected += len(records)
            async with _without(database, BLIND.get(name, ())):
                found[name].append(await _drain(server, database, shared_out(records), len(records)))
    async with database.begin() as connection:
        rows = (await connection.execute(text("SELECT count(*) FROM usage_records"))).scalar_one()
        summed = (await connection.execute(text("SELECT sum(calls) FROM usage_daily"))).scalar_one()
        size = (await connection.execute(text(SIZE))).scalar_one()
    await database.close()
    assert rows == summed == expected, (rows, summed, expected)
    lines = []
    for name, rounds in found.items():
        speed, own, theirs, logged = (sorted(each) for each in zip(*rounds, strict=True))
        middle = len(rounds) // 2
        lines.append(
            f"| {name} | {speed[middle]:,.0f} ({speed[0]:,.0f} – {speed[-1]:,.0f}) | {own[middle]:.1f} "
            f"| {theirs[middle]:.1f} | {logged[middle]:,.0f} |"
        )
    kept = f"On disk a row takes {size / rows:,.0f} bytes, its indexes among them."
    return "\n".join([HEADER, *lines, "", kept])


@asynccontextmanager
async def _without(database: Database, parts: Collection[str]) -> AsyncIterator[None]:
    """Keep the ledger without some of what is for those who look."""
    whole = ledger.INSERT
    if "series" in parts:
        ledger.INSERT = text(whole.text.replace(series.ADD_NEW, "SELECT 1"))
    if "index" in parts:
        await _run(database, "DROP INDEX usage_records_team_id_request_id_idx")
    yield
    ledger.INSERT = whole
    if "index" in parts:
        await _run(database, "CREATE INDEX usage_records_team_id_request_id_idx ON usage_records (team_id, request_id)")


async def _run(database: Database, statement: str) -> None:
    async with database.begin() as connection:
        await connection.execute(text(statement))


async def _drain(
    server: EmbeddedPostgres, database: Database, parts: list[list[UsageRecord]], calls: int
) -> tuple[float, float, float, float]:
    """Return calls per second, the CPU microseconds that a call took here and in Postgres, and the bytes of its WAL."""
    with tempfile.TemporaryDirectory() as folder, _journals(Path(folder), parts) as journals:
        flushers = [Flusher(journal, database, Clock()) for journal in journals]
        logged = await _logged(database)
        started, own, theirs = time.perf_counter(), time.process_time(), cpu_of(server)
        await asyncio.gather(*(_until_empty(flusher) for flusher in flushers))
        seconds = time.perf_counter() - started
        return (
            calls / seconds,
            (time.process_time() - own) / calls * 1e6,
            (cpu_of(server) - theirs) / calls * 1e6,
            (await _logged(database) - logged) / calls,
        )


async def _logged(database: Database) -> int:
    async with database.begin() as connection:
        return int((await connection.execute(text("SELECT pg_current_wal_lsn() - '0/0'::pg_lsn"))).scalar_one())


async def _until_empty(flusher: Flusher) -> None:
    while await flusher.flush_once():
        pass


@contextmanager
def _journals(folder: Path, parts: list[list[UsageRecord]]) -> Iterator[list[Journal]]:
    journals = []
    for number, records in enumerate(parts):
        journal = Journal.open(folder / str(number), clock=Clock())
        for record in records:
            journal.closed(record)
        journals.append(journal)
    yield journals
    for journal in journals:
        journal.close()


def make_calls(number: int) -> Iterator[UsageRecord]:
    """Yield calls as a deployment has them: most answered, a third with tags, all with an attempt."""
    clock, dice = Clock(), random.Random(SEED)
    for _ in range(number):
        team = dice.randrange(20)
        yield UsageRecord(
            request_id=clock.new_id(),
            team_id=f"team_{team}",
            key_id=f"key_{team}_{dice.randrange(3)}",
            endpoint="chat.completions",
            model_asked="auto",
            model_used=f"model-{dice.randrange(5)}",
            provider="openai",
            provider_endpoint="us https://api.openai.com/v1",
            status=Status.ANSWERED if dice.random() < 0.97 else Status.INTERRUPTED,
            input_tokens=dice.randrange(50, 4000),
            output_tokens=dice.randrange(1, 900),
            cost_nanousd=dice.randrange(10**4, 10**7),
            first_token_ms=dice.random() * 900,
            total_ms=dice.random() * 9000,
            route_reason="named",
            attempts=(Attempt("openai/us https://api.openai.com/v1/model", "ok", 412.5),),
            metadata={"project": "search", "stage": "live"} if dice.random() < 0.3 else None,
            created_at=clock.now(),
        )


if __name__ == "__main__":
    main()
