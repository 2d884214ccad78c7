# Closed calls that wait to be flushed: where their closes lie in the segments, and those that the disk did not take.
# Records that the ledger will never take are kept where operators find them.

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import structlog
from msgspec import Struct

from billing.core.ids import moment_of
from billing.core.records import UsageRecord
from billing.journal.adoption import close_at
from billing.journal.segments import TOO_OLD, UNREADABLE, Segment

TAKEN_BYTES = 8 * 1024 * 1024  # of records in one flush
FRESH = 1000  # closes whose records stay in memory until they are flushed
REJECTED = "rejected.jsonl"
CLOSE_ROOM = 2048  # bytes a close may need beyond what its open took: names, times, attempts

log = structlog.get_logger(__name__)


class Closed(Struct, frozen=True):
    """A closed call that waits to be flushed, and where its close lies; ``place`` is None if the disk failed."""

    record: UsageRecord
    segment: Segment | None
    place: int | None
    size: int  # bytes, about


class Backlog:
    """What one journal has yet to bring to the ledger. ``free`` is told of segments that may hold nothing more."""

    def __init__(self, directory: Path, segments: Mapping[Segment, None], free: Callable[[Segment], None]) -> None:
        self.in_memory: dict[str, Closed] = {}  # closes that the disk did not take
        self.damaged = 0  # segments that were whole and no longer give back a close
        self._directory = directory
        self._segments = segments
        self._free = free
        self._fresh: dict[tuple[Segment, int], Closed] = {}  # closes in segments, some that need not be read again

    def __len__(self) -> int:
        return len(self.in_memory) + sum(len(segment.waiting) for segment in self._segments)

    @property
    def moments(self) -> Iterator[int]:
        """When the oldest of each place began; unix milliseconds."""
        yield from (min(segment.waiting.moments) for segment in self._segments if segment.waiting)
        if self.in_memory:
            yield moment_of(min(self.in_memory))

    def add(self, record: UsageRecord, segment: Segment, place: int, size: int) -> None:
        """Wait for a close that lies in a segment."""
        segment.waiting.add(place, moment_of(record.request_id))
        if len(self._fresh) < FRESH and size <= CLOSE_ROOM:
            self._fresh[segment, place] = Closed(record, segment, place, size)

    def keep(self, record: UsageRecord, segment: Segment | None) -> None:
        """Wait for a close that the disk did not take."""
        self.in_memory[record.request_id] = Closed(record, segment, None, CLOSE_ROOM)

    def take(self, limit: int, most_bytes: int = TAKEN_BYTES) -> list[Closed]:
        """Return closed calls, oldest first: up to ``limit``, and up to ``most_bytes`` of records, but at least one.

        They stay until ``mark_flushed``. A close that the disk no longer gives back is logged and left out, and its
        segment is kept for operators.
        """
        taken: list[Closed] = []
        size = 0
        for closed in self._each_closed():
            if taken and size + closed.size > most_bytes:
                break
            taken.append(closed)
            size += closed.size
            if len(taken) == limit or size >= most_bytes:
                break
        return taken

    def mark_flushed(self, flushed: Iterable[Closed]) -> None:
        """Forget calls that are safe in the ledger, and free the segments that hold nothing else."""
        places: dict[Segment, set[int]] = defaultdict(set)
        for closed in flushed:
            if closed.segment is not None and closed.place is not None:
                places[closed.segment].add(closed.place)
            else:
                self.in_memory.pop(closed.record.request_id, None)
                if closed.segment is not None:
                    closed.segment.promised -= closed.segment.calls.pop(closed.record.request_id, 0)
                    self._free(closed.segment)
        for segment, some in places.items():
            self._forget(segment, some)

    def quarantine(self, refused: Sequence[Closed]) -> int:
        """Let go of calls that the ledger refuses because they are too old; return how many. Their segments are kept
        once all else in them is flushed; a record that is in no segment is moved to the rejected ones, and stays
        unflushed if the disk does not take it."""
        calls: dict[Segment, list[Closed]] = defaultdict(list)
        gone: list[Closed] = []
        for closed in refused:
            if (closed.segment is None or closed.place is None) and put_aside(self._directory, closed.record) is None:
                continue
            gone.append(closed)
            if closed.segment is not None:
                calls[closed.segment].append(closed)
                closed.segment.is_too_old = True
        for segment, some in calls.items():
            log.error("journal_too_old", path=str(segment.path.with_suffix(TOO_OLD)), calls=len(some))
        self.mark_flushed(gone)
        return len(gone)

    def _each_closed(self) -> Iterator[Closed]:
        """Yield what waits, as it lies on the disk; leave out for good what it no longer gives back."""
        yield from tuple(self.in_memory.values())
        for segment in tuple(self._segments):
            unreadable = set()
            try:
                for place in tuple(segment.waiting.places):
                    if (fresh := self._fresh.get((segment, place))) is not None:
                        yield fresh
                        continue
                    try:
                        record, size = close_at(segment, place)
                    except (OSError, msgspec.DecodeError) as exc:
                        log.error("journal_close_unreadable", path=str(segment.path), place=place, error=str(exc))
                        unreadable.add(place)
                    else:
                        yield Closed(record, segment, place, size)
            finally:
                if unreadable:
                    self.damaged += segment.gaps == 0
                    segment.gaps += len(unreadable)
                    self._forget(segment, unreadable)

    def _forget(self, segment: Segment, places: set[int]) -> None:
        segment.waiting.forget(places)
        for place in places:
            self._fresh.pop((segment, place), None)
        self._free(segment)


def put_aside(directory: Path, record: UsageRecord) -> Path | None:
    """Keep a record that the ledger will never take; return the file, or None if the disk does not take it."""
    path = directory / REJECTED
    try:
        with path.open("ab") as file:
            file.write(_line(record) + b"\n")
    except OSError as exc:
        log.error("journal_not_put_aside", request_id=record.request_id, file=str(path), error=str(exc))
        return None
    return path


def quarantined(directory: Path) -> int:
    """Return how many files are kept for operators: with damage, with calls too old for the ledger, or with records
    that it refuses."""
    try:
        names = [path.name for path in directory.iterdir()]
    except OSError:  # ``Journal.check`` says so
        return 0
    return sum(name == REJECTED or name.endswith((UNREADABLE, TOO_OLD)) for name in names)


def _line(record: UsageRecord) -> bytes:
    try:
        return msgspec.json.encode(record)
    except (ValueError, TypeError, OverflowError):  # not even JSON: as Python shows it
        return msgspec.json.encode({"request_id": ascii(record.request_id), "record": ascii(record)})
