# One child process: started so that it ends with its parent, however that one ends, and stopped by a signal, then
# killed. Everything that starts one of our processes does it here: `tollgate dev`, `tollgate serve` and the embedded
# servers.

from __future__ import annotations

import ctypes
import os
import random
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from msgspec import Struct

PR_SET_PDEATHSIG = 1  # linux/prctl.h
LOOPBACK = "127.0.0.1"
LAST_LINES = 15  # of a log, that say why a child died
# Below the range from which the kernel takes ports for outgoing connections: such a port stays ours over a restart.
LISTENING_PORTS = range(20_000, 32_000)


class SystemUser(Struct, frozen=True):
    """The system user a child runs as."""

    name: str
    uid: int
    gid: int


def spawn(
    command: Sequence[str | Path],
    *,
    log: Path | None,
    user: SystemUser | None = None,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    stdin: int = subprocess.DEVNULL,
    pass_fds: Iterable[int] = (),
    death_signal: signal.Signals = signal.SIGKILL,
    blocked: Iterable[signal.Signals] = (),
) -> subprocess.Popen[bytes]:
    """Start a command that gets ``death_signal`` when its parent dies.

    Its output is appended to ``log``, or joins ours. It leads a process group of its own, so that Ctrl-C reaches the
    parent alone, which then ends its children in order. Linux sends the death signal when the *thread* that started the
    child ends, hence only the main thread may start one. Signals in ``blocked`` wait until the command unblocks them.
    """
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("a child dies with the thread that started it: start it from the main thread")
    output = None if log is None else _open_log(log)
    try:
        return subprocess.Popen(
            [str(word) for word in command],
            stdin=stdin,
            stdout=output,
            stderr=output,
            env=None if env is None else dict(env),
            cwd=cwd,
            pass_fds=tuple(pass_fds),
            process_group=0,
            # Runs after the change of user, which would clear the death signal (prctl(2)).
            preexec_fn=_die_with_parent(os.getpid(), death_signal, frozenset(blocked)),
            user=None if user is None else user.uid,
            group=None if user is None else user.gid,
            extra_groups=None if user is None else (),
        )
    finally:
        if output is not None:
            os.close(output)


def _open_log(log: Path) -> int:
    log.parent.mkdir(parents=True, exist_ok=True)
    return os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)


def _die_with_parent(
    parent: int, death_signal: signal.Signals, blocked: frozenset[signal.Signals]
) -> Callable[[], None]:
    prctl = ctypes.CDLL(None, use_errno=True).prctl  # resolved before the fork: the child should only call it

    def prepare_child() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)  # a supervisor blocks what it waits for
        prctl(PR_SET_PDEATHSIG, int(death_signal))
        if os.getppid() != parent:  # it died before the line above
            os._exit(1)

    return prepare_child


def stop(process: subprocess.Popen[bytes], patience: float, polite: signal.Signals = signal.SIGTERM) -> int:
    """Ask the process to end, wait ``patience`` seconds, then kill it; return its exit status."""
    if process.poll() is None:
        process.send_signal(polite)
    try:
        return process.wait(patience)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def wait_until_gone(pid: int, seconds: float) -> bool:
    """Wait for a process that is not our child; return whether it ended in time."""
    deadline = time.monotonic() + seconds
    while is_running(pid):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def is_running(pid: int) -> bool:
    """Return whether the process exists and is not a zombie."""
    return state_of(pid) not in (None, "Z", "X")


def state_of(pid: int) -> str | None:
    """Return the letter of the process's state (proc(5)), or ``None`` when there is no such process."""
    try:
        # The name in parentheses may hold anything; what follows the last one is regular.
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return None


def descendants_of(pid: int) -> list[int]:
    """Return the process's living children, their children and so on, parents first."""
    found: list[int] = []
    waiting = [pid]
    while waiting:
        parent = waiting.pop(0)
        children = _children_of(parent)
        found += children
        waiting += children
    return found


def _children_of(pid: int) -> list[int]:
    children: list[int] = []
    with suppress(OSError):  # the process has ended meanwhile
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):  # the thread has
                children += map(int, (thread / "children").read_text().split())
    return [child for child in children if is_running(child)]


def free_port(preferred: int | None = None) -> int:
    """Return a loopback port that no process listens on: the preferred one if it is free."""
    candidates = [] if preferred is None else [preferred]
    candidates += random.SystemRandom().sample(LISTENING_PORTS, 100)
    for port in candidates:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((LOOPBACK, port))
            except OSError:
                continue
            return port
    raise OSError(f"none of {len(candidates)} ports tried on {LOOPBACK} is free")


def last_lines(log: Path) -> str:
    """Return the end of a log, to say why a child died."""
    try:
        return "\n".join(log.read_text(errors="replace").splitlines()[-LAST_LINES:])
    except OSError:
        return ""
