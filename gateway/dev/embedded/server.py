# What the embedded servers share: launch, wait until ready, stop; an address that outlives a restart.

from __future__ import annotations

import importlib.util
import secrets
import shutil
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Self

import msgspec

from gateway.core.private_files import write_privately
from gateway.run.processes import free_port, last_lines, stop
from protocol.errors import Unshown


class EmbeddedServer(ABC):
    """One server on a loopback port, with its data in ``data_dir/<name>`` and its log in ``data_dir/logs``.

    The process that starts it owns the data directory: no two may start it on the same one (see dev/folder.py).
    Start it from the main thread. As a context manager it is started, and stopped at the end.
    """

    name: str
    stop_signal: signal.Signals
    death_signal: signal.Signals

    def __init__(self, data_dir: Path, *, pass_fds: tuple[int, ...] = ()) -> None:
        self.pass_fds = pass_fds  # descriptors that the server keeps open as long as it lives
        self.data_dir = data_dir.absolute()
        self.log = self.data_dir / "logs" / f"{self.name}.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._address: Address | None = None

    def start(self, timeout: float = 30.0) -> None:
        """Launch the server and wait until it answers; raise EmbeddedFault when it does not within ``timeout``."""
        deadline = time.monotonic() + timeout

        def pause() -> None:
            if time.monotonic() > deadline:
                self.stop()
                raise EmbeddedFault(f"{self.name} was not ready within {timeout:g} s:\n{last_lines(self.log)}")
            time.sleep(0.01)

        self.launch()
        self.wait(self.launch, pause)

    def wait(self, launch: Callable[[], object], pause: Callable[[], object]) -> None:
        """Wait until the server answers, ``pause`` by pause; ``launch`` it again where it ended and that may help."""
        while not self.is_ready():
            if self.pid is None:
                if not self.is_worth_another_try():
                    raise EmbeddedFault(f"{self.name} ended at its start:\n{last_lines(self.log)}")
                launch()
            pause()

    def launch(self) -> subprocess.Popen[bytes]:
        """Start the server's process, without waiting until it answers."""
        self._reap()
        self._process = self._spawn(self.address)
        return self._process

    def stop(self, patience: float = 10.0) -> None:
        """End the server cleanly, or kill it after ``patience`` seconds. Stopping a stopped server does nothing."""
        if self._process is not None:
            stop(self._process, patience, self.stop_signal)
            self._process = None

    def remove(self) -> None:
        """Stop the server and delete its data for good."""
        self.stop()
        shutil.rmtree(self.data_dir / self.name, ignore_errors=True)

    @property
    def pid(self) -> int | None:
        """The server's main process, while it runs."""
        if self._process is None or self._process.poll() is not None:
            return None
        return self._process.pid

    @property
    def address(self) -> Address:
        """Port and password, found when first asked for and the same from then on."""
        if self._address is None:
            self._address = self._find_address()
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

    def _reap(self) -> None:
        """Let go of the process before; it may be dying this moment."""
        if self._process is not None:
            try:
                self._process.wait(5.0)
            except subprocess.TimeoutExpired:
                raise EmbeddedFault(f"{self.name} is running already, as process {self._process.pid}") from None

    def _find_address(self) -> Address:
        self.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
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


class EmbeddedFault(Exception):
    """An embedded server cannot run; the message says why and what can be done."""


class Address(Unshown, msgspec.Struct):
    """A server's port and password: kept beside its data, so that its URL outlives a restart."""

    port: int
    password: str


def package_folder(package: str) -> Path:
    """Return where a package lies without importing it: both do more at import than we want."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise EmbeddedFault(f"{package} is not installed: pip install 'tollgate[embedded]'")
    return Path(spec.origin).parent
