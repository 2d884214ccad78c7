# Flushed segments, kept for a day: should the ledger forget what it has committed (a replica promoted, a backup
# restored), they are delivered again. They are removed when anything else needs the disk.

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import structlog
from msgspec import Struct

from billing.core.edges import Clock
from billing.journal.owner_files import living
from billing.journal.segments import KEPT, TOO_OLD, UNREADABLE

KEPT_FOR = 86_400.0  # seconds since the last call of a segment was flushed
KEPT_BYTES = 2 << 30  # of all kept segments in a folder,
KEPT_SHARE = 0.1  # and of the disk's room, as it would be without them

log = structlog.get_logger(__name__)


class KeptFile(Struct, frozen=True, order=True):
    """A kept segment; the one that was flushed first is the least."""

    flushed_at: float  # unix seconds
    path: Path
    size: int  # bytes on the disk


class Kept:
    """The kept segments of a folder, of all processes that write there: each of them keeps the bounds."""

    def __init__(self, directory: Path, clock: Clock) -> None:
        self._directory = directory
        self._clock = clock

    def prune(self) -> None:
        """Delete what is older than a day, and the oldest while all together take more than they may."""
        files = list(self._files())
        total, expired = sum(file.size for file in files), self._clock.now() - KEPT_FOR
        most = min(KEPT_BYTES, KEPT_SHARE * (_free_bytes(self._directory) + total))
        for file in sorted(files):
            if file.flushed_at > expired and total <= most:
                break
            with contextlib.suppress(OSError):
                file.path.unlink()
            total -= file.size

    def make_room(self, size: int) -> bool:
        """Delete the oldest until ``size`` bytes of the disk are free again; false when there is none to delete."""
        freed = number = 0
        for file in sorted(self._files()):
            if freed >= size:
                break
            with contextlib.suppress(OSError):
                file.path.unlink()
                freed, number = freed + file.size, number + 1
        if number:
            log.warning("journal_kept_dropped", segments=number, bytes=freed)
        return number > 0

    def paths(self, since: float, token: str) -> list[Path]:
        """Return the files, oldest first, whose last call was flushed at ``since`` (unix seconds) or later: those of
        the process ``token`` and of dead processes. Live processes deliver theirs. Quarantined files count."""
        others = living(self._directory) - {token}
        files = sorted(self._files(KEPT, UNREADABLE, TOO_OLD))
        return [file.path for file in files if file.flushed_at >= since and token_of(file.path) not in others]

    def _files(self, *suffixes: str) -> Iterator[KeptFile]:
        try:
            entries = list(os.scandir(self._directory))
        except OSError:
            return
        for entry in entries:
            if entry.name.endswith(suffixes or KEPT):
                with contextlib.suppress(FileNotFoundError):
                    status = entry.stat()
                    yield KeptFile(status.st_mtime, Path(entry.path), status.st_blocks * 512)


def token_of(path: Path) -> str:
    """Return the token of the process that made a segment, from its name: MILLISECONDS-TOKEN-NUMBER."""
    return path.stem.partition("-")[2].rpartition("-")[0]


def _free_bytes(directory: Path) -> int:
    try:
        disk = os.statvfs(directory)
    except OSError:
        return 0
    return disk.f_bavail * disk.f_frsize
