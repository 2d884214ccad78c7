# Replicas as processes of this machine. They live on when the controller dies: the next one knows them by their logs,
# which lie in its data directory, and by their command lines.

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from fcntl import LOCK_EX, LOCK_NB, flock
from pathlib import Path

from gateway.placing.environment import inherited
from gateway.placing.placer import INSTANCE_ID, CannotPlace, Order

PROGRAM = (sys.executable, "-m", "gpu_backend")
DEVICES = "CUDA_VISIBLE_DEVICES"
LOOKS, LOOKS_EVERY = 200, 0.005  # times, seconds
LOCK_LOOKS = 2_000  # so often
MOST_LOGS = 50  # of replicas that have ended


class LocalPlacer:
    """Starts processes whose output goes to files of ``folder``."""

    def __init__(self, folder: Path, program: Sequence[str] = PROGRAM) -> None:
        self._folder, self._program = folder, program
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as exc:
            raise CannotPlace(f"{folder} cannot be made: {exc.strerror or exc}") from exc
        self._pids: dict[str, int] = {}
        self._others: dict[str, int] = {}  # logs of no replica that is known, and when they were written (nanoseconds)
        self._adopt()

    def start(self, order: Order) -> None:
        """Start a process in a group of its own, on GPUs that no replica has."""
        with _choosing_gpus() if order.gpus else nullcontext():
            self._start(order)

    def _start(self, order: Order) -> None:
        running = self.names()
        given = {**order.environment, DEVICES: _free_devices(order.gpus)}
        place = self._folder / f"{order.name}.log"
        try:
            self._forget_logs(running)
            log = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        except OSError as exc:
            raise CannotPlace(f"{place} cannot be written: {exc.strerror or exc}") from exc
        try:
            child = subprocess.Popen(
                [*self._program, *order.arguments],
                env=inherited(os.environ, order.inherited) | given,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C ends the controller, which then ends its replicas in order
            )
        except OSError as exc:
            raise CannotPlace(f"{self._program[0]} cannot be started: {exc.strerror or exc}") from exc
        finally:
            os.close(log)
        self._children[child.pid], self._pids[order.name] = child, child.pid
        for _ in range(LOOKS):  # the system tells of a program's words and variables a moment after it has begun
            if child.poll() is not None or _name_at(child.pid) == order.name:
                break
            time.sleep(LOOKS_EVERY)
        with suppress(OSError):
            os.utime(place)  # another placer that looked before there was a process looks again

    def names(self) -> Collection[str]:
        """Return the replicas whose processes run, whichever placer of this folder started them."""
        for pid, child in list(self._children.items()):
            if child.poll() is not None:
                del self._children[pid]
        self._adopt()
        self._pids = {name: pid for name, pid in self._pids.items() if self._is_there(name, pid)}
        return self._pids.keys()

    def stop(self, name: str) -> None:
        """Send SIGTERM, at which an engine leaves its pool and lets running replies end."""
        self._send(name, signal.SIGTERM)

    def kill(self, name: str) -> None:
        """Send SIGKILL, with which the process that computes ends, too."""
        self._send(name, signal.SIGKILL)

    def _send(self, name: str, number: signal.Signals) -> None:
        if name in self.names():
            with suppress(ProcessLookupError):
                os.kill(self._pids[name], number)

    def _is_there(self, name: str, pid: int) -> bool:
        """Whether the process still runs: one of our own, or another whose command line says so."""
        return pid in self._children or _name_at(pid) == name

    def _adopt(self) -> None:
        """Find the processes of replicas that others started: a controller before this one, or one that stood still
        while its lease ended, and did not know that yet. Looks for them where a log is written that is none of ours."""
        others = dict[str, int]()
        for log in self._folder.glob("*.log"):
            if log.stem not in self._pids:
                with suppress(FileNotFoundError):
                    others[log.stem] = log.stat().st_mtime_ns
        if not others.items() <= self._others.items():
            found = ((_name_at(pid), pid) for pid in _own_processes())
            self._pids |= {name: pid for name, pid in found if name is not None and name in others}
        self._others = others

    def _forget_logs(self, running: Collection[str]) -> None:
        """Delete the logs of replicas that ended longest ago."""
        ended = [log for log in self._folder.glob("*.log") if log.stem not in running]
        for log in sorted(ended, key=lambda log: log.stat().st_mtime)[:-MOST_LOGS]:
            log.unlink(missing_ok=True)


@contextmanager
def _choosing_gpus() -> Iterator[None]:
    """Let one controller of this user choose and take GPUs at a time: those of a machine begin together."""
    place = Path(tempfile.gettempdir(), f"tollgate-gpus-{os.getuid()}.lock")
    try:
        lock = os.open(place, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as exc:
        raise CannotPlace(f"{place} cannot be opened: {exc.strerror or exc}") from exc
    try:
        for _ in range(LOCK_LOOKS):
            with suppress(BlockingIOError):
                flock(lock, LOCK_EX | LOCK_NB)
                break
            time.sleep(LOOKS_EVERY)
        else:
            raise CannotPlace("another controller of this machine chooses its GPUs")
        yield
    finally:
        os.close(lock)


def _free_devices(count: int) -> str:
    """Return the GPUs for another replica, as CUDA is told them: those that none has, of any controller of this user,
    whatever its folder. Raises ``CannotPlace``."""
    given = os.environ.get(DEVICES)
    devices = sorted(each.name[6:] for each in Path("/dev").glob("nvidia[0-9]*")) if given is None else _split(given)
    replicas = (pid for pid in _own_processes() if _name_at(pid) is not None) if count else ()
    taken = {device for pid in replicas for device in _split(_variable_at(pid, DEVICES))}
    free = [device for device in devices if device not in taken]
    if count > len(free):
        raise CannotPlace(f"it needs GPUs: {count}, and {len(free)} of {len(devices)} are free")
    return ",".join(free[:count])


def _own_processes() -> Iterable[int]:
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if folder.stat().st_uid == os.getuid():
                yield int(folder.name)


def _name_at(pid: int) -> str | None:
    """Return the name of the replica that a process is; a process that has ended has no command line."""
    words = _read(pid, "cmdline").split(b"\0")
    place = words.index(INSTANCE_ID.encode()) + 1 if INSTANCE_ID.encode() in words else len(words)
    return words[place].decode(errors="replace") if place < len(words) else None


def _variable_at(pid: int, name: str) -> str:
    pairs = (pair.partition(b"=") for pair in _read(pid, "environ").split(b"\0"))
    return next((value.decode(errors="replace") for key, _, value in pairs if key == name.encode()), "")


def _read(pid: int, what: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{what}").read_bytes()
    except OSError:
        return b""


def _split(devices: str) -> list[str]:
    return [each.strip() for each in devices.split(",") if each.strip()]
