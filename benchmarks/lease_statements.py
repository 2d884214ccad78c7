# What each statement of a process costs Postgres: as the first of its kind in a session, which has to plan it, and
# after it. CPU alone, one session at a time: nothing waits for anything.
#
#   python -m benchmarks.lease_statements [--sessions 40] [--calls 1000]

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

from sqlalchemy import text

import migrations
from benchmarks.scale import CAPPED, make_teams
from benchmarks.stack import Server
from billing.ledger.ledger import write_records
from billing.ledger.partitions import ensure_partitions
from billing.quotas.lease_store import NANOUSD, REACH_THE_DISK, TOKENS, Need, PostgresLeases, Told
from gateway.core.clock import Clock
from gateway.dev.embedded import EmbeddedPostgres
from gateway.storage.database import Database
from tests.support.factories import make_record

SHARE = 0.25 / 200  # of 200 living owners: every balance is tight
ROOMS = [(scope, unit) for scope in (f"team:{CAPPED}", "key:key_capped") for unit in (TOKENS, NANOUSD)]
HOLDS = {TOKENS: 1_000, NANOUSD: 10_000_000}


class Session:
    """One connection, and an owner that uses it alone."""

    def __init__(self, url: str, owner: str) -> None:
        self.database, self.clock, self.owner = Database(url, pool_size=1), Clock(), owner
        self.store = PostgresLeases(self.database, self.clock)
        self.returned = 0

    async def connect(self) -> None:
        """Connect, and say next to nothing."""
        async with self.database.at_once() as connection:
            await connection.execute(text("SELECT 1"))

    async def beat(self) -> None:
        """Say that the owner lives."""
        await self.store.beat(self.owner, self.clock.now(), 0)

    async def ask(self, calls: int = 1) -> None:
        """Ask for room for so many calls, near the cap; with the wait for the disk."""
        asks = [[Need(*room, need=1, want=1, hold=HOLDS[room[1]]) for room in ROOMS]] * calls
        await self.store.take(self.owner, self.clock.today().isoformat(), asks, SHARE)

    async def ask_in_vain(self) -> None:
        """Ask for more than there is."""
        need = Need(*ROOMS[1], need=10**11, want=10**11, hold=10**11)
        await self.store.take(self.owner, self.clock.today().isoformat(), [[need]], SHARE)

    async def give_back(self) -> None:
        """Give a little back."""
        self.returned += 1
        day = self.clock.today().isoformat()
        await self.store.give_back(self.owner, [Told(*room, day, 0, self.returned) for room in ROOMS])

    async def flush(self) -> None:
        """Write one row of a call."""
        row = make_record(self.clock.new_id(), team_id=CAPPED, key_id="key_capped", owner=self.owner, cost_nanousd=1)
        async with self.database.at_once() as connection:
            await write_records(connection, [row], today=self.clock.today(), flusher=self.owner)

    async def reach_the_disk(self) -> None:
        """Wait for what was committed without waiting."""
        async with self.database.at_once() as connection:
            await connection.execute(REACH_THE_DISK)


async def main(folder: Path, sessions: int, calls: int) -> None:
    """Measure and print a table."""
    postgres = EmbeddedPostgres(folder, server_settings={"shared_buffers": "256MB", "max_connections": "600"})
    postgres.start()
    try:
        migrations.upgrade(postgres.url)
        await make_teams(postgres.url, 200, 2)
        all_of_them = [Session(postgres.url, f"owner_{number}") for number in range(sessions)]
        async with all_of_them[0].database.begin() as connection:
            await ensure_partitions(connection, Clock().today())
        for number in range(200):
            await all_of_them[0].store.begin(f"owner_{number}", "")
        assert postgres.pid is not None
        server = Server("postgres", "", "", (postgres.pid,))

        async def cost(act: Callable[[Session], Awaitable[None]], of: list[Session]) -> float:
            before = server.cpu()
            for session in of:
                await act(session)
            return 1e6 * (server.cpu() - before) / len(of)

        async def ask_for_five(session: Session) -> None:
            await session.ask(5)

        print("| statement | first in its session, µs | after it, µs |\n| --- | --- | --- |")
        for act in (
            *(Session.connect, Session.beat, Session.ask, ask_for_five, Session.ask_in_vain),
            *(Session.give_back, Session.flush, Session.reach_the_disk),
        ):
            first, warm = await cost(act, all_of_them), await cost(act, [all_of_them[0]] * calls)
            print(f"| {act.__name__} | {first:,.0f} | {warm:,.0f} |", flush=True)
        for session in all_of_them:
            await session.database.close()
    finally:
        postgres.remove()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="What each statement of a process costs Postgres.")
    parser.add_argument("--sessions", type=int, default=40)
    parser.add_argument("--calls", type=int, default=1000)
    said = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tollgate-statements-") as name:
        asyncio.run(main(Path(name), said.sessions, said.calls))
