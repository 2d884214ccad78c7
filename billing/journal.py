# The journal: what was promised and what was used, on local disk, before anybody else hears of it.
#
# A call is opened before its upstream is asked, makes progress while it streams, and is closed before its last bytes
# go out. All records of a call lie in one segment, so a segment is whole in itself: it goes when everything in it has
# been flushed. Records survive the death of the process; ``fsync`` makes them survive the machine.

from __future__ import annotations

import errno
import os
import secrets
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal

import msgspec
import structlog
from msgspec import Struct

from billing.adoption import Progress, adopt, seize_segments, settle_segment
from billing.edges import Clock
from billing.errors import JournalFull
from billing.records import UsageRecord, bounded, bounded_cost, bounded_usage
from billing.segments import HEAD, SUFFIX, Fsync, Kind, Segment
from protocol.usage import Usage

__all__ = ["Journal", "adopt"]

SEGMENT_BYTES = 8 * 1024 * 1024
TAKEN_BYTES = 8 * 1024 * 1024  # of records in one flush
CLOSE_ROOM = 2048  # bytes a close may need beyond what its open took: names, times, attempts

log = structlog.get_logger(__name__)


class Closed(Struct, frozen=True):
    """A closed call that waits to be flushed: where its record lies, or the record itself if the disk failed."""

    segment: Segment | None
    place: int | None
    record: UsageRecord | None = None
    is_adopted: bool = False


class Journal:
    """The journal of one process. Single-threaded; opened after the last fork."""

    def __init__(self, directory: Path, *, fsync: Fsync, clock: Clock, segment_bytes: int) -> None:
        self.directory = directory
        self.fsync: Fsync = fsync
        self.on_closed: Callable[[], None] = lambda: None  # called whenever something waits to be flushed
        self._clock = clock
        self._segment_bytes = segment_bytes
        self._current: Segment | None = None
        self._segments: set[Segment] = set()
        self._open: dict[str, Segment] = {}  # calls that run, and where their records go
        self._closed: dict[str, Closed] = {}  # in the order of their closing
        self._refused: JournalFull | None = None  # why the last open was refused, until one is taken again
        self._encode = msgspec.msgpack.Encoder().encode

    @classmethod
    def open(
        cls, directory: Path, *, fsync: Fsync = "never", clock: Clock, segment_bytes: int = SEGMENT_BYTES
    ) -> Journal:
        """Open this process's journal in ``directory``, which all processes of a machine may share."""
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        return cls(directory, fsync=fsync, clock=clock, segment_bytes=segment_bytes)

    def opened(self, record: UsageRecord) -> None:
        """Write down that a call begins, and set room aside for its close.

        Raises ``JournalFull`` when the disk has no room: the call may not begin.
        """
        body = self._encode(record)
        promise = HEAD.size + len(body) + CLOSE_ROOM
        segment = self._segment_for(HEAD.size + len(body) + promise)
        try:
            segment.append(Kind.OPENED, body)
        except OSError as exc:
            self._refused = _full(exc)
            raise self._refused from exc
        self._refused = None
        segment.promised += promise
        segment.calls[record.request_id] = promise
        self._open[record.request_id] = segment

    def check(self) -> Literal["ok", "full", "not writable"]:
        """Say whether the next call could be opened, by making the room that it would use."""
        refused = self._refused
        try:
            if refused is None:
                self._segment_for(2 * CLOSE_ROOM)
        except JournalFull as exc:
            refused = exc
        if refused is None:
            return "ok"
        cause = refused.__cause__
        is_full = isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT)
        return "full" if is_full else "not writable"

    def progress(self, request_id: str, usage: Usage, cost_nanousd: int) -> None:
        """Write down how much the call has used so far; left out on a full disk, where only closes have room."""
        segment = self._open.get(request_id)
        if segment is None:
            return
        body = self._encode(Progress(request_id, bounded_usage(usage), bounded_cost(cost_nanousd)))
        if segment.has_room(HEAD.size + len(body)) or segment.grow(HEAD.size + len(body)):
            try:
                segment.append(Kind.PROGRESS, body)
            except OSError as exc:
                log.warning("journal_progress_lost", request_id=request_id, error=str(exc))

    def closed(self, record: UsageRecord) -> None:
        """Write down how the call ended. Never fails: what the disk does not take waits in memory to be flushed."""
        record = bounded(record)
        try:
            closed = self._write_close(record)
        except (OSError, JournalFull, ValueError, TypeError, OverflowError) as exc:  # the disk's, or a value's
            log.error("journal_close_in_memory", request_id=record.request_id, error=str(exc))
            closed = Closed(self._open.get(record.request_id), None, record)
        self._open.pop(record.request_id, None)
        self._closed[record.request_id] = closed
        self.on_closed()

    def dropped(self, request_id: str) -> None:
        """Write down that an opened call never reached an upstream: it leaves no row."""
        segment = self._open.pop(request_id, None)
        if segment is None:
            return
        segment.promised -= segment.calls.pop(request_id)
        try:
            segment.append(Kind.DROPPED, self._encode(request_id))
        except OSError as exc:
            log.warning("journal_drop_lost", request_id=request_id, error=str(exc))
        self._free(segment)

    def adopt(self) -> int:
        """Take over the segments of dead processes and return how many of their calls now wait to be flushed.

        A segment whose records we cannot decode, such as one of a later version, is kept under another name for people.
        """
        found = 0
        for segment in seize_segments(self.directory, self._clock.now()):
            try:
                settled = settle_segment(segment)
            except msgspec.DecodeError as exc:
                log.error("journal_unreadable", path=str(segment.path), error=str(exc))
                segment.set_aside()
                continue
            for place, record in settled:
                segment.calls[record.request_id] = 0
                kept = record if place is None else None
                self._closed[record.request_id] = Closed(segment, place, kept, is_adopted=True)
                found += 1
            self._segments.add(segment)
            self._free(segment)
        if found:
            self.on_closed()
        return found

    def take_closed(self, limit: int, most_bytes: int = TAKEN_BYTES) -> list[UsageRecord]:
        """Return closed calls, oldest first: up to ``limit``, and up to ``most_bytes`` of records, but at least one.

        They stay until ``mark_flushed``. A close that the disk no longer gives back is logged and left out, and its
        segment is kept for people.
        """
        taken: list[UsageRecord] = []
        unreadable: list[str] = []
        size = 0
        for request_id, closed in self._closed.items():
            if len(taken) == limit or size >= most_bytes:
                break
            try:
                record, length = _read_record(closed)
            except (OSError, msgspec.DecodeError) as exc:
                log.error("journal_close_unreadable", request_id=request_id, segment=_path(closed), error=str(exc))
                unreadable.append(request_id)
                continue
            if taken and size + length > most_bytes:
                break
            taken.append(record)
            size += length
        self._leave_out(unreadable)
        return taken

    def unflushed(self) -> list[UsageRecord]:
        """Return every closed call that waits to be flushed, adopted ones and those of a running flush too."""
        return self.take_closed(len(self._closed), most_bytes=sys.maxsize)

    def is_adopted(self, request_id: str) -> bool:
        """Whether a waiting call was closed by another process, or on behalf of one that died."""
        return self._closed[request_id].is_adopted

    def mark_flushed(self, request_ids: Iterable[str]) -> None:
        """Forget calls that are safe in the ledger, and free the segments that hold nothing else."""
        touched = set()
        for request_id in request_ids:
            segment = self._closed.pop(request_id).segment
            if segment is not None:
                segment.calls.pop(request_id, None)
                touched.add(segment)
        for segment in touched:
            self._free(segment)

    @property
    def backlog(self) -> int:
        """Closed calls that wait to be flushed."""
        return len(self._closed)

    @property
    def oldest(self) -> str | None:
        """The oldest call that is not flushed yet, running or closed. Its id tells its time."""
        return min((next(iter(segment.calls)) for segment in self._segments if segment.calls), default=None)

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
            if segment.calls:
                segment.close()
            else:
                segment.free()
        self._segments.clear()
        self._current = None

    def _leave_out(self, unreadable: Iterable[str]) -> None:
        """Wait no longer for closes that cannot be read."""
        for request_id in unreadable:
            segment = self._closed[request_id].segment
            if segment is not None:
                segment.is_damaged = True
        self.mark_flushed(unreadable)

    def _write_close(self, record: UsageRecord) -> Closed:
        body = self._encode(record)
        size = HEAD.size + len(body)
        segment = self._open.get(record.request_id) or self._segment_for(size)
        promise = segment.calls.get(record.request_id, 0)
        segment.calls[record.request_id] = 0
        segment.promised -= promise
        if size > promise and not segment.has_room(size) and not segment.grow(size):
            body = self._encode(msgspec.structs.replace(record, attempts=(), metadata=None))
        return Closed(segment, segment.append(Kind.CLOSED, body))

    def _segment_for(self, size: int) -> Segment:
        """Return the current segment if ``size`` more bytes fit, else the next one."""
        if self._current is not None and self._current.has_room(size):
            return self._current
        name = f"{self._clock.now() * 1000:015.0f}-{os.getpid()}-{secrets.token_hex(4)}{SUFFIX}"
        try:
            segment = Segment.create(
                self.directory / name, max(self._segment_bytes, 2 * size), sync=self.fsync == "always"
            )
        except OSError as exc:
            raise _full(exc) from exc
        previous, self._current = self._current, segment
        self._segments.add(segment)
        if previous is not None:
            self._free(previous)
        return segment

    def _free(self, segment: Segment) -> None:
        if segment.calls or segment not in self._segments:
            return
        if segment is self._current:
            if segment.end < segment.size // 2:
                return  # most of it is still to be used
            self._current = None
        self._segments.discard(segment)
        segment.free()


def _full(exc: OSError) -> JournalFull:
    log.error("journal_full", error=str(exc))
    return JournalFull(
        "This gateway has no room left to write calls down. Try again on another one, or later.",
        headers={"retry-after": "5"},
    )


def _read_record(closed: Closed) -> tuple[UsageRecord, int]:
    """Return a waiting record and its size in bytes."""
    if closed.record is not None:
        return closed.record, CLOSE_ROOM  # in memory: about as much as a close takes
    assert closed.segment is not None and closed.place is not None
    found = closed.segment.read(closed.place)
    if found is None:
        raise msgspec.DecodeError(f"there is no whole record at {closed.place}")
    return _decode_record(found[1]), len(found[1])


def _path(closed: Closed) -> str:
    return str(closed.segment.path) if closed.segment is not None else ""


_decode_record = msgspec.msgpack.Decoder(UsageRecord).decode
