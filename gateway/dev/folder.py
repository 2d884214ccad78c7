# The folder of a stack that `tollgate dev` runs: its lock, and where everything lies in it.

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from gateway.core.private_files import write_privately
from gateway.run.processes import is_running
from gateway.run.supervisor import StartFailed

LEFTOVERS_END_WITHIN = 15.0  # seconds for the processes of a stack that was killed
LARGEST_LOG = 5 * 1024 * 1024  # bytes; a longer one is rotated at the next start


class StackFolder:
    """One stack's data. ``take`` it before anything in it is used."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.settings = self.path / "tollgate.yaml"  # what the stack's processes read
        self.secrets = self.path / "secrets.json"
        self._schema = self.path / "postgres" / "schema"

    def take(self, pause: Callable[[float], None]) -> int:
        """Make the folder if there is none, and lock it; return the descriptor that holds the lock.

        Every child keeps the lock too, so it is free when the last of them has ended. Raises StartFailed where another
        stack has it, or it cannot be made. ``pause`` waits for so many seconds.
        """
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as exc:
            raise StartFailed(f"{self.path} cannot be made ({exc.strerror}); choose another: --data-dir") from exc
        path = self.path / "lock"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        deadline = time.monotonic() + LEFTOVERS_END_WITHIN
        try:
            while not _can_lock(descriptor):
                owner = path.read_text().strip()
                if (owner.isdigit() and is_running(int(owner))) or time.monotonic() > deadline:
                    words = f"{self.path} is in use by another `tollgate dev` (process {owner})"
                    raise StartFailed(f"{words}; stop it, or choose another: --data-dir")
                pause(0.05)
            os.ftruncate(descriptor, 0)
            os.write(descriptor, str(os.getpid()).encode())
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def log(self, role: str) -> Path:
        """Return where a role's processes write what they say."""
        return self.path / "logs" / f"{role}.log"

    def put_long_logs_aside(self) -> None:
        """Begin long logs anew; the one before is kept."""
        for log in (self.path / "logs").glob("*.log"):
            if log.stat().st_size > LARGEST_LOG:
                log.replace(log.with_suffix(".log.old"))

    def schema(self) -> str | None:
        """Return the last migration of the stack's own Postgres. It is stored beside the data and deleted with it."""
        return self._schema.read_text() if self._schema.is_file() else None

    def note_schema(self, name: str) -> None:
        """Note which migration was the last, so that the next start need not run `tollgate migrate`."""
        if self.schema() != name:
            self._schema.write_text(name)

    def write_pids(self, pids: Mapping[str, Sequence[int]]) -> None:
        """Write down which processes the stack has, by role."""
        write_privately(self.path / "pids.json", msgspec.json.encode(pids))


def _can_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
