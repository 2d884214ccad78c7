# `tollgate serve`: the app under uvicorn, in this process or in several that share one listening socket. With a shared
# socket a connection goes to whoever is idle, and none is lost in the queue of a worker that dies.

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from gateway.processes import spawn
from gateway.supervisor import Child, StopRequested, Supervisor

if TYPE_CHECKING:
    from gateway.settings import Settings

BACKLOG = 2048
KEEP_ALIVE = 75.0  # seconds that an idle connection stays open: longer than clients and proxies keep theirs
UNREAD = 60.0  # seconds that a client may leave all that was sent unread
TIDY_UP = 15.0  # seconds beyond the drain for settling and flushing


def open_socket(host: str, port: int, unread: float = UNREAD) -> socket.socket:
    """Return a socket that listens; raise OSError when the port is taken.

    A client that takes nothing of what was sent for ``unread`` seconds has left: the kernel closes its connection.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux has it; every connection inherits it
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(unread * 1000))
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def serve(settings: Settings, listener: socket.socket) -> int:
    """Serve in this process until SIGTERM or SIGINT, then let open calls end within ``settings.drain``.

    A second SIGINT ends it at once. Returns the exit status.
    """
    import structlog
    import uvicorn

    from gateway.app import create_app
    from gateway.telemetry.logging import configure_logging

    # Heard before uvicorn listens, and when it is done: it raises the signal that ended it once more.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: sys.exit(0))
    configure_logging()
    # Its meaning for a service is "read your configuration again"; by default it would kill.
    signal.signal(signal.SIGHUP, lambda *_: structlog.get_logger().warning("reload_needs_a_restart"))
    server = uvicorn.Server(
        uvicorn.Config(
            create_app(settings),
            loop="uvloop",
            http="httptools",
            ws="none",
            lifespan="on",
            access_log=False,
            log_config=None,
            server_header=False,
            timeout_keep_alive=round(KEEP_ALIVE),
            timeout_graceful_shutdown=round(settings.drain),
        )
    )
    server.run(sockets=[listener])
    return 0 if server.started else 1


def serve_with_workers(config: Path, listener: socket.socket, workers: int, drain: float) -> int:
    """Keep ``workers`` processes serving on one socket until SIGTERM or SIGINT, then drain them."""
    command: list[str | Path] = [
        sys.executable,
        "-m",
        "gateway.cli",
        "serve",
        "--config",
        config,
        "--fd",
        str(listener.fileno()),
    ]
    stop_signals = frozenset({signal.SIGINT, signal.SIGTERM})
    with (
        tempfile.TemporaryDirectory(prefix="tollgate-metrics-") as metrics,
        Supervisor(say=_say, stop_signals=stop_signals, forwarded=frozenset({signal.SIGHUP})) as supervisor,
    ):
        # Prometheus adds the workers' numbers up through files in this folder.
        environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": metrics}

        def launch() -> subprocess.Popen[bytes]:
            return spawn(command, log=None, env=environment, pass_fds=(listener.fileno(),))

        for _ in range(workers):
            supervisor.start(Child("worker", launch, patience=drain + TIDY_UP))
        try:
            while True:
                supervisor.tend()
                supervisor.pause(1.0)
        except StopRequested:
            listener.close()
            supervisor.stop([("worker",)])
    return 0


def _say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)  # noqa: T201
