# Copies of an embedded Postgres: a replica that follows it asynchronously and can take its place, and a base backup
# that is restored with the archived WAL.

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from datetime import datetime
from pathlib import Path

from gateway.dev.embedded import EmbeddedPostgres
from gateway.dev.embedded.postgres import HERE
from gateway.dev.embedded.server import Address
from gateway.dev.embedded.unprivileged import find_postgres_binaries, postgres_user_for, prepare_home
from gateway.run.processes import SystemUser, descendants_of, free_port
from tests.support.servers import execute


class Copy(EmbeddedPostgres):
    """A base backup of ``primary``, as it is when ``make`` is called or this is started; on a port of its own."""

    def __init__(self, primary: EmbeddedPostgres, *options: str, **server_settings: str) -> None:
        folder = tempfile.mkdtemp(prefix=f"tollgate-{os.getpid()}-", dir=primary.data_dir.parent)
        super().__init__(Path(folder), server_settings={**primary._server_settings, **server_settings})
        self._address = Address(free_port(), primary.address.password)
        self._primary = primary
        self._options = options

    def make(self) -> Path:
        """Copy the primary; return the folder with its files."""
        home = prepare_home(self.data_dir / self.name)
        user = postgres_user_for(home)
        self._create_cluster(find_postgres_binaries(user), home, user, self.address.password)
        return home / "cluster"

    def go_back_to(self, moment: datetime, archive: Path) -> None:
        """Have its first start read the archived WAL as far as ``moment``."""
        home = self.data_dir / self.name
        shutil.copytree(archive, home / "archive")
        for path in (home / "archive", *(home / "archive").iterdir()):
            shutil.chown(path, home.stat().st_uid, home.stat().st_gid)
        (home / "cluster" / "recovery.signal").touch()
        self._server_settings |= {"recovery_target_time": moment.isoformat(), "recovery_target_action": "promote"}

    def remove(self) -> None:
        """Stop it and delete all of it."""
        super().remove()
        shutil.rmtree(self.data_dir, ignore_errors=True)

    def _create_cluster(self, binaries: Path, home: Path, user: SystemUser | None, password: str) -> None:
        """Copy the primary; what it writes meanwhile is streamed beside."""
        unfinished = home / "unfinished"
        unfinished.mkdir(mode=0o700)
        if user is not None:
            os.chown(unfinished, user.uid, user.gid)
        copy: list[str | Path] = [binaries / "pg_basebackup", "-D", HERE, "-d", self._primary.url, *self._options]
        copy += ["--wal-method=stream", "--checkpoint=fast", "--no-sync"]
        self._run_to_end(copy, unfinished, user)
        unfinished.rename(home / "cluster")


class Standby(Copy):
    """A copy that goes on with what its primary streams."""

    def __init__(self, primary: EmbeddedPostgres) -> None:
        super().__init__(primary, "--write-recovery-conf")

    def is_ready(self) -> bool:
        """Return whether it takes connections, for reading at least."""
        lines = self._read_pid_file()
        return super().is_ready() or (len(lines) >= 8 and lines[0] == str(self.pid) and lines[7].strip() == "standby")

    def promote(self) -> None:
        """Let it be a primary, with what it has."""
        asyncio.run(execute(self.url, "SELECT pg_promote()"))


def senders_of(primary: EmbeddedPostgres) -> list[int]:
    """Return the processes of a primary that stream to its replicas."""
    assert primary.pid is not None
    return [pid for pid in descendants_of(primary.pid) if b"walsender" in _command_line(pid)]


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has ended
        return b""
