# The embedded Postgres. Its own tools for starting it (pg_ctl, and get_server of the package that brings it) refuse
# root, change the modes of parent folders or trust a stale pid file; so the few steps they take are taken here.

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path

from gateway.core.private_files import write_privately
from gateway.dev.embedded.server import Address, EmbeddedFault, EmbeddedServer
from gateway.dev.embedded.unprivileged import find_postgres_binaries, postgres_user_for, prepare_home
from gateway.run.processes import LOOPBACK, SystemUser, is_running, last_lines, spawn, state_of, wait_until_gone

# A path that its user can follow wherever the folder is: only the folder itself has to be open to them.
HERE = "/proc/self/cwd"
# What a refused statement said of a row or a parameter is not for the log: it may be a prompt or a secret.
QUIET = {"log_error_verbosity": "terse", "log_parameter_max_length": "0", "log_parameter_max_length_on_error": "0"}
ENVIRONMENT = {"LC_ALL": "C", "TZ": "UTC", "HOME": "/nonexistent", "PATH": os.defpath}


class EmbeddedPostgres(EmbeddedServer):
    """Postgres, with the superuser and the database ``tollgate``.

    Postgres refuses root: as root it runs as another user, which owns ``data_dir/postgres``. Neither the data
    directory nor the virtual environment need be open to that user.
    """

    name = "postgres"
    stop_signal = signal.SIGINT  # "fast": connections are ended, everything is written
    death_signal = signal.SIGQUIT  # "immediate": no time is lost, the next start recovers

    def __init__(
        self, data_dir: Path, *, pass_fds: tuple[int, ...] = (), server_settings: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(data_dir, pass_fds=pass_fds)
        self._server_settings = dict(server_settings or {})
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

    def _spawn(self, address: Address) -> subprocess.Popen[bytes]:
        home = prepare_home(self.data_dir / self.name)
        user = postgres_user_for(home)
        binaries = find_postgres_binaries(user)
        cluster = home / "cluster"
        if not cluster.exists():
            self._create_cluster(binaries, home, user, address.password)
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
            **QUIET,
            **self._server_settings,
        }
        options = [word for key, value in server_settings.items() for word in ("-c", f"{key}={value}")]
        return spawn(
            [binaries / "postgres", "-D", HERE, *options],
            log=self.log,
            user=user,
            env=ENVIRONMENT,
            cwd=cluster,
            pass_fds=self.pass_fds,
            death_signal=self.death_signal,
        )

    def _create_cluster(self, binaries: Path, home: Path, user: SystemUser | None, password: str) -> None:
        """Make an empty cluster with one database, in a folder that gets its name only when it is complete."""
        unfinished = home / "unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(mode=0o700)
        if user is not None:
            os.chown(unfinished, user.uid, user.gid)
        password_file = home / "password"
        write_privately(password_file, password.encode(), None if user is None else (user.uid, user.gid))
        initdb: list[str | Path] = [binaries / "initdb", "-D", HERE, "-U", "tollgate", "--pwfile=../password"]
        # Our password is 192 random bits: hashed 4096 times it were no safer, and each connection 2 ms of CPU dearer.
        initdb += ["--auth=scram-sha-256", "--set=scram_iterations=1", "--encoding=UTF8"]
        initdb += ["--locale-provider=builtin", "--builtin-locale=C.UTF-8", "--locale=C", "--no-instructions"]
        if self._server_settings.get("fsync") == "off":
            initdb.append("--no-sync")
        try:
            self._run_to_end(initdb, unfinished, user)
            single_user: list[str | Path] = [binaries / "postgres", "--single", "-D", HERE, "postgres"]
            self._run_to_end(single_user, unfinished, user, typed=b"CREATE DATABASE tollgate\n")
        finally:
            password_file.unlink()
        unfinished.rename(home / "cluster")

    def _run_to_end(self, command: list[str | Path], cwd: Path, user: SystemUser | None, typed: bytes = b"") -> None:
        read_end, write_end = os.pipe()
        os.write(write_end, typed)  # a line: it fits into the pipe
        os.close(write_end)
        process = spawn(command, log=self.log, user=user, env=ENVIRONMENT, cwd=cwd, stdin=read_end)
        os.close(read_end)
        if process.wait() != 0:
            raise EmbeddedFault(f"{Path(command[0]).name} failed:\n{last_lines(self.log)}")

    def _end_predecessor(self) -> None:
        """Clear leftovers: a killed parent's Postgres may still be ending, or another program may have its pid now.

        Postgres takes any living process with the pid in its file for a rival. But its data directory is
        used by no other stack, so a postgres on it is a leftover, and anything else a program with a reused pid.
        """
        lines = self._read_pid_file()
        if not lines or not lines[0].isdigit():
            return
        pid = int(lines[0])
        if is_running(pid) and _runs_postgres_in(pid, self._pid_file.parent):
            if not wait_until_gone(pid, 10.0):
                os.kill(pid, signal.SIGQUIT)
                wait_until_gone(pid, 10.0)
        elif state_of(pid) is not None:  # Postgres counts even a zombie that no parent reaps
            self._pid_file.unlink(missing_ok=True)

    @property
    def _pid_file(self) -> Path:
        return self.data_dir / self.name / "cluster" / "postmaster.pid"

    def _read_pid_file(self) -> list[str]:
        try:
            return self._pid_file.read_text().splitlines()
        except (FileNotFoundError, NotADirectoryError):
            return []


def _runs_postgres_in(pid: int, cluster: Path) -> bool:
    process = Path(f"/proc/{pid}")
    try:
        program = (process / "cmdline").read_bytes().split(b"\0")[0]
        return program.endswith(b"postgres") and (process / "cwd").samefile(cluster)
    except OSError:
        return False
