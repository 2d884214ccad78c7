# One file of the journal: checksummed records in room reserved ahead, owned by the process that holds its lock.
#
# The file is MAGIC, then records, then zeros up to its size. A record is a head (length of the body, CRC-32 over kind
# and body, kind; little-endian) and a body. Each is one write. The CRC is seeded by the file's name, which has dice in
# it: what a caller wrote into his metadata is never taken for a record, wherever damage makes us look for the next one.

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import struct
import zlib
from array import array
from collections.abc import Container, Iterator
from enum import IntEnum
from pathlib import Path
from typing import Literal

MAGIC = b"tollgj2\n"
HEAD = struct.Struct("<IIB")
LONGEST = 1 << 20  # bytes of a body that is believed behind damage
GROWTH = 64 * 1024  # bytes by which a segment grows when progress has used up what was not promised to closes
SUFFIX = ".journal"
KEPT = ".flushed"  # for a day, should the ledger forget
UNREADABLE, TOO_OLD = ".unreadable", ".too-old"  # what is kept for operators: no process adopts it
UNLOCKED = ".new"  # a segment being made

Fsync = Literal["never", "interval", "always"]


class Kind(IntEnum):
    """What a record says of its call."""

    OPENED = 1  # body: UsageRecord
    PROGRESS = 2  # body: Progress
    CLOSED = 3  # body: UsageRecord


KINDS = {kind.value: kind for kind in Kind}
# Where a record could begin: a length below 2^24, any checksum, a kind. Looked at from every byte.
MAYBE = re.compile(rb"(?s)(?=...\x00....[\x01-\x03])")


class Waiting:
    """The closed calls of one segment that wait to be flushed, in the order of their closing: 16 bytes each."""

    def __init__(self) -> None:
        self.places = array("Q")
        self.moments = array("Q")  # milliseconds inside the request ids
        self.latest = 0  # of these, and of those that wait no longer

    def __len__(self) -> int:
        return len(self.places)

    def add(self, place: int, moment: int) -> None:
        """Wait for the close at ``place``."""
        self.places.append(place)
        self.moments.append(moment)
        self.latest = max(self.latest, moment)

    def forget(self, places: Container[int]) -> None:
        """Wait no longer for the closes at ``places``."""
        left = [at for at, place in enumerate(self.places) if place not in places]
        self.places = array("Q", [self.places[at] for at in left])
        self.moments = array("Q", [self.moments[at] for at in left])


class Segment:
    """An open, locked segment. ``promised`` bytes of it belong to closes that are still to come."""

    def __init__(self, path: Path, fd: int, *, end: int, size: int, sync: bool = False) -> None:
        self.path = path
        self.fd = fd
        self.end = end  # where the next record goes
        self.size = size  # bytes reserved on disk
        self.sync = sync
        self.promised = 0
        self.gaps = 0  # places where what was written cannot be read; such a file is not deleted but quarantined
        self.is_too_old = False  # the ledger refuses calls of it; such a file is not deleted but quarantined
        self.calls: dict[str, int] = {}  # calls without a close in the file -> bytes promised to it
        self.waiting = Waiting()
        self._seed = zlib.crc32(path.stem.encode())

    @classmethod
    def create(cls, path: Path, size: int, *, sync: bool = False) -> Segment:
        """Make a segment and reserve ``size`` bytes on disk. ``OSError`` when there is no room."""
        unlocked = path.with_suffix(UNLOCKED)  # no process adopts it before it is locked
        fd = os.open(unlocked, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.posix_fallocate(fd, 0, size)
            os.pwrite(fd, MAGIC, 0)
            unlocked.rename(path)
            if sync:
                os.fsync(fd)
                _sync_folder(path.parent)
        except OSError:
            unlocked.unlink(missing_ok=True)
            os.close(fd)
            raise
        return cls(path, fd, end=len(MAGIC), size=size, sync=sync)

    @classmethod
    def seize(cls, path: Path) -> Segment | None:
        """Take over a segment whose owner is dead; ``None`` while its owner lives."""
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(fd), path.stat()):
                raise FileNotFoundError(path)  # freed, between our opening and our locking
        except OSError:
            os.close(fd)
            return None
        size = os.fstat(fd).st_size
        return cls(path, fd, end=min(size, len(MAGIC)), size=size)

    @classmethod
    def look(cls, path: Path) -> Segment:
        """Open a segment under any of its names, to read it only. ``OSError`` when it cannot be."""
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        return cls(path, fd, end=0, size=os.fstat(fd).st_size)

    @property
    def is_done(self) -> bool:
        """Whether everything in it has been flushed."""
        return not self.calls and not self.waiting

    def has_room(self, size: int) -> bool:
        """Whether ``size`` more bytes fit beside what is promised."""
        return self.end + self.promised + size <= self.size

    def grow(self, size: int) -> None:
        """Reserve at least ``size`` more bytes on disk. ``OSError`` when there is no room."""
        os.posix_fallocate(self.fd, self.size, max(size, GROWTH))
        self.size += max(size, GROWTH)

    def append(self, kind: Kind, body: bytes) -> int:
        """Write one record and return its place."""
        place, record = self.end, HEAD.pack(len(body), self._checksum(kind, body), kind) + body
        if os.pwrite(self.fd, record, place) != len(record):
            raise OSError(errno.ENOSPC, "the journal took only a part of a record", str(self.path))
        self.end = place + len(record)
        if self.sync:
            os.fdatasync(self.fd)
        return place

    def probe(self) -> None:
        """Write one of the zeros that are there already. ``OSError`` when the disk takes nothing."""
        os.pwrite(self.fd, b"\0", self.end)

    def read(self, place: int) -> tuple[Kind, bytes] | None:
        """Return the record at ``place``, or ``None`` where there is none whole."""
        head = os.pread(self.fd, HEAD.size, place)
        if len(head) < HEAD.size:
            return None
        length = HEAD.unpack(head)[0]
        return self._record_in(head + os.pread(self.fd, min(length, self.size), place + HEAD.size), 0)

    def replay(self) -> Iterator[tuple[int, Kind, bytes]]:
        """Yield every whole record with its place, and leave ``end`` behind the last; count the gaps on the way.

        Behind a record that does not check, be it a bit flip or a torn tail, the search goes on at every byte.
        """
        data = os.pread(self.fd, self.size, 0)
        written = len(data.rstrip(b"\0"))  # the last record's own zeros not counted
        self.end = at = min(len(MAGIC), len(data))
        self.gaps += written > 0 and not MAGIC.startswith(data[:at])
        while at < written:
            record = self._record_in(data, at)
            if record is not None:
                yield at, *record
                at = self.end = at + HEAD.size + len(record[1])
                continue
            found = self._next_record(data, at, written)
            self.gaps += data[at:found].strip(b"\0") != b""
            at = found

    def _record_in(self, data: bytes, at: int, longest: int | None = None) -> tuple[Kind, bytes] | None:
        if len(data) < at + HEAD.size:
            return None
        length, checksum, kind = HEAD.unpack_from(data, at)
        if not 0 < length <= (len(data) if longest is None else longest) or kind not in KINDS:
            return None
        body = data[at + HEAD.size : at + HEAD.size + length]
        return (KINDS[kind], body) if len(body) == length and self._checksum(kind, body) == checksum else None

    def _next_record(self, data: bytes, start: int, end: int) -> int:
        for match in MAYBE.finditer(data, start + 1, end + HEAD.size):
            if self._record_in(data, match.start(), LONGEST) is not None:
                return match.start()
        return end

    def _checksum(self, kind: int, body: bytes) -> int:
        return zlib.crc32(body, self._seed ^ kind)

    def free(self, now: float) -> None:
        """Let go of the file: all it knew has been flushed by ``now`` (unix seconds). It is kept, without the room
        that it did not use. One with gaps, or calls too old, is quarantined; one without records is deleted."""
        now = max(now, self.waiting.latest / 1000)  # our clock may be days behind until the database has told its time
        if self.gaps or self.is_too_old:
            self.put_away(UNREADABLE if self.gaps else TOO_OLD, now)
            return
        with contextlib.suppress(OSError):
            if self.end <= len(MAGIC):
                self.path.unlink()
            else:
                os.ftruncate(self.fd, self.end)
        self.put_away(KEPT, now)

    def put_away(self, suffix: str, now: float) -> None:
        """Close the file and put it where no process adopts it again; its time of change tells when."""
        with contextlib.suppress(OSError):
            os.utime(self.fd, (now, now))
            self.path.rename(self.path.with_suffix(suffix))
        self.close()

    def close(self) -> None:
        """Let go of the lock. What is left in the file is for the process that adopts it."""
        os.close(self.fd)


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
