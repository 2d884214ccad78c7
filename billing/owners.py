# Who writes into a journal folder: a file per process, locked as long as it lives. A neighbour that finds the lock free
# and no segment of the dead left knows that all of it is in the ledger, and ends the dead one: its leases go back.
# Where a segment of it is damaged they stay reserved, for people to look at.

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

from billing.segments import SUFFIX, UNLOCKED, UNREADABLE

OWNER = ".owner"
ENDED = ".ended"  # an owner that was ended, kept for a day: a database that forgot is told again
KEPT = 86_400.0  # seconds
SERVER = "server"  # which database was last told everything that lies in the folder


def claim(directory: Path, token: str, name: str) -> int:
    """Write down that ``name`` writes the segments that have ``token`` in their names; return what keeps it alive."""
    path = directory / f"{token}{OWNER}"
    unlocked = path.with_suffix(UNLOCKED)  # nobody looks at it before it is locked
    fd = os.open(unlocked, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(fd, name.encode())
        unlocked.rename(path)
    except OSError:
        unlocked.unlink(missing_ok=True)
        os.close(fd)
        raise
    return fd


def dead(directory: Path) -> set[str]:
    """Return the names of those who wrote here and live no more: whatever they left is for a neighbour to carry."""
    found = set()
    for path in directory.glob(f"*{OWNER}"):
        with contextlib.suppress(OSError):
            found.add(_name_of_dead(path))
    return {name for name in found if name is not None}


def living(directory: Path) -> set[str]:
    """Return the tokens of those who write here and live."""
    found = set()
    for path in directory.glob(f"*{OWNER}"):
        with contextlib.suppress(OSError):
            if _name_of_dead(path) is None:
                found.add(path.stem)
    return found


def carried(directory: Path) -> dict[str, Path]:
    """Return the dead of whom nothing is left to carry: their names, and the files to remove once nobody lists them."""
    found = {}
    for path in directory.glob(f"*{OWNER}"):
        with contextlib.suppress(OSError):
            name = _name_of_dead(path)
            left = (any(directory.glob(f"*-{path.stem}-*{suffix}")) for suffix in (SUFFIX, UNREADABLE))
            if name is not None and not any(left):
                found[name] = path
    return found


def bury(path: Path) -> None:
    """Note that the owner of a file has ended."""
    with contextlib.suppress(FileNotFoundError):
        path.rename(path.with_suffix(ENDED))


def buried(directory: Path, now: float) -> set[str]:
    """Return the names of the owners that were ended here in the last day."""
    found = set()
    for path in directory.glob(f"*{ENDED}"):
        with contextlib.suppress(OSError):
            if now - path.stat().st_mtime > KEPT:
                path.unlink()
            else:
                found.add(path.read_text(errors="replace"))
    return found


def server_told(directory: Path) -> float | None:
    """Return which database was last told everything here, by the time of its start; ``None``: none yet."""
    try:
        return float((directory / SERVER).read_text())
    except (OSError, ValueError):
        return None


def note_told(directory: Path, server: float) -> None:
    """Note that this database knows everything here. ``OSError`` where the disk does not take it."""
    written = directory / f"{SERVER}.new"
    written.write_text(repr(server))
    written.rename(directory / SERVER)


def _name_of_dead(path: Path) -> str | None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: two that look at once both see a dead one as dead
        return os.read(fd, 1000).decode(errors="replace")
    except BlockingIOError:
        return None
    finally:
        os.close(fd)
