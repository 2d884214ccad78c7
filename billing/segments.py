# One file of the journal: checksummed records in room reserved ahead, owned by whoever holds its lock.
#
# The file is MAGIC, then records, then zeros up to its size. A record is a head (length of the body, CRC-32 over kind
# and body, kind; little-endian) and a body. Each is one write; the first record that does not check ends the file.

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
import zlib
from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path
from typing import Literal

MAGIC = b"tollgj1\n"
HEAD = struct.Struct("<IIB")
GROWTH = 64 * 1024  # bytes by which a segment grows when progress has used up what was not promised to closes
SUFFIX = ".journal"
UNLOCKED = ".new"  # a segment being made

Fsync = Literal["never", "interval", "always"]


class Kind(IntEnum):
    """What a record says of its call."""

    OPENED = 1  # body: UsageRecord
    PROGRESS = 2  # body: Progress
    CLOSED = 3  # body: UsageRecord
    DROPPED = 4  # body: the request id; no upstream was reached, there will be no row


KINDS = {kind.value: kind for kind in Kind}


class Segment:
    """An open, locked segment. ``promised`` bytes of it belong to closes that are still to come."""

    def __init__(self, path: Path, fd: int, *, end: int, size: int, sync: bool = False) -> None:
        self.path = path
        self.fd = fd
        self.end = end  # where the next record goes
        self.size = size  # bytes reserved on disk
        self.sync = sync
        self.promised = 0
        self.is_damaged = False  # a record that was written cannot be read: the file is not deleted but set aside
        self.calls: dict[str, int] = {}  # request id -> bytes promised to its close; neither flushed nor dropped yet

    @classmethod
    def create(cls, path: Path, size: int, *, sync: bool = False) -> Segment:
        """Make a segment and reserve ``size`` bytes on disk. ``OSError`` when there is no room."""
        unlocked = path.with_suffix(UNLOCKED)  # nobody adopts it before it is locked
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
    def seize(cls, path: Path, *, sync: bool = False) -> Segment | None:
        """Take over a segment whose owner is dead; ``None`` while somebody lives who owns it."""
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
        return cls(path, fd, end=min(size, len(MAGIC)), size=size, sync=sync)

    def has_room(self, size: int) -> bool:
        """Whether ``size`` more bytes fit beside what is promised."""
        return self.end + self.promised + size <= self.size

    def grow(self, size: int) -> bool:
        """Reserve at least ``size`` more bytes on disk; false when the disk is full."""
        try:
            os.posix_fallocate(self.fd, self.size, max(size, GROWTH))
        except OSError:
            return False
        self.size += max(size, GROWTH)
        return True

    def append(self, kind: Kind, body: bytes) -> int:
        """Write one record and return its place."""
        place, record = self.end, HEAD.pack(len(body), _checksum(kind, body), kind) + body
        if os.pwrite(self.fd, record, place) != len(record):
            raise OSError(errno.ENOSPC, "the journal took only a part of a record", str(self.path))
        self.end = place + len(record)
        if self.sync:
            os.fdatasync(self.fd)
        return place

    def read(self, place: int) -> tuple[Kind, bytes] | None:
        """Return the record at ``place``, or ``None`` where there is none whole."""
        head = os.pread(self.fd, HEAD.size, place)
        if len(head) < HEAD.size:
            return None
        length, checksum, kind = HEAD.unpack(head)
        if length == 0 or place + HEAD.size + length > self.size or kind not in KINDS:
            return None
        body = os.pread(self.fd, length, place + HEAD.size)
        return (KINDS[kind], body) if len(body) == length and _checksum(kind, body) == checksum else None

    def replay(self) -> Iterator[tuple[int, Kind, bytes]]:
        """Yield every whole record with its place, and leave ``end`` behind the last; a torn tail is cut off."""
        self.end = len(MAGIC)
        if os.pread(self.fd, len(MAGIC), 0) != MAGIC:
            return
        while (record := self.read(self.end)) is not None:
            kind, body = record
            yield self.end, kind, body
            self.end += HEAD.size + len(body)

    def free(self) -> None:
        """Delete the file: all it knew has been flushed. A damaged one is set aside instead."""
        if self.is_damaged:
            self.set_aside()
            return
        with contextlib.suppress(OSError):
            self.path.unlink()
        self.close()

    def set_aside(self) -> None:
        """Keep the file where nobody adopts it again."""
        with contextlib.suppress(OSError):
            self.path.rename(self.path.with_suffix(".unreadable"))
        self.close()

    def close(self) -> None:
        """Let go of the lock. What is left in the file is for whoever adopts it."""
        os.close(self.fd)


def _checksum(kind: int, body: bytes) -> int:
    return zlib.crc32(body, kind)


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
