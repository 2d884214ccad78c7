# `tollgate serve`: the app under uvicorn, in this process or in several that share one listening socket. With a shared
# socket a connection goes to an idle worker, and none is lost in the queue of a worker that dies.

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from gateway.run.processes import spawn
from gateway.run.supervisor import Child, StopRequested, Supervisor
from gateway.run.tuning import gather_memory, spare_what_stays
from protocol.serving.listening import close_door, raise_descriptor_limit

if TYPE_CHECKING:
    from gateway.core.settings import Settings

KEEP_ALIVE = 75.0  # seconds that an idle connection stays open: longer than clients and proxies keep theirs
TIDY_UP = 15.0  # seconds beyond the drain for settling and flushing
BEHIND_PARENT = 0.2  # seconds that a worker accepts after its parent has closed the door


def serve(path: Path, settings: Settings, listener: socket.socket, *, is_shared: bool) -> int:
    """Serve in this process until SIGTERM or SIGINT, then let open calls end within ``settings.drain``.

    A second signal ends it at once. SIGHUP has the file at ``path`` read again. ``is_shared``: a parent has the socket
    too. Returns the exit status.
    """
    import uvicorn

    from gateway.config.file import load_settings
    from gateway.core.draining import Drain, DrainingServer
    from gateway.http.http_protocol import ConnectionLimit, HttpProtocol
    from gateway.run.app import create_app
    from gateway.run.reload import Reloader
    from gateway.telemetry.logging import configure_logging

    # Heard before uvicorn listens, and when it is done: it raises the signal that ended it once more.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _leave)
    configure_logging()
    raise_descriptor_limit()
    drain, reloader, connections = Drain(), Reloader(lambda: load_settings(path)), ConnectionLimit()
    config = uvicorn.Config(
        create_app(settings, drain=drain, reloader=reloader, connections=connections),
        loop="uvloop",
        http=partial(HttpProtocol, connections=connections),  # type: ignore[arg-type]
        ws="none",
        lifespan="on",
        access_log=False,
        log_config=None,
        server_header=False,
        proxy_headers=False,  # gateway/core/client_addresses.py reads them
        timeout_keep_alive=round(KEEP_ALIVE),
    )
    lame_duck = settings.lame_duck + (BEHIND_PARENT if is_shared else 0.0)
    server = DrainingServer(
        config, drain, seconds=settings.drain, lame_duck=lame_duck, is_shared=is_shared, on_hangup=reloader.reload
    )
    spare_what_stays()
    gather_memory()
    signal.signal(signal.SIGHUP, server.hang_up)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})  # held since before the file was read
    server.run(sockets=[listener])
    return 0 if server.started else 1


def serve_with_workers(config: Path, listener: socket.socket, workers: int, settings: Settings) -> int:
    """Keep ``workers`` processes serving on one socket until SIGTERM or SIGINT, then drain them."""
    spare_what_stays()
    command: list[str | Path] = [sys.executable, "-m", "gateway.cli", "serve", "--config", config]
    command += ["--fd", str(listener.fileno())]
    with tempfile.TemporaryDirectory(prefix="tollgate-metrics-") as metrics, Supervisor(say=_say) as supervisor:
        # Prometheus adds the workers' numbers up through files in this folder.
        environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": metrics}

        def launch() -> subprocess.Popen[bytes]:
            return spawn(command, log=None, env=environment, pass_fds=(listener.fileno(),), blocked=(signal.SIGHUP,))

        supervisor.on_hangup = lambda: supervisor.signal_all(signal.SIGHUP, "worker")

        for _ in range(workers):
            supervisor.start(Child("worker", launch, patience=settings.drain + TIDY_UP))
        try:
            while True:
                supervisor.tend()
                supervisor.pause(1.0)
        except StopRequested as exc:
            # The workers accept a little longer than new connections come in: none of these is left unaccepted.
            lame_duck = min(settings.lame_duck, settings.drain) if exc.number is signal.SIGTERM else 0.0
            door = threading.Timer(lame_duck, _leave_the_door, [listener])
            door.start()
            for child in supervisor.children:
                child.stop_signal = exc.number
            supervisor.stop([("worker",)])
            door.cancel()
            listener.close()
    return 0


def _leave_the_door(listener: socket.socket) -> None:
    """Accept no more connections, and leave the accepted ones to the workers.

    As long as this process held the socket, connections would be made that no worker accepts, and be reset when the
    last call ends.
    """
    close_door(listener)
    listener.close()


def _leave(*_: object) -> NoReturn:
    """End now: the server is closed or not yet open, and taking a thousand modules apart would last a second."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)  # noqa: T201
