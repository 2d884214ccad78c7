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


def _name_of_dead(path: Path) -> str | None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: two that look at once both see a dead one as dead
        return os.read(fd, 1000).decode(errors="replace")
    except BlockingIOError:
        return None
    finally:
        os.close(fd)
