# Starts an embedded Postgres and Valkey, the demo model's engine on the CPU, a worker and a gateway, each by its
# ordinary command, keeps them alive, and leaves no process behind. This process imports little and holds little: it
# only watches.

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from gateway.config.tree import ConfigFaults, Section
from gateway.core.private_files import write_privately
from gateway.dev.client import DEMO_TEAM, StackClient
from gateway.dev.config import (
    CHECKPOINT,
    DEMO_MODEL,
    DRAIN,
    StackSecrets,
    joined,
    read_config_file,
    stack_config,
    text_at,
    to_yaml,
)
from gateway.dev.embedded import EmbeddedFault, EmbeddedPostgres, EmbeddedServer, EmbeddedValkey
from gateway.dev.folder import StackFolder
from gateway.dev.greeting import Ready, welcome
from gateway.run.processes import LOOPBACK, free_port, last_lines, spawn, stop
from gateway.run.serving import TIDY_UP
from gateway.run.supervisor import Child, StartFailed, StopRequested, Supervisor
from protocol.serving.listening import open_socket

ROOT = Path(__file__).resolve().parents[2]
NEWEST_SCHEMA = max(path.stem for path in (ROOT / "migrations" / "versions").glob("[0-9]*.py"))
ENGINE_SECRET = "TOLLGATE_ENGINE_SECRET"  # the variable in which the engine is told its secret
START_WITHIN = 60.0  # seconds; a busy laptop takes a tenth of it
STOP_ORDER = (("gateway", "worker"), ("engine",), ("postgres", "redis"))


def run_stack(port: int, data_dir: Path, config: Path | None, as_json: bool) -> int:
    """Start the stack, print how to use it, keep it alive until a signal ends it; return the exit status."""
    with Supervisor(say=_say) as supervisor:
        stack = Stack(supervisor, port, data_dir, config)
        try:
            ready = stack.open()
            supervisor.on_hangup = stack.hang_up
            _print(msgspec.json.encode(ready).decode() if as_json else welcome(ready, data_dir))
            while True:
                supervisor.tend()
                supervisor.pause(0.5)
        except StopRequested:
            return 0
        except (StartFailed, EmbeddedFault, ConfigFaults) as exc:
            _say(str(exc))
            return 1
        finally:
            stack.close()


class Stack:
    """Everything `tollgate dev` runs, and the order in which it comes and goes."""

    def __init__(self, supervisor: Supervisor, port: int, data_dir: Path, config: Path | None) -> None:
        self.supervisor = supervisor
        self.port = port
        self.folder = StackFolder(data_dir)
        self.config = config
        self.listener: socket.socket | None = None
        self.environment = dict(os.environ)  # of our commands
        self.migration: subprocess.Popen[bytes] | None = None
        self.deadline = time.monotonic() + START_WITHIN
        self.has_terminal = has_terminal()

    def open(self) -> Ready:
        """Start everything, the slowest first; return when a request would be answered."""
        file = None if self.config is None else read_config_file(self.config)
        self.listener = listener = self._listen()
        self.lock = self.folder.take(self.supervisor.pause)
        self.supervisor.pids_changed = self.folder.write_pids
        self.folder.put_long_logs_aside()
        known = StackSecrets.load(self.folder.secrets)
        known.port, known.engine_port = self.port, free_port(known.engine_port)
        known.save(self.folder.secrets)
        self.known = known
        self.engine_url = f"http://{LOOPBACK}:{known.engine_port}"
        servers = self._servers(file)
        if "database_url" in servers:
            # The embedded server has no TLS. Told so, the driver looks for no certificates in a closed home folder.
            self.environment["PGSSLMODE"] = "disable"
        self.stores = {name: each.url for name, each in servers.items()}
        tree = self._configure(file)
        self._start_engine(known.engine_port)
        if "database_url" not in servers or self.folder.schema() != NEWEST_SCHEMA:
            self._start_migration()
        for server in servers.values():
            self._start_server(server)
        if self.migration is not None:
            self._finish_migration(self.migration)
        if "database_url" in servers:
            self.folder.note_schema(NEWEST_SCHEMA)
        self._start("gateway", "serve", pass_fds=(listener.fileno(),))
        admin_key = text_at(tree, "admin_keys", 0) or ""
        client = StackClient(self.port)
        self._wait(lambda: client.succeeds("/health/ready"), "gateway")
        self._start("worker", "work")  # later, so that it does not delay the gateway
        if known.team_key is None or not client.succeeds("/v1/models", known.team_key):
            known.team_key = client.make_demo_key(admin_key)
            known.save(self.folder.secrets)
        engine = StackClient(known.engine_port)
        self._wait(lambda: engine.succeeds("/health"), "engine")
        return Ready(
            url=f"http://{LOOPBACK}:{self.port}",
            team_id=DEMO_TEAM,
            team_key=known.team_key,
            admin_key=admin_key,
            models=client.models(known.team_key),
            database_url=text_at(tree, "database_url") or "",
            redis_url=text_at(tree, "redis_url") or "",
            engine_url=self.engine_url,
            pids=self.supervisor.pids(),
        )

    def hang_up(self) -> None:
        """Read the --config file again, and have gateway and worker follow; a faulty one is reported and ignored.

        Raises StopRequested where SIGHUP means that the terminal is gone.
        """
        if self.has_terminal and not has_terminal():
            raise StopRequested(signal.SIGHUP)
        if self.config is None:
            _say("SIGHUP: there is no --config file to read again")
            return
        try:
            self._configure(read_config_file(self.config))
        except ConfigFaults as exc:
            _say(f"{exc}\n{self.config} is refused; everything stays as it was")
            return
        self.supervisor.signal_all(signal.SIGHUP, "gateway", "worker")
        _say(f"{self.config} was read again")

    def close(self) -> None:
        """Let open calls end, then end everything: clients before their servers, the stores last."""
        self.supervisor.on_hangup = None
        if self.listener is not None:
            self.listener.close()  # from here on no new connection is accepted
        if self.migration is not None:
            stop(self.migration, 1.0)
        self.supervisor.stop(STOP_ORDER)

    def _configure(self, file: Section | None) -> Section:
        """Write the tollgate.yaml that the stack's processes read, and return it. Raises ConfigFaults."""
        settings = stack_config(CHECKPOINT, self.engine_url, self.stores, self.known, file, os.environ)
        tree = joined(settings, file, self.folder.path)
        self._check(settings)
        write_privately(self.folder.settings, to_yaml(tree).encode())
        return tree

    def _listen(self) -> socket.socket:
        try:
            return open_socket(LOOPBACK, self.port)
        except OSError as exc:
            raise StartFailed(f"port {self.port} cannot be had ({exc.strerror}); choose another: --port") from exc

    def _servers(self, file: Section | None) -> dict[str, EmbeddedServer]:
        """Return the stores that the --config file does not name, by the setting that says where they are."""
        kinds: dict[str, type[EmbeddedServer]] = {"redis_url": EmbeddedValkey, "database_url": EmbeddedPostgres}
        given = file.entries if file is not None else {}
        return {
            name: kind(self.folder.path, pass_fds=(self.lock,)) for name, kind in kinds.items() if name not in given
        }

    def _start_server(self, server: EmbeddedServer) -> None:
        child = Child(server.name, server.launch, server.stop_signal, lists_descendants=False)
        self.supervisor.start(child)
        server.wait(child.start, lambda: self._pause(server.name, 0.02))
        self.supervisor.note_pids()

    def _start_engine(self, port: int) -> None:
        command: list[str | Path] = [sys.executable, "-m", "gpu_backend", "--model", CHECKPOINT]
        # Steps of so small a model need no measuring, which would take longer than all else of its start.
        command += ["--served-model-name", DEMO_MODEL, "--port", str(port), "--device", "cpu", "--step-cost", "off"]
        command += ["--num-threads", "1"]  # two gain it nothing, and wait for each other where a core is busy
        engine, secret = StackClient(port), self.known.engine_secret
        # Anything on this machine that has the secret may drain it, and then it answers nothing for ever.
        self._start_child(
            "engine", command, environment={ENGINE_SECRET: secret}, is_spent=lambda: engine.is_drained(secret)
        )

    def _start(self, role: str, command: str, pass_fds: tuple[int, ...] = ()) -> None:
        words: list[str | Path] = [sys.executable, "-m", "gateway.cli", command, "--config", self.folder.settings]
        words += [word for fd in pass_fds for word in ("--fd", str(fd))]
        self._start_child(role, words, pass_fds)

    def _start_child(
        self,
        role: str,
        command: list[str | Path],
        pass_fds: tuple[int, ...] = (),
        environment: Mapping[str, str] = MappingProxyType({}),
        is_spent: Callable[[], bool] | None = None,
    ) -> None:
        def launch() -> subprocess.Popen[bytes]:
            # Processes that read our settings file get SIGHUP after a change; without a handler it would kill them.
            blocked = (signal.SIGHUP,) if role in ("gateway", "worker") else ()
            return spawn(
                command,
                log=self.folder.log(role),
                env={**self.environment, **environment},
                pass_fds=(self.lock, *pass_fds),
                blocked=blocked,
            )

        self.supervisor.start(Child(role, launch, patience=DRAIN + TIDY_UP, is_spent=is_spent))

    def _start_migration(self) -> None:
        """Let `tollgate migrate` load while Postgres comes up; it waits for it."""
        words: list[str | Path] = [sys.executable, "-m", "gateway.cli", "migrate", "--config", self.folder.settings]
        words += ["--wait", f"{START_WITHIN:g}"]
        self.migration = spawn(words, log=self.folder.log("migrate"), env=self.environment, pass_fds=(self.lock,))

    def _finish_migration(self, migration: subprocess.Popen[bytes]) -> None:
        while migration.poll() is None:
            self._pause("migrate", 0.02)
        if migration.returncode != 0:
            raise StartFailed(f"`tollgate migrate` failed:\n{last_lines(self.folder.log('migrate'))}")

    def _check(self, settings: dict[str, Any]) -> None:
        """Check the --config file together with what we add. Raises ConfigFaults with the lines of the user's file."""
        if self.config is None:
            return
        from gateway.config.file import load_settings  # what reads prices and providers weighs something

        for one in load_settings(self.config, os.environ, settings).left_out:
            _say(f"{self.config}: {one.line()}")

    def _wait(self, is_done: Callable[[], bool], role: str) -> None:
        while not is_done():
            self._pause(role, 0.05)

    def _pause(self, role: str, seconds: float) -> None:
        """Wait a moment for ``role``; while the stack starts, a child that dies is a failure."""
        dead = self.supervisor.first_dead()
        if dead is not None and dead.role not in ("postgres", "redis"):
            raise StartFailed(f"the {dead.role} ended at its start:\n{last_lines(self.folder.log(dead.role))}")
        if time.monotonic() > self.deadline:
            words = f"the {role} was not ready within {START_WITHIN:g} s"
            raise StartFailed(f"{words}; the end of its log:\n{last_lines(self.folder.log(role))}")
        self.supervisor.pause(seconds)
        self.supervisor.note_pids()


def has_terminal() -> bool:
    """Whether this process belongs to a terminal, and it is still there."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True


def _print(words: str) -> None:
    sys.stdout.write(f"{words}\n")
    sys.stdout.flush()


def _say(words: str) -> None:
    sys.stderr.write(f"{words}\n")
    sys.stderr.flush()
