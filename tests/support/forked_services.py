# `tollgate serve` and `tollgate work` for houses that start dozens: each is forked from a process that has imported
# them, for a third of the CPU time of a start. The rest is as for a user: a child of ours with arguments, environment,
# log and a process group of its own, which ends with us. What a start itself does is tested by the real command.

from __future__ import annotations

import ctypes
import functools
import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from gateway.run.processes import spawn

MARK = "TOLLGATE_TEST_MARK"
UNMARKED = "0" * 16  # as long as a mark
MOST = 1 << 17  # bytes of arguments and environment
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
libc = ctypes.CDLL(None)
libc.getenv.restype = ctypes.c_void_p


def fork_service(words: list[str], log: Path, env: Mapping[str, str]) -> ForkedProcess:
    """Start `tollgate` with ``words``; ``env`` has a ``MARK``. For the main thread."""
    asked = json.dumps([["tollgate", *words], dict(env), str(Path.cwd())]).encode()
    assert len(env[MARK]) == len(UNMARKED) and len(asked) < MOST
    server = _server()
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)  # an orphan of the server is our child
    try:
        socket.send_fds(server, [asked], [descriptor])
        return ForkedProcess(int(server.recv(16)))
    finally:
        libc.prctl(PR_SET_CHILD_SUBREAPER, 0)
        os.close(descriptor)


class ForkedProcess:
    """A child that no Popen started, with what callers of a Popen ask of it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        """Return its status, or None while it runs."""
        with self._lock:
            if self.returncode is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                self.returncode = os.waitstatus_to_exitcode(status) if pid else None
            return self.returncode

    def wait(self, timeout: float = math.inf) -> int:
        """Return its status when it has ended. Raises ``subprocess.TimeoutExpired``."""
        deadline = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("tollgate", timeout)
            time.sleep(0.01)
        return status

    def send_signal(self, number: signal.Signals) -> None:
        """Send it a signal, if it has not ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)


@functools.cache
def _server() -> socket.socket:
    """Return the way to this process's server, which ends with it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-m", "tests.support.forked_services", str(theirs.fileno())]
    spawn(command, log=None, env={**os.environ, MARK: UNMARKED}, pass_fds=(theirs.fileno(),))
    theirs.close()
    return ours


def serve(client: socket.socket) -> None:
    """Start one service after the other."""
    from gateway.run.tuning import import_leanly, import_redis, put_off_collecting

    put_off_collecting()
    import uvicorn  # noqa: F401
    import uvloop  # noqa: F401

    import gateway.config.file

    import_leanly()
    import_redis()
    import gateway.http.http_protocol
    import gateway.run.app
    import gateway.run.worker  # noqa: F401
    from gateway.__main__ import main

    ours = os.getppid()
    while True:
        asked, descriptors, _, _ = socket.recv_fds(client, MOST, 1)
        if not asked:  # our parent has ended
            return
        (log,) = descriptors
        told, tell = os.pipe()
        if (between := os.fork()) == 0:
            if (pid := os.fork()) != 0:
                os.write(tell, str(pid).encode())
                os._exit(0)
            for descriptor in (told, tell, client.detach()):
                os.close(descriptor)
            _become_child_of(ours, log)
            sys.argv, environment, folder = json.loads(asked)
            ctypes.memmove(libc.getenv(MARK.encode()), environment[MARK].encode(), len(UNMARKED))  # as /proc shows it
            os.environ.clear()
            os.environ.update(environment)
            os.chdir(folder)
            main()  # ends by SystemExit
        os.waitpid(between, 0)
        client.send(os.read(told, 16))
        for descriptor in (told, tell, log):
            os.close(descriptor)


def _become_child_of(parent: int, log: int) -> None:
    while os.getppid() != parent:  # as soon as the process between has ended
        time.sleep(0.001)
    libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:
        os._exit(1)
    os.setpgid(0, 0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for ours, theirs in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(ours, theirs)
    os.close(nothing)
    os.close(log)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
