# The journal across processes: who is killed leaves its calls to the next.

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from redis.asyncio import Redis
from sqlalchemy import text

from billing.audit import audit
from billing.flusher import Flusher
from billing.holds import Hold, HoldRequest, Leg, Limits, Scope
from billing.journal import Journal, adopt
from billing.quotas import Quotas
from billing.records import Status
from gateway.clock import Clock
from gateway.database import Database
from tests.support.factories import make_record

# Closes a call, streams another, tells their ids, and waits to be killed.
VICTIM = """
import sys, time
from pathlib import Path
import msgspec
from billing.journal import Journal
from billing.records import Status
from gateway.clock import Clock
from protocol.usage import Usage
from tests.support.factories import make_record

journal = Journal.open(Path(sys.argv[1]), clock=Clock())
closed, streaming = (make_record(request_id, output_tokens=0, cost_nanousd=0) for request_id in sys.argv[2:4])
journal.opened(closed)
journal.opened(streaming)
journal.progress(streaming.request_id, Usage(100, 0, 12), 1200)
journal.closed(msgspec.structs.replace(closed, output_tokens=20, cost_nanousd=2000))
print("ready", flush=True)
time.sleep(60)
"""


def test_a_killed_process_leaves_its_calls_to_the_next(tmp_path: Path) -> None:
    """While it lives nobody takes its calls; after kill -9 the next process finds each as far as it came."""
    ids = (Clock().new_id(), Clock().new_id())
    victim = start_victim(tmp_path, *ids)
    assert list(adopt(tmp_path, Clock())) == []

    kill(victim)
    found = {record.request_id: record for record in adopt(tmp_path, Clock())}

    assert found.keys() == set(ids)
    assert (found[ids[0]].status, found[ids[0]].cost_nanousd) == (Status.ANSWERED, 2000)
    assert (found[ids[1]].status, found[ids[1]].cost_nanousd) == (Status.INTERRUPTED, 1200)
    assert list(tmp_path.iterdir()) == []


async def test_the_books_agree_after_a_kill(database: Database, redis: Redis, tmp_path: Path) -> None:
    """The next process writes the dead one's rows, the counters learn of them, and the audit finds nothing."""
    clock = Clock()
    quotas = Quotas(redis, clock, deadline=5.0)
    holds = [await open_hold(quotas, clock) for _ in range(2)]
    victim = start_victim(tmp_path, *(hold.request.request_id for hold in holds))
    kill(victim)
    journal = Journal.open(tmp_path, clock=clock)
    flusher = Flusher(journal, database, clock, book_adopted=quotas.book)

    journal.adopt()
    while await flusher.flush_once():
        pass

    state = await quotas.usage("team_a")
    assert (state.day_nanousd, state.day_nanousd_held, state.live) == (3200, 0, 0)
    assert await audit(database, quotas, clock.today()) == []


async def test_the_audit_finds_what_was_changed(database: Database, redis: Redis, tmp_path: Path) -> None:
    """A nano-dollar that only one book knows is named: day, team, line, and both sums."""
    clock = Clock()
    quotas = Quotas(redis, clock, deadline=5.0)
    journal = Journal.open(tmp_path, clock=clock)
    hold = await open_hold(quotas, clock)
    record = make_record(hold.request.request_id)
    journal.opened(record)
    journal.closed(record)
    await Flusher(journal, database, clock).flush_once()
    await quotas.book([record])
    assert await audit(database, quotas, clock.today()) == []

    async with database.begin() as connection:
        await connection.execute(text("UPDATE usage_daily SET cost_nanousd = cost_nanousd + 1"))
    [ledger, counted_day, counted_month] = await audit(database, quotas, clock.today())

    assert (ledger.quantity, ledger.ledger, ledger.statements) == ("cost_nanousd", 400_000, 400_001)
    assert "key_a gpt-4o interactive answered" in ledger.where
    assert (counted_day.where, counted_day.counters) == ("day", 400_000)
    assert (counted_month.where, counted_month.counters) == ("month", 400_000)


async def open_hold(quotas: Quotas, clock: Clock) -> Hold:
    """Hold room for a call of team_a."""
    scopes = (Scope("team", "team_a", Limits(nanousd_per_day=10**9)), Scope("key", "key_a", Limits()))
    hold = await quotas.open(
        HoldRequest(
            request_id=clock.new_id(),
            team_id="team_a",
            scopes=scopes,
            legs=(Leg("a", 500, 500_000),),
            valid_until=clock.now() + 5,
        )
    )
    assert isinstance(hold, Hold)
    return hold


def start_victim(folder: Path, *ids: str) -> subprocess.Popen[str]:
    """Start a process that has two calls in its journal."""
    victim = subprocess.Popen(
        [sys.executable, "-c", VICTIM, str(folder), *ids], stdout=subprocess.PIPE, text=True, cwd=Path.cwd()
    )
    assert victim.stdout is not None and victim.stdout.readline() == "ready\n"
    return victim


def kill(victim: subprocess.Popen[str]) -> None:
    """End it without a word."""
    os.kill(victim.pid, signal.SIGKILL)
    victim.communicate()
