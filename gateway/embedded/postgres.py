# The embedded Postgres. Its own tools for starting it (pg_ctl, and get_server of the package that brings it) refuse
# root, change the modes of parent folders or trust a stale pid file; so the few steps they take are taken here.

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path

from gateway.embedded.server import Address, EmbeddedFault, EmbeddedServer, write_privately
from gateway.embedded.unprivileged import account_for, find_postgres_binaries, prepare_home
from gateway.processes import LOOPBACK, Account, is_running, last_lines, spawn, state_of, wait_until_gone


class EmbeddedPostgres(EmbeddedServer):
    """Postgres, with the superuser and the database ``tollgate``.

    As root it runs as another user, from a folder of its own that ``data_dir/postgres`` points to: Postgres refuses
    root, and neither the data directory nor the virtual environment need be open to others.
    """

    name = "postgres"
    stop_signal = signal.SIGINT  # "fast": connections are ended, everything is written
    death_signal = signal.SIGQUIT  # "immediate": no time is lost, the next start recovers

    def __init__(
        self,
        data_dir: Path,
        *,
        pass_fds: tuple[int, ...] = (),
        server_settings: Mapping[str, str] | None = None,
        outside: Path | None = None,
    ) -> None:
        super().__init__(data_dir, pass_fds=pass_fds)
        self._server_settings = dict(server_settings or {})
        self._outside = outside
        self._log_start = 0

    @property
    def url(self) -> str:
        """``postgresql://…``, for asyncpg, libpq and SQLAlchemy alike."""
        return f"postgresql://tollgate:{self.address.password}@{LOOPBACK}:{self.address.port}/tollgate"

    def is_ready(self) -> bool:
        """Return whether Postgres takes connections, by the last line of its pid file, as pg_ctl does."""
        lines = self._read_pid_file()
        return len(lines) >= 8 and lines[0] == str(self.pid) and lines[7].strip() == "ready"

    def is_worth_another_try(self) -> bool:
        """Return true while children of a killed predecessor still hold its shared memory: they end within seconds."""
        with self.log.open(errors="replace") as log:
            log.seek(self._log_start)
            return "pre-existing shared memory block" in log.read()

    def remove(self) -> None:
        """Stop the server and delete its data for good."""
        self.stop()
        pointer = self.data_dir / self.name
        shutil.rmtree(pointer.resolve(), ignore_errors=True)
        if pointer.is_symlink():
            pointer.unlink()

    def _spawn(self, address: Address) -> subprocess.Popen[bytes]:
        home = prepare_home(self.data_dir / self.name, self._outside)
        account = account_for(home)
        binaries = find_postgres_binaries(account)
        cluster = home / "cluster"
        if not cluster.exists():
            self._create_cluster(binaries, home, account, address.password)
        self._end_predecessor()
        self._log_start = self.log.stat().st_size if self.log.exists() else 0
        server_settings = {
            "listen_addresses": LOOPBACK,
            "port": str(address.port),
            "unix_socket_directories": "",
            "shared_buffers": "32MB",
            "max_connections": "100",
            "max_wal_size": "256MB",
            "jit": "off",
            "timezone": "UTC",
            "log_timezone": "UTC",
            **self._server_settings,
        }
        options = [word for key, value in server_settings.items() for word in ("-c", f"{key}={value}")]
        return spawn(
            [binaries / "postgres", "-D", cluster, *options],
            log=self.log,
            account=account,
            env=_postgres_environment(home),
            cwd=home,
            pass_fds=self.pass_fds,
            death_signal=self.death_signal,
        )

    def _create_cluster(self, binaries: Path, home: Path, account: Account | None, password: str) -> None:
        """Make an empty cluster with one database, in a folder that gets its name only when it is complete."""
        unfinished = home / "unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        password_file = home / "password"
        write_privately(password_file, password.encode(), account)
        initdb: list[str | Path] = [
            binaries / "initdb",
            "-D",
            unfinished,
            "-U",
            "tollgate",
            f"--pwfile={password_file}",
        ]
        # Our password is 192 random bits: hashed 4096 times it were no safer, and each connection 2 ms of CPU dearer.
        initdb += ["--auth=scram-sha-256", "--set=scram_iterations=1", "--encoding=UTF8"]
        initdb += ["--locale-provider=builtin", "--builtin-locale=C.UTF-8", "--locale=C", "--no-instructions"]
        if self._server_settings.get("fsync") == "off":
            initdb.append("--no-sync")
        try:
            self._run_to_end(initdb, home, account)
            single_user: list[str | Path] = [binaries / "postgres", "--single", "-D", unfinished, "postgres"]
            self._run_to_end(single_user, home, account, typed=b"CREATE DATABASE tollgate\n")
        finally:
            password_file.unlink()
        unfinished.rename(home / "cluster")

    def _run_to_end(self, command: list[str | Path], home: Path, account: Account | None, typed: bytes = b"") -> None:
        read_end, write_end = os.pipe()
        os.write(write_end, typed)  # a line: it fits into the pipe
        os.close(write_end)
        environment = _postgres_environment(home)
        process = spawn(command, log=self.log, account=account, env=environment, cwd=home, stdin=read_end)
        os.close(read_end)
        if process.wait() != 0:
            raise EmbeddedFault(f"{Path(command[0]).name} failed:\n{last_lines(self.log)}")

    def _end_predecessor(self) -> None:
        """Make way: a Postgres of a killed parent may still be ending, or its pid may belong to another program now.

        Postgres takes any living process with the pid in its file for a rival. We know better: its data directory is
        ours alone, so a postgres on it is a leftover, and anything else is a stranger who inherited the number.
        """
        lines = self._read_pid_file()
        if not lines or not lines[0].isdigit():
            return
        pid = int(lines[0])
        if is_running(pid) and _runs_postgres_on(pid, lines[1]):
            if not wait_until_gone(pid, 10.0):
                os.kill(pid, signal.SIGQUIT)
                wait_until_gone(pid, 10.0)
        elif state_of(pid) is not None:  # Postgres counts even a zombie that nobody reaps
            self._pid_file.unlink(missing_ok=True)

    @property
    def _pid_file(self) -> Path:
        return self.data_dir / self.name / "cluster" / "postmaster.pid"

    def _read_pid_file(self) -> list[str]:
        try:
            return self._pid_file.read_text().splitlines()
        except (FileNotFoundError, NotADirectoryError):
            return []


def _postgres_environment(home: Path) -> dict[str, str]:
    return {"LC_ALL": "C", "TZ": "UTC", "HOME": str(home), "PATH": os.defpath}


def _runs_postgres_on(pid: int, cluster: str) -> bool:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return words[0].endswith(b"postgres") and os.fsencode(cluster) in words
