# The journal: what it has taken it gives back, whatever cuts it short.

from __future__ import annotations

import errno
import os
import shutil
import tracemalloc
import zlib
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from billing.core.errors import JournalFull
from billing.core.records import MOST_NANOUSD, MOST_TOKENS, Attempt, Served, Status, UsageRecord
from billing.journal.adoption import Progress
from billing.journal.backlog import FRESH
from billing.journal.journal import Journal
from billing.journal.segments import HEAD, SUFFIX, Fsync, Kind, Segment
from protocol.usage import Usage
from tests.support.clock import SetClock
from tests.support.factories import make_record
from tests.support.journals import adopt, left_in

SMALL = 64 * 1024


@pytest.fixture
def journal(tmp_path: Path, clock: SetClock) -> Journal:
    """A journal with small segments."""
    return Journal.open(tmp_path / "journal", clock=clock, segment_bytes=SMALL)


def test_closed_calls_wait_in_order_until_they_are_flushed(journal: Journal, clock: SetClock) -> None:
    """What was closed is given out, and given out again, until it is marked; then its segments go."""
    records = [make_record(clock.new_id()) for _ in range(200)]
    for record in records:
        run(journal, record)

    assert take(journal, 3) == records[:3] == take(journal, 3)
    journal.waiting.mark_flushed(journal.waiting.take(150))
    assert (journal.backlog, take(journal)) == (50, records[150:])
    journal.waiting.mark_flushed(journal.waiting.take(1000))
    assert len(left_in(journal.directory)) <= 1
    journal.close()
    assert left_in(journal.directory) == []


def test_a_living_journal_is_not_adopted(journal: Journal, clock: SetClock) -> None:
    """The lock tells that somebody still owns a segment."""
    run(journal, make_record(clock.new_id()))

    assert list(adopt(journal.directory, clock)) == []


def test_what_waits_to_be_flushed_is_known(journal: Journal, clock: SetClock) -> None:
    """Own closes and adopted ones, also while a flush carries them; running calls and flushed ones are not in it."""
    dead = Journal.open(journal.directory, clock=clock)
    adopted, own, flushed, running = (make_record(clock.new_id()) for _ in range(4))
    run(dead, adopted)
    dead.close()
    sum(journal.adopt_each())
    for record in (own, flushed):
        run(journal, record)
    journal.opened(running)

    taken = journal.waiting.take(10)
    assert take(journal) == [adopted, own, flushed]
    journal.waiting.mark_flushed(taken[2:])
    assert take(journal) == [adopted, own]


def test_the_calls_of_the_dead_come_as_they_ended(journal: Journal, clock: SetClock) -> None:
    """Closed ones as closed, broken streams at their last progress, silent ones as failed."""
    closed, streaming, silent = (make_record(clock.new_id(), **NOTHING_YET) for _ in range(3))
    for record in (closed, streaming, silent):
        journal.opened(record)
    journal.progress(streaming.request_id, Usage(50, 10, 7), 111)
    journal.progress(streaming.request_id, Usage(50, 10, 9, 2, 3), 222)
    journal.progress(silent.request_id, Usage(50), 333)
    journal.closed(final := replace(closed, status=Status.ANSWERED, output_tokens=5, cost_nanousd=99))
    journal.close()

    found = {record.request_id: record for record in adopt(journal.directory, clock)}

    assert found == {
        closed.request_id: final,
        streaming.request_id: replace(
            streaming,
            status=Status.INTERRUPTED,
            input_tokens=50,
            cached_input_tokens=10,
            output_tokens=9,
            reasoning_tokens=2,
            cache_write_tokens=3,
            cost_nanousd=222,
        ),
        silent.request_id: replace(silent, status=Status.FAILED, input_tokens=50, cost_nanousd=0),
    }
    assert left_in(journal.directory) == []


def test_progress_is_read_across_versions(journal: Journal, clock: SetClock) -> None:
    """A neighbour of an earlier version knows no target in it, or not its price, and its journal names none."""
    served = Served("large", "elsewhere", "there http://x", "price", "fallback")
    known = ("large", "elsewhere", "there http://x")
    written = msgspec.msgpack.encode(Progress("id", Usage(50), 5, served))
    before = [msgspec.msgpack.encode(("id", Usage(50), 5, *more)) for more in ((), (known,))]

    assert [msgspec.msgpack.decode(one, type=Progress).served for one in before] == [None, Served(*known)]
    assert msgspec.msgpack.decode(written, type=ProgressBefore) == ProgressBefore("id", Usage(50), 5)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(served), type=ServedBefore) == ServedBefore(*known)


class ServedBefore(msgspec.Struct, frozen=True, array_like=True):
    """As it was before it named the price."""

    model_used: str
    provider: str
    provider_endpoint: str


class ProgressBefore(msgspec.Struct, frozen=True, array_like=True):
    """As it was before it named the target."""

    request_id: str
    usage: Usage
    cost_nanousd: int


def test_a_neighbour_takes_over_and_flushes(journal: Journal, clock: SetClock) -> None:
    """An adopted call waits with the neighbour's own, and its segment goes once it is flushed."""
    record = make_record(clock.new_id())
    run(journal, record)
    journal.opened(make_record(clock.new_id(), **NOTHING_YET))
    journal.close()
    neighbour = Journal.open(journal.directory, clock=clock)

    assert (sum(neighbour.adopt_each()), sum(neighbour.adopt_each())) == (2, 0)

    taken = neighbour.waiting.take(10)
    assert [each.record.status for each in taken] == [Status.ANSWERED, Status.FAILED]
    neighbour.waiting.mark_flushed(taken)
    assert left_in(journal.directory) == []


def test_a_neighbour_that_dies_too_leaves_it_all_to_the_next(journal: Journal, clock: SetClock) -> None:
    """An interrupted call ends once: whoever adopts it second finds it as the first left it."""
    streaming = make_record(clock.new_id(), **NOTHING_YET)
    journal.opened(streaming)
    journal.progress(streaming.request_id, Usage(50, 0, 9), 222)
    journal.close()
    neighbour = Journal.open(journal.directory, clock=clock)
    sum(neighbour.adopt_each())
    first = take(neighbour, 1)
    neighbour.close()

    assert list(adopt(journal.directory, clock)) == first


def test_a_tail_cut_anywhere_loses_only_what_was_cut(tmp_path: Path, journal: Journal, clock: SetClock) -> None:
    """Cut at every byte, the records before the cut are all there and nothing is made up."""
    records = [make_record(clock.new_id(), input_tokens=number) for number in range(2)]
    ends = []
    for record in records:
        run(journal, record)
        ends.append(size_of(journal))
    journal.close()
    [segment] = left_in(journal.directory)
    whole = segment.read_bytes()

    for cut in range(ends[-1] + 1):
        torn = tmp_path / "torn"
        torn.mkdir()
        (torn / segment.name).write_bytes(whole[:cut])
        found = list(adopt(torn, clock))
        shutil.rmtree(torn, ignore_errors=True)

        complete = sum(end <= cut for end in ends)
        assert found[:complete] == records[:complete]
        assert all(record.status is Status.FAILED and record.cost_nanousd == 0 for record in found[complete:])
        assert len(found) <= complete + 1


@settings(max_examples=75, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_what_damage_left_whole_is_found(tmp_path: Path, data: st.DataObject) -> None:
    """Overwrite any part of a segment, cut it anywhere: every call whose close is whole comes, none is made up."""
    clock = SetClock()
    journal = Journal.open(tmp_path / "journal", clock=clock, segment_bytes=SMALL)
    calls = [make_record(clock.new_id(), metadata={"number": "x" * number * 9}) for number in range(8)]
    ends = []
    for record in calls:
        journal.opened(replace(record, **NOTHING_YET))
        begin = size_of(journal)
        journal.closed(record)
        ends.append((begin, size_of(journal)))
    journal.close()
    [segment] = left_in(journal.directory)
    whole = segment.read_bytes()
    start = data.draw(st.integers(0, ends[-1][1] - 1), label="start")
    noise = data.draw(st.binary(min_size=1, max_size=1200), label="noise")
    cut = data.draw(st.none() | st.integers(0, ends[-1][1]), label="cut")
    damaged = (whole[:start] + noise + whole[start + len(noise) :])[:cut]
    segment.write_bytes(damaged)

    found = {record.request_id: record for record in adopt(journal.directory, clock)}

    for record, (begin, end) in zip(calls, ends, strict=True):
        if damaged[begin:end] == whole[begin:end]:
            assert found.pop(record.request_id) == record
    known = {record.request_id: record for record in calls}
    for request_id, record in found.items():  # an open whose close is gone
        assert record == replace(known[request_id], **NOTHING_YET)
    shutil.rmtree(journal.directory)


def test_a_damaged_segment_is_kept_for_people(journal: Journal, clock: SetClock) -> None:
    """What follows a flipped bit is adopted and flushed; then the file is set aside and not adopted again."""
    dead = Journal.open(journal.directory, clock=clock)
    records = [make_record(clock.new_id()) for _ in range(5)]
    for record in records:
        run(dead, record)
    middle = dead.waiting.take(3)[2].place
    dead.close()
    [segment] = left_in(journal.directory)
    assert middle is not None
    with segment.open("r+b") as file:
        file.seek(middle + 40)
        file.write(b"\xff")

    assert (sum(journal.adopt_each()), journal.damaged) == (5, 1)

    found = take(journal)
    assert sorted(record.request_id for record in found) == sorted(record.request_id for record in records)
    assert [record.status for record in found].count(Status.FAILED) == 1  # its open is left
    assert segment.exists()
    journal.waiting.mark_flushed(journal.waiting.take(10))
    assert [path.suffix for path in left_in(journal.directory)] == [".unreadable"]
    assert sum(journal.adopt_each()) == 0


def test_a_record_inside_a_callers_words_is_never_taken_for_ours(journal: Journal, clock: SetClock) -> None:
    """A caller may write a whole journal record into his metadata: damage beside it does not bring it to life."""
    forged = msgspec.msgpack.encode(make_record(clock.new_id(), team_id="team_b"))
    words = HEAD.pack(len(forged), zlib.crc32(forged, Kind.CLOSED), Kind.CLOSED) + forged
    segment = Segment.create(journal.directory / f"mine{SUFFIX}", SMALL)
    place = segment.append(Kind.CLOSED, msgspec.msgpack.encode(make_record(clock.new_id())) + words)
    os.pwrite(segment.fd, b"\xff" * 4, place)
    segment.close()

    assert list(adopt(journal.directory, clock)) == []


@pytest.mark.parametrize(("fsync", "synced"), [("never", (0, 0)), ("interval", (0, 1)), ("always", (4, 5))])
def test_the_journal_is_forced_to_the_disk_as_often_as_asked(
    tmp_path: Path, clock: SetClock, monkeypatch: pytest.MonkeyPatch, fsync: Fsync, synced: tuple[int, int]
) -> None:
    """``always``: each record before the call goes on; ``interval``: when the flusher says so; ``never``: never."""
    count = []
    real = os.fdatasync

    def counted(fd: int) -> None:
        count.append(fd)
        real(fd)

    monkeypatch.setattr(os, "fdatasync", counted)
    journal = Journal.open(tmp_path / "journal", fsync=fsync, clock=clock, segment_bytes=SMALL)

    for _ in range(2):
        run(journal, make_record(clock.new_id()))
    at_once = len(count)
    if fsync != "never":
        journal.sync()

    assert (at_once, len(count)) == synced


def test_a_waiting_call_takes_few_bytes(tmp_path: Path, clock: SetClock) -> None:
    """While Postgres is away the closes wait on the disk: what is kept of each in memory, but for the
    first, is where it lies."""
    journal = Journal.open(tmp_path / "journal", clock=clock)
    for _ in range(FRESH):
        run(journal, make_record(clock.new_id()))
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for _ in range(5000):
        run(journal, make_record(clock.new_id()))
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()

    assert journal.backlog == 5000 + FRESH
    assert grown / 5000 < 64


def test_a_full_disk_refuses_the_open_and_never_the_close(
    journal: Journal, clock: SetClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room for the close is set aside at the open: when the disk is full, new calls wait and running ones end well."""
    running = []

    def no_room(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    first = make_record(clock.new_id(), **NOTHING_YET)
    journal.opened(first)
    running.append(first)
    monkeypatch.setattr(os, "posix_fallocate", no_room)
    with pytest.raises(JournalFull):
        while True:
            record = make_record(clock.new_id(), **NOTHING_YET)
            journal.opened(record)
            running.append(record)
    for _ in range(2000):
        journal.progress(first.request_id, Usage(1, 0, 1), 1)  # takes what is not promised, and no more
    wide = tuple(
        Attempt("provider/region/https://a.long.name.example/v1/model", "upstream_timeout", 1.5) for _ in range(20)
    )
    for record in running:
        journal.closed(replace(record, status=Status.ANSWERED, output_tokens=7, attempts=wide))

    assert len(running) > 10
    assert not journal.waiting.in_memory
    assert size_of(journal) <= SMALL
    assert [record.output_tokens for record in take(journal)] == [7] * len(running)


def test_a_close_the_disk_refuses_is_still_flushed(
    journal: Journal, clock: SetClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even when the disk fails outright, the record reaches the ledger through memory."""
    record = make_record(clock.new_id())
    journal.opened(record)

    def broken(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "pwrite", broken)
    journal.closed(record)

    assert take(journal) == [record]
    journal.waiting.mark_flushed(journal.waiting.take(1))
    assert journal.backlog == 0


@pytest.mark.parametrize("number", [2**31, 2**63, 10**19, 10**30])
def test_a_number_too_large_for_its_column_is_closed_at_the_most(
    journal: Journal, clock: SetClock, number: int
) -> None:
    """Whatever an upstream reports, progress and close are written, and the row comes at what the ledger can hold."""
    streaming, closed = make_record(clock.new_id()), make_record(clock.new_id())
    journal.opened(streaming)
    journal.progress(streaming.request_id, Usage(number, 0, number), 10**30)
    run(journal, replace(closed, input_tokens=number, output_tokens=number, cost_nanousd=10**30))

    [taken] = take(journal)
    journal.close()

    assert (taken.input_tokens, taken.output_tokens, taken.cost_nanousd) == (MOST_TOKENS, MOST_TOKENS, MOST_NANOUSD)
    assert [(record.output_tokens, record.cost_nanousd) for record in adopt(journal.directory, clock)] == [
        (MOST_TOKENS, MOST_NANOUSD)
    ] * 2


def test_a_close_that_cannot_be_encoded_does_not_fail(journal: Journal, clock: SetClock) -> None:
    """A text that has no bytes waits in memory; the flusher decides what becomes of it."""
    record = make_record(clock.new_id(), user_tag="\ud800")
    journal.opened(replace(record, user_tag=None))

    journal.closed(record)

    assert take(journal) == [record]


@pytest.mark.parametrize(("code", "state"), [(errno.ENOSPC, "full"), (errno.EROFS, "not writable")])
def test_a_journal_that_cannot_be_written_says_so(
    journal: Journal, clock: SetClock, monkeypatch: pytest.MonkeyPatch, code: int, state: str
) -> None:
    """Before any call is refused, and until one is taken again."""
    assert journal.check() == "ok"
    record = make_record(clock.new_id())

    def broken(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", broken)
        with pytest.raises(JournalFull):
            journal.opened(record)
        assert journal.check() == state
    journal.opened(record)
    assert journal.check() == "ok"

    fresh = Journal.open(journal.directory, clock=clock)
    monkeypatch.setattr(os, "posix_fallocate", broken)
    assert fresh.check() == state


def test_a_damaged_close_holds_up_no_other(journal: Journal, clock: SetClock) -> None:
    """What the disk no longer gives back is left out, the others come, and the file is kept for people."""
    dead = Journal.open(journal.directory, clock=clock, segment_bytes=SMALL)
    first, damaged, last = (make_record(clock.new_id()) for _ in range(3))
    for record in (first, damaged, last):
        run(dead, record)
    dead.close()
    sum(journal.adopt_each())
    waiting = journal.waiting.take(10)[1]
    assert waiting.segment is not None and waiting.place is not None
    os.pwrite(waiting.segment.fd, b"\xff" * 8, waiting.place + 20)

    assert take(journal) == [first, last]
    assert (journal.backlog, journal.damaged) == (2, 1)
    journal.waiting.mark_flushed(journal.waiting.take(10))
    journal.close()

    assert [path.suffix for path in left_in(journal.directory)] == [".unreadable"]


def test_the_first_of_a_long_wait_need_not_be_read_again(journal: Journal, clock: SetClock) -> None:
    """A flush takes the records of the first closes from memory; later ones, and large ones, from the disk: all of them
    come as they were closed, in their order."""
    records = [make_record(clock.new_id(), metadata={"n": str(number)}) for number in range(FRESH + 50)]
    records[5] = replace(records[5], metadata={"note": "x" * 4000})
    for record in records:
        run(journal, record)

    taken = journal.waiting.take(10**6)
    again = journal.waiting.take(10**6)
    assert [closed.record for closed in taken] == records
    assert [number for number in range(len(taken)) if taken[number] is not again[number]] == [
        5,
        *range(FRESH + 1, len(taken)),
    ]
    journal.waiting.mark_flushed(taken)
    assert not journal.waiting._fresh
    run(journal, records[0])
    assert journal.waiting.take(1)[0] is journal.waiting.take(1)[0]


def test_a_flush_is_bounded_by_bytes(journal: Journal, clock: SetClock) -> None:
    """Large records come a few at a time, and one that is larger than the bound comes alone."""
    records = [make_record(clock.new_id(), metadata={"note": "x" * 4000}) for _ in range(5)]
    for record in records:
        run(journal, record)

    assert [closed.record for closed in journal.waiting.take(10, most_bytes=10_000)] == records[:2]
    assert [closed.record for closed in journal.waiting.take(10, most_bytes=1)] == records[:1]


def test_a_segment_of_another_version_is_kept_for_people(journal: Journal, clock: SetClock) -> None:
    """What we cannot read is set aside, and holds up nothing else."""
    assert journal.directory.is_dir()
    strange = Segment.create(journal.directory / f"strange{SUFFIX}", SMALL)
    strange.append(Kind.CLOSED, msgspec.msgpack.encode({"request_id": 5}))
    strange.close()
    dead = Journal.open(journal.directory, clock=clock)
    run(dead, make_record(clock.new_id()))
    dead.close()

    assert sum(journal.adopt_each()) == 1

    assert [path.name for path in journal.directory.glob("*.unreadable")] == ["strange.unreadable"]
    assert sum(journal.adopt_each()) == 0


def test_the_oldest_call_is_known(journal: Journal, clock: SetClock) -> None:
    """The watermark of the ledger is the oldest call that is not flushed, running or closed."""
    first = make_record(clock.new_id())
    journal.opened(first)
    clock.move(60)
    second = make_record(clock.new_id())
    run(journal, second)

    assert journal.oldest == clock.now() - 60
    journal.closed(first)
    assert journal.oldest == clock.now() - 60
    journal.waiting.mark_flushed(closed for closed in journal.waiting.take(10) if closed.record == first)
    assert journal.oldest == clock.now()
    journal.waiting.mark_flushed(journal.waiting.take(10))
    assert journal.oldest is None


def test_closing_tells_the_flusher(journal: Journal, clock: SetClock) -> None:
    """Whoever flushes is woken by every close."""
    rings: list[int] = []
    journal.on_closed = lambda: rings.append(1)

    run(journal, make_record(clock.new_id()))

    assert rings == [1]


NOTHING_YET = {
    "status": Status.FAILED,
    "input_tokens": 0,
    "cached_input_tokens": 0,
    "output_tokens": 0,
    "cost_nanousd": 0,
}

replace = msgspec.structs.replace


def run(journal: Journal, record: UsageRecord) -> None:
    """Open and close a call."""
    journal.opened(replace(record, **NOTHING_YET))
    journal.closed(record)


def take(journal: Journal, limit: int = 1000) -> list[UsageRecord]:
    """Return what waits to be flushed."""
    return [closed.record for closed in journal.waiting.take(limit)]


def size_of(journal: Journal) -> int:
    """Return how many bytes of the current segment are written."""
    assert journal._current is not None
    return journal._current.end
