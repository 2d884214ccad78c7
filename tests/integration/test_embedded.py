# The embedded Postgres and Valkey: they start from nothing, survive what kills them, and never outlive their parent.

from __future__ import annotations

import asyncio
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import asyncpg
import pytest
from redis import Redis

from gateway.dev.embedded import EmbeddedFault, EmbeddedPostgres, EmbeddedServer, EmbeddedValkey
from gateway.run.processes import descendants_of, is_running, wait_until_gone

ROOT = Path(__file__).parents[2]


def query(url: str, statement: str) -> object:
    async def run() -> object:
        connection = await asyncpg.connect(url)
        try:
            return await connection.fetchval(statement)
        finally:
            await connection.close()

    return asyncio.run(run())


def write(server: EmbeddedServer) -> None:
    if isinstance(server, EmbeddedPostgres):
        query(server.url, "DROP TABLE IF EXISTS kept")
        query(server.url, "CREATE TABLE kept AS SELECT 7 AS value")
    else:
        with Redis.from_url(server.url) as redis:
            redis.set("kept", 7)


def read(server: EmbeddedServer) -> int:
    if isinstance(server, EmbeddedPostgres):
        return int(str(query(server.url, "SELECT value FROM kept")))
    with Redis.from_url(server.url) as redis:
        return int(str(redis.get("kept"), "ascii"))  # type: ignore[arg-type]


FAST = {"fsync": "off"}  # no test pulls the plug


@pytest.fixture(scope="module", params=["postgres", "redis"])
def shared_server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    """One server of each kind: making a Postgres from nothing takes a second."""
    data_dir = tmp_path_factory.mktemp("embedded") / "data"
    is_postgres = request.param == "postgres"
    server = EmbeddedPostgres(data_dir, server_settings=FAST) if is_postgres else EmbeddedValkey(data_dir)
    yield server
    server.remove()


@pytest.fixture
def server(shared_server: EmbeddedServer) -> EmbeddedServer:
    """A server that does not run."""
    shared_server.stop()
    return shared_server


def test_data_and_url_outlive_a_clean_stop(server: EmbeddedServer) -> None:
    """What was written is there after stop and start, under the same URL."""
    server.start()
    write(server)
    url = server.url
    server.stop()
    server.start()

    assert read(server) == 7
    assert server.url == url


def test_another_object_on_the_same_data_finds_them_again(server: EmbeddedServer) -> None:
    """A later process needs nothing but the data directory."""
    server.start()
    write(server)
    server.stop()
    with type(server)(server.data_dir) as again:
        value, url = read(again), again.url

    assert value == 7
    assert url == server.url


def test_data_outlives_a_kill(server: EmbeddedServer) -> None:
    """After SIGKILL the next start recovers everything that was acknowledged."""
    server.start()
    write(server)
    pid = server.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    assert wait_until_gone(pid, 5)
    server.start()

    assert server.pid != pid
    assert read(server) == 7


def test_a_server_dies_with_the_process_that_started_it(server: EmbeddedServer) -> None:
    """SIGKILL of the parent ends the server within seconds, and its data is whole."""
    kind = type(server).__name__
    code = (
        f"import sys, time; from pathlib import Path; from gateway.dev.embedded import {kind}\n"
        f"server = {kind}(Path(sys.argv[1])); server.start(); print(server.pid, flush=True); time.sleep(600)"
    )
    command = [sys.executable, "-c", code, str(server.data_dir)]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT)
    assert parent.stdout is not None
    with parent:
        pid = int(parent.stdout.readline())
        was_running = is_running(pid)
        parent.kill()

    assert was_running
    assert wait_until_gone(pid, 10)
    server.start()
    write(server)
    assert read(server) == 7


def test_strangers_are_not_let_in(server: EmbeddedServer) -> None:
    """The password is asked for: other users of the machine reach the port too."""
    server.start()
    stranger = server.url.replace(server.address.password, "guess")

    with pytest.raises(Exception, match=r"(?i)password"):
        if isinstance(server, EmbeddedPostgres):
            query(stranger, "SELECT 1")
        else:
            Redis.from_url(stranger).ping()


def test_secrets_beside_the_data_are_private(server: EmbeddedServer) -> None:
    """Passwords are in files of mode 0600 and not among the arguments, which everybody can read."""
    server.start()
    arguments = Path(f"/proc/{server.pid}/cmdline").read_bytes()
    files = [path for path in server.data_dir.rglob("*") if path.is_file() and not path.is_symlink()]
    telling = [path for path in files if server.address.password.encode() in path.read_bytes()]

    assert server.address.password.encode() not in arguments
    assert telling
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in telling)


def test_a_thread_may_not_start_a_server(server: EmbeddedServer) -> None:
    """The kernel's death signal goes by thread: a server started in one would end with it."""
    caught: list[Exception] = []

    def start() -> None:
        try:
            server.start()
        except RuntimeError as exc:
            caught.append(exc)

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()

    assert "main thread" in str(caught[0])


@pytest.fixture
def postgres(tmp_path: Path) -> Iterator[EmbeddedPostgres]:
    """A Postgres that has never run, in a data directory closed to others."""
    data_dir = tmp_path / "closed"
    data_dir.mkdir(mode=0o700)
    postgres = EmbeddedPostgres(data_dir, server_settings=FAST)
    yield postgres
    postgres.remove()


def test_a_pid_file_that_names_a_stranger_is_stale(postgres: EmbeddedPostgres) -> None:
    """After a crash the pid in postmaster.pid may belong to another program of the same user by now."""
    postgres.start()
    account = Path(f"/proc/{postgres.pid}").stat().st_uid
    os.kill(postgres.pid or 0, signal.SIGKILL)
    pid_file = postgres.data_dir / "postgres" / "cluster" / "postmaster.pid"
    stranger = subprocess.Popen(["sleep", "60"], user=account)
    lines = pid_file.read_text().splitlines()
    pid_file.write_text("\n".join([str(stranger.pid), *lines[1:]]) + "\n")
    try:
        postgres.start()

        assert query(postgres.url, "SELECT 1") == 1
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_start_after_start_after_kill(server: EmbeddedServer) -> None:
    """Killed at once after each start, again and again, a server comes back every time."""
    server.start()
    write(server)
    for _ in range(4):
        os.kill(server.pid or 0, signal.SIGKILL)
        server.start()

    assert read(server) == 7


def test_an_interrupted_creation_is_begun_anew(postgres: EmbeddedPostgres) -> None:
    """A half-made cluster has another name than a whole one, and is thrown away."""
    postgres.start()
    postgres.stop()
    home = (postgres.data_dir / "postgres").resolve()
    (home / "cluster").rename(home / "unfinished")
    (home / "unfinished" / "PG_VERSION").unlink()
    postgres.start()

    assert query(postgres.url, "SELECT current_database()") == "tollgate"


def test_a_pointer_to_nothing_is_refused(postgres: EmbeddedPostgres) -> None:
    """Lost data is said to be lost, never silently replaced by an empty database."""
    (postgres.data_dir / "postgres").symlink_to(postgres.data_dir / "gone")

    with pytest.raises(EmbeddedFault, match="gone"):
        postgres.start()
    (postgres.data_dir / "postgres").unlink()


AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="SKIPPED: only root has to hand Postgres to another user")


@AS_ROOT
def test_root_hands_postgres_to_another_user_and_changes_no_modes(postgres: EmbeddedPostgres) -> None:
    """As root Postgres runs unprivileged, in a folder of its own in the data directory; closed folders stay closed."""
    folders = (postgres.data_dir, *postgres.data_dir.parents)
    before = [stat.S_IMODE(folder.stat().st_mode) for folder in folders]
    postgres.start()
    home = (postgres.data_dir / "postgres").resolve()
    account = Path(f"/proc/{postgres.pid}").stat().st_uid

    assert account != 0
    assert home.is_relative_to(postgres.data_dir)
    assert (stat.S_IMODE(home.stat().st_mode), home.stat().st_uid) == (0o700, account)
    assert [stat.S_IMODE(folder.stat().st_mode) for folder in folders] == before


def test_nothing_of_the_data_outlives_the_data_directory(postgres: EmbeddedPostgres) -> None:
    """Every open file and every folder that Postgres writes to is in the data directory, or in memory."""
    postgres.start()
    write(postgres)
    query(postgres.url, "CHECKPOINT")
    opened = set().union(*map(_opened_by, [postgres.pid or 0, *descendants_of(postgres.pid or 0)]))
    files = [path for path in opened if path.is_absolute() and not path.is_relative_to("/dev")]

    assert len(files) > 3
    assert [path for path in files if not path.is_relative_to(postgres.data_dir)] == []


def _opened_by(pid: int) -> set[Path]:
    """Return what a process has open, its folder too; nothing of one that has just ended, as workers of Postgres do."""
    process = Path(f"/proc/{pid}")
    with suppress(FileNotFoundError, ProcessLookupError):
        return {link.readlink() for link in (process / "cwd", *(process / "fd").iterdir())}
    return set()


@AS_ROOT
def test_a_file_system_without_owners_is_named(postgres: EmbeddedPostgres, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing half-made stays behind, so that the next start can succeed."""

    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "chown", refuse)

    with pytest.raises(EmbeddedFault, match="--data-dir"):
        postgres.start()
    assert not (postgres.data_dir / "postgres").exists()
