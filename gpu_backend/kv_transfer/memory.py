# Memory that two engines of one machine share: who brings blocks has some that belongs to no file, and who holds them
# writes there what would go over the connection. It is found by process and descriptor, so nothing of it is left when
# either end dies; and no name of it can be guessed, so it is found on this machine or not at all.

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PREFIX = "tollgate-kv-"
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL  # reading what was cut off would end the process


class SharedMemory:
    """Memory of this process that another one of this user, on this machine, may write into."""

    name = "memory"

    def __init__(self, size: int) -> None:
        """Raises ``OSError`` where the system has none."""
        self._secret = PREFIX + secrets.token_hex(16)
        self._descriptor = os.memfd_create(self._secret, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._descriptor, size)
            fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, SEALS)
            self._bytes = memoryview(mmap.mmap(self._descriptor, size))
        except BaseException:
            os.close(self._descriptor)
            raise

    @property
    def where(self) -> dict[str, Any]:
        """How the other process finds it."""
        return {"process": os.getpid(), "descriptor": self._descriptor, "name": self._secret}

    def read(self, length: int, *_: object) -> memoryview:
        """Return what was written last, until it is written again."""
        return self._bytes[:length]

    def close(self) -> None:
        """Let it be found no more. The memory goes with the last view of it."""
        os.close(self._descriptor)


def open_memory(where: Mapping[str, Any]) -> int | None:
    """Return a descriptor to write to memory of another process; None if it is not here, or not to be had."""
    name = str(where["name"])
    there = Path(f"/proc/{int(where['process'])}/fd/{int(where['descriptor'])}")
    if not name.startswith(PREFIX):
        return None
    with contextlib.suppress(OSError):
        if _is_of(there, name):
            descriptor = os.open(there, os.O_WRONLY | os.O_CLOEXEC)
            if _is_of(Path(f"/proc/self/fd/{descriptor}"), name):  # it is still what it was
                return descriptor
            os.close(descriptor)
    return None


def write_all(descriptor: int, data: memoryview | bytes) -> bool:
    """Write to the beginning of shared memory; return whether it had room."""
    place = 0
    with contextlib.suppress(OSError):
        while place < len(data):
            place += os.pwrite(descriptor, data[place:], place)
        return True
    return False


def _is_of(descriptor: Path, name: str) -> bool:
    return str(descriptor.readlink()) == f"/memfd:{name} (deleted)"
