# One `tollgate` process of a house of faults: started, killed, frozen, and started again; and how to freeze anything.

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from gateway.run.processes import last_lines, spawn, stop

TOLLGATE = Path(sys.executable).with_name("tollgate")
START_WITHIN = 120.0  # seconds, on a machine that does much else


# Words, log and environment -> the process. From the main thread.
Run = Callable[[list[str], Path, dict[str, str]], Any]


def run_tollgate(words: list[str], log: Path, env: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start the command as users do."""
    return spawn([TOLLGATE, *words], log=log, env=env)


class Service:
    """`tollgate serve` or `tollgate work`, always on the same port and with the same log.

    It dies with the thread that started it: ``start`` is for the main thread, the rest for any.
    """

    def __init__(
        self,
        name: str,
        words: list[str],
        log: Path,
        env: dict[str, str],
        url: str = "",
        run: Run = run_tollgate,
    ) -> None:
        self.name = name
        self.words = words
        self.log = log
        self.url = url  # of a gateway
        self.downtimes: list[tuple[float, float]] = []  # monotonic seconds: from its kill until it was ready again
        self._run = run
        self._env = env
        self._log_start = 0
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """The process that runs now."""
        assert self._process is not None and self._process.poll() is None, f"{self.name} does not run"
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether it was started and has not ended."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start it and wait until it does its work."""
        self.launch()
        self.wait_until_ready()

    def launch(self) -> None:
        """Start it."""
        self._log_start = self.log.stat().st_size if self.log.exists() else 0
        self._process = self._run(self.words, self.log, self._env)

    def wait_until_ready(self) -> None:
        """Wait until it does its work."""
        deadline = time.monotonic() + START_WITHIN
        while not self._is_ready():
            assert self.is_running, f"{self.name} ended at its start:\n{last_lines(self.log)}"
            assert time.monotonic() < deadline, f"{self.name} did not start:\n{last_lines(self.log)}"
            time.sleep(0.05)
        if self.downtimes:
            self.downtimes[-1] = (self.downtimes[-1][0], time.monotonic())

    def kill(self) -> None:
        """End it with SIGKILL, this very moment."""
        pid = self.pid
        self.downtimes.append((time.monotonic(), float("inf")))
        os.kill(pid, signal.SIGKILL)

    def end(self, patience: float = 30.0) -> int:
        """End it politely, or with SIGKILL when its patience is at an end; return its exit status."""
        return 0 if self._process is None else stop(self._process, patience)

    def _is_ready(self) -> bool:
        if not self.url:
            with self.log.open("rb") as log:
                log.seek(self._log_start)
                return b"worker_started" in log.read()
        try:
            return httpx.get(self.url + "/health/live", timeout=2).status_code == 200
        except httpx.HTTPError:
            return False


def freeze(pids: list[int], seconds: float) -> subprocess.Popen[bytes]:
    """Stop processes for a while; wait for the returned process to know that they go on.

    A shell does it: should we die meanwhile, they are not left frozen, deaf to the signal that ends them with us.
    """
    numbers = " ".join(map(str, pids))
    script = f"kill -STOP {numbers}; sleep {seconds:g}; kill -CONT {numbers}"
    return subprocess.Popen(["/bin/sh", "-c", script], start_new_session=True)


@contextmanager
def frozen(pids: list[int]) -> Iterator[None]:
    """Keep processes stopped inside of the block; a shell lets them go on at its end, or with the end of us."""
    numbers = " ".join(map(str, pids))
    script = f"kill -STOP {numbers}; echo; read -r _; kill -CONT {numbers}"
    with subprocess.Popen(
        ["/bin/sh", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    ) as shell:
        assert shell.stdin is not None and shell.stdout is not None
        shell.stdout.readline()
        try:
            yield
        finally:
            shell.stdin.close()
            shell.wait()
