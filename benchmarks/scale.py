# Many owners of leases on one Postgres and one Redis: what they ask of both with 2,000 teams of five keys, how soon all
# serve again after everything was killed, and what one team at its cap does to itself and to the others.
#
#   python -m benchmarks.scale [--owners 50] [--teams 2000] [--keys 5] [--rate 400] [--seconds 20] [--pooler 40]
#
# An owner is what a gateway process is to the stores: leases, rates, journal, flusher, sweeper and auditor, opened by
# gateway.storage.books with connections of its own, but for the HTTP. Two processes hold all of them (scale_owners.py),
# so that a small machine measures the stores and not the starting of Python.

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import sys
import tempfile
import time
from contextlib import ExitStack
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import asyncpg
from msgspec import Struct
from redis import Redis

import migrations
from benchmarks.gateway_report import RESULTS, cpu_name, output_of
from benchmarks.scale_owners import Place, keep_owners
from benchmarks.scale_report import Load, Restart, report
from benchmarks.stack import Server
from gateway.dev.embedded import EmbeddedPostgres, EmbeddedValkey
from tests.support.pgbouncer import find_pgbouncer, running_pgbouncer

PROCESSES = 2
CALM = 5.0  # seconds in which owners only say that they live
WARM = 5.0  # seconds of calls before those that are measured
CAPPED = "team_capped"


class Options(Struct, frozen=True, kw_only=True):
    """How much of everything."""

    owners: int
    teams: int
    keys: int  # of each team
    rate: float  # calls a second, all owners together
    seconds: float
    crowd: int  # owners at the team that is at its cap
    callers: float  # calls a second of that team
    pooler: int  # connections of a pooler between owners and Postgres; 0: none


def main() -> None:
    """Measure, print and write benchmarks/results/scale-DATE.md."""
    parser = argparse.ArgumentParser(description="Measure what many owners ask of Postgres and Redis.")
    parser.add_argument("--owners", type=int, default=50)
    parser.add_argument("--teams", type=int, default=2000)
    parser.add_argument("--keys", type=int, default=5, help="of each team")
    parser.add_argument("--rate", type=float, default=400.0, help="calls a second, over all owners and teams")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each measurement")
    parser.add_argument("--crowd", type=int, default=200, help="owners that serve the team at its cap")
    parser.add_argument("--callers", type=float, default=2000.0, help="calls a second of that team")
    parser.add_argument("--pooler", type=int, default=0, help="PgBouncer before Postgres, with so many connections")
    parser.add_argument("--quick", action="store_true", help="six owners, twenty teams: does it run? Writes nothing")
    said = parser.parse_args()
    options = Options(
        owners=6 if said.quick else said.owners,
        teams=20 if said.quick else said.teams,
        keys=said.keys,
        rate=60.0 if said.quick else said.rate,
        seconds=3.0 if said.quick else said.seconds,
        crowd=10 if said.quick else said.crowd,
        callers=200.0 if said.quick else said.callers,
        pooler=said.pooler,
    )
    with tempfile.TemporaryDirectory(prefix="tollgate-scale-") as folder:
        text = Bench(Path(folder), options).run()
    now = datetime.now(UTC)
    head = (
        f"# Many owners, {now:%Y-%m-%d}\n\n`{' '.join(['python -m benchmarks.scale', *sys.argv[1:]])}` at "
        f"{output_of('git', 'rev-parse', '--short', 'HEAD')}, on {os.cpu_count()} cores of {cpu_name()}, load average "
        f"{[round(load, 1) for load in os.getloadavg()]}.\n\n"
    )
    print(head + text)
    if not said.quick:
        (RESULTS / f"scale-{now:%Y-%m-%d}.md").write_text(head + text)


class Bench:
    """The stores, the processes of owners, and what was measured of them."""

    def __init__(self, folder: Path, options: Options) -> None:
        self.folder = folder
        self.options = options
        connections = 6 * max(options.owners, options.crowd) + 50
        settings = {"max_connections": str(connections), "shared_buffers": "256MB"}
        self.postgres = EmbeddedPostgres(folder, server_settings=settings)
        self.valkey = EmbeddedValkey(folder)
        self.processes: list[BaseProcess] = []
        self.pipes: list[Connection] = []
        self.context = multiprocessing.get_context("spawn")
        self.pooler = ExitStack()
        self.pooled_url = ""

    def run(self) -> str:
        """Return the tables."""
        options = self.options
        try:
            self.start_stores()
            migrations.upgrade(self.postgres.url)
            asyncio.run(make_teams(self.postgres.url, options.teams, options.keys))
            self.start_owners(options.owners)
            calm = self.measure("owners that only live", CALM, ("wait", CALM))
            share = options.rate / PROCESSES
            busy = self.measure("calls over all teams", options.seconds, ("spread", share, options.seconds))
            restart = self.restart()
            self.end_owners()
            self.start_owners(options.crowd)
            share = options.callers / PROCESSES
            self.measure("until connections and plans are there", WARM, ("crowd", share, WARM))
            capped = self.measure("one team at its cap", options.seconds, ("crowd", share, options.seconds))
            return report([calm, busy, capped], restart, options.owners, options.crowd, options.teams, options.keys)
        finally:
            self.end_owners()
            self.pooler.close()
            self.valkey.stop()
            self.postgres.remove()

    def start_stores(self) -> None:
        """Start both, or start them again with what they have."""
        self.postgres.start()
        self.valkey.start()
        if self.options.pooler and not self.pooled_url:
            program = find_pgbouncer()
            assert program is not None, "PgBouncer 1.21 or later is needed for --pooler"
            way = running_pgbouncer(program, self.postgres.url, size=self.options.pooler)
            self.pooled_url = self.pooler.enter_context(way)

    def start_owners(self, owners: int) -> list[Any]:
        """Start the processes that hold so many owners; return what each says once all of its own serve."""
        shared = self.context.Array("q", 3)
        for number in range(PROCESSES):
            ours, theirs = self.context.Pipe()
            place = Place(
                folder=str(self.folder / "owners"),
                postgres=self.pooled_url or self.postgres.url,
                direct=self.postgres.url if self.pooled_url else None,
                valkey=self.valkey.url,
                owners=list(range(number, owners, PROCESSES)),
                teams=self.options.teams,
                keys=self.options.keys,
                capped=CAPPED,
                seed=number,
            )
            process = self.context.Process(target=keep_owners, args=(place, theirs, shared), daemon=True)
            process.start()
            self.processes.append(process)
            self.pipes.append(ours)
        return [pipe.recv() for pipe in self.pipes]

    def end_owners(self) -> None:
        """Kill them all, in the middle of whatever they do."""
        for process in self.processes:
            process.kill()
            process.join()
        self.processes, self.pipes = [], []

    def restart(self) -> Restart:
        """Kill owners and stores, start them again, and return how long that took."""
        self.end_owners()
        assert self.postgres.pid is not None and self.valkey.pid is not None
        self.valkey.stop()
        self.postgres.stop()
        began = time.monotonic()
        self.start_stores()
        stores = time.monotonic() - began
        told = self.start_owners(self.options.owners)
        return Restart(
            stores=stores,
            processes=max(one["imported"] for one in told) - began,
            first=min(one["first"] for one in told) - began,
            last=max(one["last"] for one in told) - began,
        )

    def measure(self, name: str, seconds: float, command: tuple[object, ...]) -> Load:
        """Have the owners do something, and return what it asked of the stores."""
        before, began = self.counts(), time.monotonic()
        for pipe in self.pipes:
            pipe.send(command)
        told = [pipe.recv() for pipe in self.pipes]
        took = time.monotonic() - began
        after = self.counts()
        return Load.of(name, took, before, after, told)

    def counts(self) -> dict[str, float]:
        """Return what the stores have done so far."""
        assert self.postgres.pid is not None and self.valkey.pid is not None
        with Redis.from_url(self.valkey.url) as redis:
            commands = redis.info("stats")["total_commands_processed"]
        return {
            "postgres_cpu": Server("postgres", "", "", (self.postgres.pid,)).cpu(),
            "valkey_cpu": Server("valkey", "", "", (self.valkey.pid,)).cpu(),
            "transactions": asyncio.run(transactions(self.postgres.url)),
            "commands": float(commands),
        }


async def transactions(url: str) -> float:
    """Return how many transactions Postgres has ended; nearly each of the benchmark's is one statement."""
    connection = await asyncpg.connect(url)
    try:
        await connection.execute("SELECT pg_stat_clear_snapshot()")
        row = await connection.fetchval(
            "SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = current_database()"
        )
        return float(row)
    finally:
        await connection.close()


async def make_teams(url: str, teams: int, keys: int) -> None:
    """Make teams and keys with every budget set and none near, and one team that is soon at its cap."""
    connection = await asyncpg.connect(url)
    plenty = (
        '{"tokens_per_day": 1000000000000, "nanousd_per_day": 1000000000000000, "nanousd_per_month": 9000000000000000}'
    )
    try:
        await connection.execute(
            "INSERT INTO teams (id, name, limits) SELECT 'team_' || n, 'team', $2::jsonb FROM generate_series(1, $1) n",
            teams,
            plenty,
        )
        await connection.execute(
            "INSERT INTO api_keys (id, team_id, digest, prefix, limits) SELECT 'key_' || n || '_' || k, 'team_' || n, "
            "sha256(('key_' || n || '_' || k)::bytea), 'tg-0000', $3::jsonb "
            "FROM generate_series(1, $1) n, generate_series(1, $2) k",
            teams,
            keys,
            plenty,
        )
        limits = '{"nanousd_per_day": 1000000000}'
        await connection.execute(
            "INSERT INTO teams (id, name, limits) VALUES ($1, 'capped', $2::jsonb)", CAPPED, limits
        )
        await connection.execute(
            "INSERT INTO api_keys (id, team_id, digest, prefix) VALUES ('key_capped', $1, sha256('capped'), 'tg-0000')",
            CAPPED,
        )
    finally:
        await connection.close()


if __name__ == "__main__":
    main()
