# `tollgate dev` as a user starts it: a process with a data directory, one line of JSON, and signals.

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx

from gateway.run.processes import free_port

TOLLGATE = Path(sys.executable).with_name("tollgate")
MARK = "TOLLGATE_TEST_MARK"


class DevHouse:
    """One data directory, and the houses that run on it one after the other."""

    def __init__(self, data_dir: Path, *options: str, user: str | None = None) -> None:
        self.data_dir = data_dir
        self.user = user  # None: whoever runs the tests
        self.options = options
        self.mark = secrets.token_hex(8)  # in the environment of everything it starts
        self.facts: dict[str, Any] = {}
        self.answered = 0  # questions, of those that were asked here

    def launch(self, port: int | None = None) -> subprocess.Popen[bytes]:
        """Start `tollgate dev` without waiting for it."""
        command = [str(TOLLGATE), "dev", "--json", "--port", str(port or free_port())]
        command += ["--data-dir", str(self.data_dir), *self.options]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, MARK: self.mark, "OMP_NUM_THREADS": "1"},
            cwd=self.data_dir.parent,
            start_new_session=True,
            user=self.user,
            extra_groups=None if self.user is None else (),
        )
        return self.process

    def start(self) -> dict[str, Any]:
        """Start it and return the line it prints when it is ready."""
        process = self.launch()
        assert process.stdout is not None and process.stderr is not None
        line = process.stdout.readline()
        if not line:
            raise AssertionError(f"`tollgate dev` ended with {process.wait()}: {process.stderr.read().decode()}")
        self.facts = json.loads(line)
        return self.facts

    @property
    def is_running(self) -> bool:
        """Whether it was started and has not ended."""
        return bool(self.facts) and self.process.poll() is None

    def end(self, number: signal.Signals) -> int:
        """Send a signal and return the exit status."""
        self.process.send_signal(number)
        return self.process.wait(40)

    @property
    def engine(self) -> dict[str, str]:
        """The headers of one who may call the engine."""
        secret = json.loads((self.data_dir / "secrets.json").read_bytes())["engine_secret"]
        return {"authorization": f"Bearer {secret}"}

    def pids(self) -> dict[str, list[int]]:
        """Return what pids.json says now."""
        return dict(json.loads((self.data_dir / "pids.json").read_bytes()))

    def left_running(self, within: float = 0.0) -> list[str]:
        """Return the command lines of what is still running of this house, after at most ``within`` seconds."""
        deadline = time.monotonic() + within
        while (left := self._running()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return left

    def ask(self, question: str = "What is Tollgate?", timeout: float = 30.0) -> httpx.Response:
        """Ask the demo model as the demo team."""
        answer = httpx.post(
            f"{self.facts['url']}/v1/chat/completions",
            json={"model": "auto", "messages": [{"role": "user", "content": question}], "max_tokens": 8},
            headers=self.team,
            timeout=timeout,
        )
        self.answered += answer.status_code == 200
        return answer

    def usage(self) -> dict[str, Any]:
        """Return today's statement of the demo team."""
        answer = httpx.get(f"{self.facts['url']}/v1/usage", params={"team_id": "team_demo"}, headers=self.team)
        return dict(answer.raise_for_status().json())

    @property
    def team(self) -> dict[str, str]:
        """The headers of the demo team."""
        return {"authorization": f"Bearer {self.facts['team_key']}"}

    def clean_up(self) -> None:
        """End whatever a failed test has left."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.left_running(within=10)

    def _running(self) -> list[str]:
        """Return everything with our mark in its environment; Postgres, whose environment is bare, by its folder."""
        home = self.data_dir.resolve() / "postgres"
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                command = (process / "cmdline").read_bytes()
                marked = self.mark.encode() in (process / "environ").read_bytes()
                is_postgres = (process / "cwd").readlink().is_relative_to(home)
            except OSError:
                continue
            if command and (marked or is_postgres):
                found.append(f"{process.name}: {command.replace(bytes(1), b' ').decode(errors='replace')}")
        return found
