# Who writes into a journal folder: a file per process, locked as long as it lives. A neighbour that finds the lock free
# and no segment of the dead process left knows that all of it is in the ledger, and ends that owner: its leases go
# back. Where a segment of it is damaged they stay reserved, for operators to look at.
#
# The file also says which database was last told all that the process knew. One that has died saying another database
# than today's may have heard of commits that today's has forgotten: the calls of dead processes are delivered again
# first.

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

from billing.journal.segments import SUFFIX, UNLOCKED, UNREADABLE

OWNER = ".owner"
ENDED = ".ended"  # an owner that was ended, kept for a day: a database that forgot is told again
KEPT = 86_400.0  # seconds
TOLD = 24  # bytes for a server's start, whatever it is: writing it needs no room on the disk


class Dead(Struct, frozen=True):
    """An owner that lives no more. ``server``: the database that was told everything of it, by its start."""

    name: str
    path: Path
    server: float | None

    @property
    def is_carried(self) -> bool:
        """Whether no segment of it is left to carry to the ledger."""
        segments = f"*-{self.path.stem}-*"
        return not any(any(self.path.parent.glob(segments + suffix)) for suffix in (SUFFIX, UNREADABLE))


def claim(directory: Path, token: str, name: str) -> int:
    """Write down that ``name`` writes the segments that have ``token`` in their names; return what keeps it alive."""
    path = directory / f"{token}{OWNER}"
    unlocked = path.with_suffix(UNLOCKED)  # no process looks at it before it is locked
    fd = os.open(unlocked, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(fd, f"{name}\n{'':{TOLD}}".encode())
        unlocked.rename(path)
    except OSError:
        unlocked.unlink(missing_ok=True)
        os.close(fd)
        raise
    return fd


def living(directory: Path) -> set[str]:
    """Return the tokens of the live processes that write here."""
    found = set()
    for path in directory.glob(f"*{OWNER}"):
        with contextlib.suppress(OSError):
            if _look(path) is None:
                found.add(path.stem)
    return found


def dead(directory: Path) -> Iterator[Dead]:
    """Yield the dead processes that wrote here and were not ended: what they left is for a neighbour to carry."""
    for path in directory.glob(f"*{OWNER}"):
        with contextlib.suppress(OSError):
            if (found := _look(path)) is not None:
                yield found


def ended(directory: Path, now: float) -> Iterator[Dead]:
    """Yield the owners that were ended here in the last day; ``now`` in unix seconds."""
    for path in directory.glob(f"*{ENDED}"):
        with contextlib.suppress(OSError):
            if now - path.stat().st_mtime > KEPT:
                path.unlink()
            elif (found := _look(path)) is not None:
                yield found


def bury(path: Path, now: float) -> None:
    """Note that the owner of a file has ended at ``now`` (unix seconds)."""
    with contextlib.suppress(FileNotFoundError):
        os.utime(path, (now, now))
        path.rename(path.with_suffix(ENDED))


def note_told(path: Path, server: float) -> None:
    """Note that this database knows everything of the owner of a file. ``OSError`` where the disk does not take it."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        place = len(os.read(fd, 1000).partition(b"\n")[0])
        os.pwrite(fd, f"\n{server!r:<{TOLD}}".encode(), place)
    finally:
        os.close(fd)


def _look(path: Path) -> Dead | None:
    """Return what is known of the owner of a file; ``None`` while it lives."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: two that look at once both see a dead one as dead
        name, _, told = os.read(fd, 1000).decode(errors="replace").partition("\n")
    except BlockingIOError:
        return None
    finally:
        os.close(fd)
    try:
        return Dead(name, path, float(told))
    except ValueError:  # it died before the database answered it
        return Dead(name, path, None)
