# What the accounting of a call costs: opened and closed in the journal, and flushed to Postgres, by calls in one flush.
#   python -m benchmarks.journal [--rounds 5] [--write]

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from statistics import median

from msgspec.structs import replace

from benchmarks.ledger import make_calls
from benchmarks.ledger_server import cpu_of, postgres_on_disk, show
from billing.core.records import Status
from billing.journal.journal import Journal
from billing.upkeep.flusher import Flusher
from gateway.core.clock import Clock
from gateway.dev.embedded.postgres import EmbeddedPostgres
from gateway.storage.database import Database

CALLS = {10: 300, 90: 1800, 360: 3600, 1000: 5000}  # in one flush -> in a round
HEADER = "| calls in a flush | opened | closed | flushed | Postgres | together |\n| --- | --- | --- | --- | --- | --- |"


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what the books of a call cost.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", action="store_true", help="write the table to benchmarks/results/")
    options = parser.parse_args()
    with postgres_on_disk() as server:
        table = asyncio.run(_measure(server, options.rounds))
    said = f"CPU time in µs a call, medians of rounds in turns.\n\n{table}"
    show("journal", f"--rounds {options.rounds}", said, write=options.write)


async def _measure(server: EmbeddedPostgres, rounds: int) -> str:
    database = Database(server.url)
    found: dict[int, list[tuple[float, ...]]] = defaultdict(list)
    for turn in range(rounds + 1):
        for batch, calls in CALLS.items():
            costs = await _round(server, database, batch, calls)
            if turn:  # the first one finds nothing prepared
                found[batch].append(costs)
    await database.close()
    lines = []
    for batch, each in found.items():
        costs = tuple(median(part) for part in zip(*each, strict=True))
        lines.append(f"| {batch} | {' | '.join(f'{cost:.1f}' for cost in (*costs, sum(costs)))} |")
    return "\n".join([HEADER, *lines])


async def _round(server: EmbeddedPostgres, database: Database, batch: int, calls: int) -> tuple[float, ...]:
    """Return what a call costs: opened, closed, flushed, and in Postgres; microseconds of CPU."""
    records = list(make_calls(calls))
    opened = [replace(record, status=Status.FAILED, output_tokens=0, cost_nanousd=0, attempts=()) for record in records]
    marks = [0.0, 0.0, 0.0]
    theirs = cpu_of(server)
    with tempfile.TemporaryDirectory() as folder:
        journal = Journal.open(Path(folder), clock=Clock())
        flusher = Flusher(journal, database, Clock())
        for first in range(0, calls, batch):
            last = first + batch
            at = [time.thread_time()]
            for record in opened[first:last]:
                journal.opened(record)
            at.append(time.thread_time())
            for record in records[first:last]:
                journal.closed(record)
            at.append(time.thread_time())
            await flusher.flush_once()
            at.append(time.thread_time())
            for part in range(3):
                marks[part] += at[part + 1] - at[part]
        journal.close()
    theirs = cpu_of(server) - theirs
    return tuple(cost / calls * 1e6 for cost in (*marks, theirs))


if __name__ == "__main__":
    main()
