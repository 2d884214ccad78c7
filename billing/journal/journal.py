# The journal: what was promised and what was used, on local disk, before anything leaves the process.
#
# A call is opened before its upstream is asked, makes progress while it streams, and is closed before its last bytes
# go out. All records of a call lie in one segment, so a segment is whole in itself: when everything in it has been
# flushed, it is put away, and kept for a day. Records survive the death of the process; ``fsync`` makes them survive
# the machine.

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Literal, TypeVar

import msgspec
import structlog

from billing.core.edges import Clock
from billing.core.errors import JournalFull
from billing.core.ids import moment_of
from billing.core.records import Served, UsageRecord, bounded, bounded_cost, bounded_usage
from billing.journal.adoption import Progress, closes_in, seize_segments, settle_segment
from billing.journal.backlog import CLOSE_ROOM, Backlog, quarantined
from billing.journal.kept import Kept
from billing.journal.segments import HEAD, KEPT, SUFFIX, TOO_OLD, UNREADABLE, Fsync, Kind, Segment
from protocol.usage import Usage

SEGMENT_BYTES = 8 * 1024 * 1024
FULL = (errno.ENOSPC, errno.EDQUOT)

log = structlog.get_logger(__name__)

T = TypeVar("T")


class Journal:
    """The journal of one process. Single-threaded; opened after the last fork."""

    def __init__(self, directory: Path, *, fsync: Fsync, clock: Clock, segment_bytes: int) -> None:
        self.directory = directory
        self.fsync: Fsync = fsync
        self.token = f"{os.getpid()}-{secrets.token_hex(4)}"  # in the name of every segment that we make
        self.on_closed: Callable[[], None] = lambda: None  # called whenever something waits to be flushed
        self.on_record: Callable[[UsageRecord], None] | None = None  # is told how calls end, while something listens
        self._damaged = 0  # segments found with gaps
        self._clock = clock
        self.kept_files = Kept(directory, clock)  # of neighbours, too
        self._segment_bytes = segment_bytes
        self._current: Segment | None = None
        self._segments: dict[Segment, None] = {}  # in the order in which they came
        self._open: dict[str, Segment] = {}  # calls that run, and where their records go
        self.waiting = Backlog(directory, self._segments, self._free)  # closed calls that are to be flushed
        self._numbers = count()
        self._encode = msgspec.msgpack.Encoder().encode

    @classmethod
    def open(
        cls, directory: Path, *, fsync: Fsync = "never", clock: Clock, segment_bytes: int = SEGMENT_BYTES
    ) -> Journal:
        """Open this process's journal in ``directory``, which all processes of a machine may share."""
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        return cls(directory, fsync=fsync, clock=clock, segment_bytes=segment_bytes)

    def begin_again(self) -> None:
        """Write from now on as another process would; what was written stays where it is."""
        self.token = f"{os.getpid()}-{secrets.token_hex(4)}"
        previous, self._current = self._current, None
        if previous is not None:
            self._free(previous)

    def opened(self, record: UsageRecord) -> None:
        """Write down that a call begins, and reserve room for its close.

        Raises ``JournalFull`` when the disk has no room: the call may not begin.
        """
        body = self._encode(record)
        promise = HEAD.size + len(body) + CLOSE_ROOM
        segment = self._segment_for(HEAD.size + len(body) + promise)
        try:
            segment.append(Kind.OPENED, body)
        except OSError as exc:
            raise _full(exc) from exc
        segment.promised += promise
        segment.calls[record.request_id] = promise
        self._open[record.request_id] = segment

    def check(self) -> Literal["ok", "full", "not writable", "quarantined"]:
        """Say whether the next call could be opened, by making the room that it would use and writing there; and
        whether files are in quarantine."""
        try:
            self._segment_for(2 * CLOSE_ROOM).probe()
        except (OSError, JournalFull) as exc:
            cause = exc.__cause__ if isinstance(exc, JournalFull) else exc
            return "full" if getattr(cause, "errno", None) in (*FULL, errno.EFBIG) else "not writable"
        return "quarantined" if self.quarantined else "ok"

    def progress(self, request_id: str, usage: Usage, cost_nanousd: int, served: Served | None = None) -> None:
        """Write down how much the call has used so far, and at which target if not the one that it was opened with.

        Left out on a full disk, where only closes have room.
        """
        segment = self._open.get(request_id)
        if segment is None:
            return
        body = self._encode(Progress(request_id, bounded_usage(usage), bounded_cost(cost_nanousd), served))
        if segment.has_room(HEAD.size + len(body)) or self._grow(segment, HEAD.size + len(body)):
            try:
                segment.append(Kind.PROGRESS, body)
            except OSError as exc:
                log.warning("journal_progress_lost", request_id=request_id, error=str(exc))

    def closed(self, record: UsageRecord) -> None:
        """Write down how the call ended. Never fails: what the disk does not take waits in memory to be flushed."""
        record = bounded(record)
        segment = self._open.pop(record.request_id, None)
        try:
            self._write_close(record, segment)
        except (OSError, JournalFull, ValueError, TypeError, OverflowError) as exc:  # the disk's, or a value's
            log.error("journal_close_in_memory", request_id=record.request_id, error=str(exc))
            self.waiting.keep(record, segment)
        self.on_closed()
        if self.on_record is not None:
            self.on_record(record)

    def adopt_each(self) -> Iterator[int]:
        """Take over the segments of dead processes one by one, and tell of each how many of its calls now wait.

        A segment whose records we cannot decode, such as one of a later version, is kept under another name for
        operators, and so is one with gaps, once what could be read of it is flushed.
        """
        for segment in seize_segments(self.directory, self._clock.now()):
            try:
                without_room = settle_segment(segment)
            except msgspec.DecodeError as exc:
                log.error("journal_unreadable", path=str(segment.path), error=str(exc))
                segment.put_away(UNREADABLE, self._clock.now())
                self._damaged += 1
                continue
            except OSError as exc:
                log.error("journal_unreadable", path=str(segment.path), error=str(exc))
                segment.close()  # the disk may give it back another time
                continue
            for record in without_room:
                segment.calls[record.request_id] = 0
                self.waiting.keep(record, segment)
            self._damaged += segment.gaps > 0
            self._segments[segment] = None
            adopted = len(segment.waiting) + len(without_room)
            self._free(segment)
            if adopted:
                self.on_closed()
            yield adopted

    def kept(self, since: float = 0.0) -> Iterator[Iterator[UsageRecord]]:
        """Yield again, a segment at a time, every closed call that was flushed at ``since`` (unix seconds) or later;
        some that were flushed before may be among them. For a ledger that has forgotten: to one that has not, it says
        nothing new.

        Calls of this process, and of dead processes in this folder; live neighbours deliver theirs. Other things may
        happen between one call and the next: each segment is read when it is come to, and its records one by one.
        """
        own = [segment.path for segment in self._segments]
        for path in (*self.kept_files.paths(since, self.token), *own):
            yield self._flushed_in(path)

    @property
    def quarantined(self) -> int:
        """Files kept for operators: with damage, with calls too old for the ledger, or with records that it refuses."""
        return quarantined(self.directory)

    @property
    def damaged(self) -> int:
        """Segments found with gaps."""
        return self._damaged + self.waiting.damaged

    @property
    def backlog(self) -> int:
        """Closed calls that wait to be flushed."""
        return len(self.waiting)

    @property
    def oldest(self) -> float | None:
        """When the oldest call that is not flushed yet began, running or closed; unix seconds."""
        moments = [*self.waiting.moments, *([moment_of(min(self._open))] if self._open else ())]
        return min(moments) / 1000 if moments else None

    def sync(self) -> None:
        """Force everything written so far to the disk; for ``fsync: interval``, from any thread."""
        for segment in tuple(self._segments):
            try:
                os.fdatasync(segment.fd)
            except OSError:
                continue  # freed meanwhile

    def close(self) -> None:
        """Let go of every segment. Unflushed calls stay on disk for the next process."""
        for segment in self._segments:
            if segment.is_done:
                segment.free(self._clock.now())
            else:
                segment.close()
        self._segments.clear()
        self._current = None

    def _flushed_in(self, path: Path) -> Iterator[UsageRecord]:
        segment = next((segment for segment in self._segments if segment.path == path), None)
        waiting = frozenset(segment.waiting.places) if segment is not None else frozenset[int]()
        names = [path.with_suffix(suffix) for suffix in (path.suffix, KEPT, UNREADABLE, TOO_OLD)]
        yield from closes_in(next(filter(Path.exists, names), path), waiting)  # it may have been put away meanwhile

    def _write_close(self, record: UsageRecord, segment: Segment | None) -> None:
        body = self._encode(record)
        size = HEAD.size + len(body)
        segment = segment or self._segment_for(size)
        promise = segment.calls.get(record.request_id, 0)
        segment.promised -= promise
        if promise:
            segment.calls[record.request_id] = 0
        if size > promise and not segment.has_room(size) and not self._grow(segment, size):
            body = self._encode(msgspec.structs.replace(record, attempts=(), metadata=None))
        place = segment.append(Kind.CLOSED, body)
        segment.calls.pop(record.request_id, None)
        self.waiting.add(record, segment, place, len(body))

    def _segment_for(self, size: int) -> Segment:
        """Return the current segment if ``size`` more bytes fit, else the next one."""
        if self._current is not None and self._current.has_room(size):
            return self._current
        name = f"{self._clock.now() * 1000:015.0f}-{self.token}-{next(self._numbers)}{SUFFIX}"
        size, sync = max(self._segment_bytes, 2 * size), self.fsync == "always"
        try:
            segment = self._in_room(size, lambda: Segment.create(self.directory / name, size, sync=sync))
        except OSError as exc:
            raise _full(exc) from exc
        previous, self._current = self._current, segment
        self._segments[segment] = None
        if previous is not None:
            self._free(previous)
        return segment

    def _grow(self, segment: Segment, size: int) -> bool:
        try:
            self._in_room(size, lambda: segment.grow(size))
        except OSError:
            return False
        return True

    def _in_room(self, size: int, reserve: Callable[[], T]) -> T:
        """Reserve ``size`` bytes; on a full disk, segments that are only kept are removed."""
        while True:
            try:
                return reserve()
            except OSError as exc:
                if exc.errno not in FULL or not self.kept_files.make_room(size):
                    raise

    def _free(self, segment: Segment) -> None:
        if not segment.is_done or segment not in self._segments:
            return
        if segment is self._current:
            if segment.end < segment.size // 2:
                return  # most of it is still to be used
            self._current = None
        del self._segments[segment]
        segment.free(self._clock.now())


def _full(exc: OSError) -> JournalFull:
    log.error("journal_full", error=str(exc))
    return JournalFull(
        "This gateway has no room left to write calls down. Try again on another one, or later.",
        headers={"retry-after": "5"},
    )
