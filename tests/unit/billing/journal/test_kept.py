# Flushed segments are kept for a day, so that a ledger that has forgotten is told again, and never in anyone's way.

from __future__ import annotations

import errno
import fcntl
import json
import os
from pathlib import Path

import pytest

from billing.core.errors import JournalFull
from billing.core.records import UsageRecord
from billing.journal import kept
from billing.journal.journal import Journal
from billing.journal.owner_files import OWNER, claim, dead
from billing.journal.segments import KEPT
from gateway.commands.journal import print_calls
from protocol.usage import Usage
from tests.support.clock import SetClock
from tests.support.factories import make_record
from tests.support.journals import left_in

SMALL = 64 * 1024
DAY = 86_400


@pytest.fixture
def journal(tmp_path: Path, clock: SetClock) -> Journal:
    """A journal with small segments."""
    return Journal.open(tmp_path / "journal", clock=clock, segment_bytes=SMALL)


def test_a_flushed_segment_is_kept_and_takes_only_what_was_written(tmp_path: Path, clock: SetClock) -> None:
    """Its calls can be told again; of the 8 MiB that were reserved a few blocks stay, under its owner's token."""
    journal = Journal.open(tmp_path, clock=clock)
    records = carry(journal, clock, 5)
    assert told(journal) == records  # also while the segment is in use
    journal.close()

    [path] = tmp_path.iterdir()
    assert (path.suffix, kept.token_of(path)) == (KEPT, journal.token)
    assert path.stat().st_size < SMALL
    assert path.stat().st_blocks * 512 <= SMALL
    assert told(journal) == records == told(Journal.open(tmp_path, clock=clock))
    assert sum(Journal.open(tmp_path, clock=clock).adopt_each()) == 0


def test_a_segment_without_a_call_is_not_kept(journal: Journal, clock: SetClock) -> None:
    """It has nothing to tell."""
    assert journal.check() == "ok"  # makes one
    journal.close()

    assert list(journal.directory.iterdir()) == []


def test_what_waits_is_not_told_again(journal: Journal, clock: SetClock) -> None:
    """A flush brings it anyway."""
    flushed = carry(journal, clock, 3)
    write(journal, clock, 2)

    assert told(journal) == flushed


def test_what_was_flushed_before_the_moment_asked_for_is_left_out(journal: Journal, clock: SetClock) -> None:
    """Segment by segment: one counts as flushed when its last call was."""
    carry(journal, clock, 100)
    clock.move(60)
    since = clock.now()
    late = carry(journal, clock, 100)

    again = told(journal, since)
    assert again[-100:] == late
    assert len(again) < 200


def test_a_segment_that_is_put_away_meanwhile_is_still_told(journal: Journal, clock: SetClock) -> None:
    """Whoever delivers awaits the ledger between two calls, and flushes go on."""
    records = carry(journal, clock, 5)
    waiting = write(journal, clock, 1)
    segments = journal.kept(0)
    calls = next(segments)
    journal.waiting.mark_flushed(journal.waiting.take(10))
    journal.close()

    assert [*calls, *(call for rest in segments for call in rest)] == records + waiting


def test_the_dead_are_spoken_for_and_the_living_speak_for_themselves(journal: Journal, clock: SetClock) -> None:
    """By the locks of their own files; what a dead one left unflushed comes by adoption."""
    gone, neighbour = (Journal.open(journal.directory, clock=clock, segment_bytes=SMALL) for _ in range(2))
    lock = claim(journal.directory, gone.token, "gone")
    living = claim(journal.directory, neighbour.token, "neighbour")
    records = carry(gone, clock, 3)
    gone.close()
    carry(neighbour, clock, 3)
    neighbour.close()
    assert told(journal) == []

    os.close(lock)
    assert told(journal) == records
    os.close(living)


def test_two_that_look_at_once_both_see_the_dead_as_dead(journal: Journal, clock: SetClock) -> None:
    """A look takes no lock that another's look would take for the owner's."""
    os.close(claim(journal.directory, "1-dead", "dead"))
    with (journal.directory / f"1-dead{OWNER}").open() as looked_at:
        fcntl.flock(looked_at, fcntl.LOCK_SH)

        assert [one.name for one in dead(journal.directory)] == ["dead"]


def test_a_damaged_segment_is_told_as_far_as_it_was_booked(journal: Journal, clock: SetClock) -> None:
    """It waits for people under another name; its calls are the ledger's all the same."""
    gone = Journal.open(journal.directory, clock=clock, segment_bytes=SMALL)
    records = write(gone, clock, 5)
    place = gone.waiting.take(2)[1].place
    gone.close()
    [path] = left_in(journal.directory)
    assert place is not None
    with path.open("r+b") as file:
        file.seek(place + 40)
        file.write(b"\xff")
    sum(journal.adopt_each())
    flush(journal)

    assert {record.request_id for record in told(journal)} == {record.request_id for record in records}


def test_a_kept_segment_goes_after_a_day(journal: Journal, clock: SetClock) -> None:
    """The day begins when the last call in it was flushed."""
    carry(journal, clock, 1)
    clock.move(DAY)
    journal.close()

    clock.move(DAY - 1)
    journal.kept_files.prune()
    assert len(told(journal)) == 1
    clock.move(1)
    journal.kept_files.prune()
    assert list(journal.directory.iterdir()) == []


@pytest.mark.parametrize("bound", [("KEPT_BYTES", 5 * SMALL), ("KEPT_SHARE", 1e-9)])
def test_kept_segments_take_no_more_than_their_share(
    journal: Journal, clock: SetClock, monkeypatch: pytest.MonkeyPatch, bound: tuple[str, float]
) -> None:
    """The oldest go first, whoever made them."""
    gone = Journal.open(journal.directory, clock=clock, segment_bytes=SMALL)
    records = carry(gone, clock, 300)
    gone.close()
    records += carry(journal, clock, 300)
    journal.close()
    assert told(journal) == records

    monkeypatch.setattr(kept, *bound)
    journal.kept_files.prune()

    left = told(journal)
    assert left == records[len(records) - len(left) :]
    assert sum(path.stat().st_size for path in journal.directory.iterdir()) <= 5 * SMALL
    assert (len(left) > 0) == (bound[0] == "KEPT_BYTES")


def test_a_full_disk_refuses_nothing_while_there_are_kept_segments(
    journal: Journal, clock: SetClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They go, oldest first and no more than it takes, before a call does."""
    records = carry(journal, clock, 600)
    files = len(kept_in(journal))
    assert files > 4
    real = os.posix_fallocate

    def full(fd: int, offset: int, length: int) -> None:
        if len(kept_in(journal)) > files - 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(fd, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", full)
    for _ in range(100):
        journal.opened(make_record(clock.new_id()))

    assert len(kept_in(journal)) in (files - 3, files - 4)  # two make the room of one
    assert (left := told(journal)) == records[len(records) - len(left) :]


def test_a_broken_disk_costs_no_kept_segment(
    journal: Journal, clock: SetClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room would not mend it."""
    carry(journal, clock, 200)
    before = kept_in(journal)
    running = make_record(clock.new_id())
    journal.opened(running)

    def broken(*_: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "posix_fallocate", broken)
    for _ in range(2000):
        journal.progress(running.request_id, Usage(1, 0, 1), 1)
    with pytest.raises(JournalFull):
        for _ in range(100):
            journal.opened(make_record(clock.new_id()))

    assert kept_in(journal) == before


def test_a_kept_file_is_printed(journal: Journal, clock: SetClock, capsys: pytest.CaptureFixture[str]) -> None:
    """`tollgate journal` reads it like one in quarantine."""
    [record] = carry(journal, clock, 1)
    journal.close()

    assert print_calls(kept_in(journal)) == 0
    assert json.loads(capsys.readouterr().out)["request_id"] == record.request_id


def write(journal: Journal, clock: SetClock, number: int) -> list[UsageRecord]:
    """Open and close calls."""
    records = [make_record(clock.new_id()) for _ in range(number)]
    for record in records:
        journal.opened(record)
        journal.closed(record)
    return records


def flush(journal: Journal) -> None:
    """Mark as flushed whatever waits."""
    journal.waiting.mark_flushed(journal.waiting.take(10**6))


def carry(journal: Journal, clock: SetClock, number: int) -> list[UsageRecord]:
    """Let calls begin, end and be flushed, ten at a time; a millisecond passes between them."""
    records = []
    for _ in range(0, number, 10):
        records += write(journal, clock, min(10, number))
        flush(journal)
        clock.move(0.001)
    return records


def told(journal: Journal, since: float = 0) -> list[UsageRecord]:
    """Return what would be delivered again."""
    return [record for segment in journal.kept(since) for record in segment]


def kept_in(journal: Journal) -> list[Path]:
    """Return the kept files."""
    return sorted(journal.directory.glob(f"*{KEPT}"))
