# The journal across processes: who is killed leaves its calls to the next.

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import text

from billing.core.errors import JournalFull
from billing.core.records import Status
from billing.journal.journal import Journal
from billing.ledger.ledger import insert_records
from billing.upkeep.audit import audit
from billing.upkeep.flusher import Flusher
from gateway.core.clock import Clock
from gateway.storage.database import Database
from protocol.usage import Usage
from tests.support.factories import make_record
from tests.support.house import running_house, settings_for
from tests.support.journals import adopt, left_in
from tests.support.lessee import Lessee
from tests.support.scripted_upstream import ScriptedUpstream
from tests.support.waiting import until

CALL = {"model": "small", "messages": [{"role": "user", "content": "hello"}]}

# Closes a call, streams another, tells their ids, and waits to be killed.
VICTIM = """
import sys, time
from pathlib import Path
import msgspec
from billing.journal.journal import Journal
from billing.ledger.ledger import insert_records
from billing.core.records import Status
from gateway.core.clock import Clock
from protocol.usage import Usage
from tests.support.factories import make_record

journal = Journal.open(Path(sys.argv[1]), clock=Clock())
unknown = {"owner": "dead", "output_tokens": 0, "cost_nanousd": 0}
closed, streaming = (make_record(request_id, **unknown) for request_id in sys.argv[2:4])
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
    assert left_in(tmp_path) == []


# Adopts everything in turns until told to stop, and tells which calls it got.
ADOPTER = """
import sys, time
from pathlib import Path
from billing.journal.journal import Journal
from billing.ledger.ledger import insert_records
from gateway.core.clock import Clock

journal = Journal.open(Path(sys.argv[1]), clock=Clock())
until = time.monotonic() + float(sys.argv[2])
print("ready", flush=True)
while time.monotonic() < until:
    if sum(journal.adopt_each()):
        for closed in (taken := journal.waiting.take(10**6)):
            print(closed.record.request_id, flush=True)
        journal.waiting.mark_flushed(taken)
journal.close()
"""


def test_two_neighbours_that_adopt_at_once_share_the_dead_between_them(tmp_path: Path) -> None:
    """Each call of the dead goes to exactly one of them: the lock decides."""
    clock = Clock()
    adopters = [
        subprocess.Popen(
            [sys.executable, "-c", ADOPTER, str(tmp_path), "4"], stdout=subprocess.PIPE, text=True, cwd=Path.cwd()
        )
        for _ in range(2)
    ]
    for adopter in adopters:
        assert adopter.stdout is not None and adopter.stdout.readline() == "ready\n"
    ids = []
    for _ in range(40):  # forty processes die one after the other
        dead = Journal.open(tmp_path, clock=clock, segment_bytes=64 * 1024)
        for _ in range(3):
            record = make_record(clock.new_id())
            ids.append(record.request_id)
            dead.opened(record)
            dead.closed(record)
        dead.close()

    found = [line for adopter in adopters for line in adopter.communicate(timeout=60)[0].splitlines()]

    left = [record.request_id for record in adopt(tmp_path, clock)]  # what came after their time, on a slow machine
    assert sorted(found + left) == sorted(ids)
    assert left_in(tmp_path) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of 12 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("SKIPPED: only root may mount a small filesystem, and not in every container")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_full_disk_refuses_new_calls_and_loses_none_that_runs(small_disk: Path) -> None:
    """On a disk that is really full: no new call, every running one closes, and with room the next call is taken."""
    clock = Clock()
    journal = Journal.open(small_disk / "journal", clock=clock, segment_bytes=64 * 1024)
    filler = small_disk / "filler"
    running = [make_record(clock.new_id()) for _ in range(5)]
    for record in running:
        journal.opened(record)
    fill(filler)
    with pytest.raises(JournalFull) as refused:
        while True:
            record = make_record(clock.new_id())
            journal.opened(record)
            running.append(record)

    assert (refused.value.status, refused.value.code) == (503, "overloaded")
    assert int(refused.value.headers["retry-after"]) > 0
    assert journal.check() == "full"
    for number, record in enumerate(running):
        journal.progress(record.request_id, Usage(100, output_tokens=number), 5)
        journal.closed(record)
    assert [closed.record for closed in journal.waiting.take(1000)] == running
    assert not journal.waiting.in_memory  # all of them are on the disk
    filler.unlink()
    assert journal.check() == "ok"
    journal.opened(make_record(clock.new_id()))
    journal.close()


def test_kept_segments_refuse_no_call_on_a_full_disk(small_disk: Path) -> None:
    """On a disk that is really full, what is only kept makes room for calls; nothing else does, once it is gone."""
    clock = Clock()
    journal = Journal.open(small_disk / "journal", clock=clock, segment_bytes=64 * 1024)
    for _ in range(20):
        for record in [make_record(clock.new_id()) for _ in range(100)]:
            journal.opened(record)
            journal.closed(record)
        journal.waiting.mark_flushed(journal.waiting.take(1000))
    kept = len(list(journal.directory.glob("*.flushed")))
    fill(small_disk / "filler")

    opened = 0
    with pytest.raises(JournalFull):
        while True:
            journal.opened(make_record(clock.new_id()))
            opened += 1

    assert kept > 20
    assert opened > kept * 5  # a kept segment makes room for some ten open calls, which reserve room for their closes
    assert list(journal.directory.glob("*.flushed")) == []
    journal.close()


async def test_a_ledger_that_forgot_learns_its_calls_again(database: Database, tmp_path: Path) -> None:
    """What was flushed to a database that is then put back is told again from kept segments; a second time is nothing
    new."""
    clock = Clock()
    journal = Journal.open(tmp_path, clock=clock, segment_bytes=64 * 1024)
    flusher = Flusher(journal, database, clock)
    for record in [make_record(clock.new_id()) for _ in range(300)]:
        journal.opened(record)
        journal.closed(record)
    while await flusher.flush_once():
        pass
    before = await read_books(database)
    async with database.begin() as connection:
        await connection.execute(text("TRUNCATE usage_records, usage_daily, endpoint_days"))

    new = []
    for _ in range(2):
        new.append(0)
        for calls in journal.kept(since=0):
            async with database.begin() as connection:
                new[-1] += await insert_records(connection, list(calls), today=clock.today())

    assert new == [300, 0]
    assert await read_books(database) == before
    journal.close()


async def read_books(database: Database) -> list[object]:
    """Return every row and every sum."""
    async with database.begin() as connection:
        rows = await connection.execute(text("SELECT * FROM usage_records ORDER BY request_id"))
        sums = await connection.execute(text("SELECT * FROM usage_daily ORDER BY team_id, key_id, model_used"))
        return [*map(tuple, rows), *map(tuple, sums)]


def test_a_gateway_on_a_full_disk_says_so_and_recovers_by_itself(
    small_disk: Path, database_url: str, redis_url: str
) -> None:
    """503 `overloaded` with retry-after before a call would be lost; /health/ready names the journal, until it fits."""
    filler = small_disk / "filler"
    fill(filler)
    with ScriptedUpstream(models=("small", "large")) as upstream:
        settings = settings_for(database_url, redis_url, upstream.url, small_disk)
        with running_house(settings) as house, house.client() as client:
            refused = client.post("/v1/chat/completions", json=CALL)
            ready = client.get("/health/ready").json()
            asked = len(upstream.requests)
            filler.unlink()
            until(lambda: client.get("/health/ready").json()["parts"]["journal"] == "ok")  # looked at once a second
            answered = client.post("/v1/chat/completions", json=CALL)

    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
    assert int(refused.headers["retry-after"]) > 0
    assert asked == 0  # no upstream heard of what could not be written down
    assert (ready["status"], ready["parts"]["journal"]) == ("degraded", "full")
    assert answered.status_code == 200


async def test_the_books_agree_after_a_kill(database: Database, tmp_path: Path) -> None:
    """The next process writes the dead one's rows on its leases and ends it; the audit finds nothing."""
    clock = Clock()
    dead = await Lessee(database, clock, "dead").begin()
    assert await dead.draw(1000, 10_000)
    kill(start_victim(tmp_path, *(clock.new_id() for _ in range(2))))
    journal = Journal.open(tmp_path, clock=clock)
    flusher = Flusher(journal, database, clock)

    await flusher.adopt()
    while await flusher.flush_once():
        pass
    await dead.end()

    async with database.begin() as connection:
        drawn = text("SELECT DISTINCT drawn FROM balances WHERE unit = 'nanousd'")
        assert (await connection.execute(drawn)).scalars().all() == [3200]
    assert (await audit(database, clock.today())).differences == []


async def test_the_audit_finds_what_was_changed(database: Database, tmp_path: Path) -> None:
    """A nano-dollar that only one book knows is named: day, team, line, and both sums."""
    clock = Clock()
    journal = Journal.open(tmp_path, clock=clock)
    record = make_record(clock.new_id())
    journal.opened(record)
    journal.closed(record)
    await Flusher(journal, database, clock).flush_once()
    assert (await audit(database, clock.today())).differences == []

    async with database.begin() as connection:
        await connection.execute(text("UPDATE usage_daily SET cost_nanousd = cost_nanousd + 1"))
    [of_rows, *of_leases] = (await audit(database, clock.today())).differences

    assert (of_rows.book, of_rows.quantity) == ("statements", "cost_nanousd")
    assert (of_rows.expected, of_rows.found) == (400_000, 400_001)
    assert "key_a gpt-4o interactive answered" in of_rows.where
    assert {(one.book, one.expected, one.found) for one in of_leases} == {("leases", 400_001, 400_000)}
    assert [one.where for one in of_leases] == ["key:key_a", "team:team_a"]


def fill(path: Path) -> None:
    """Write until the disk is full."""
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(512))


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
