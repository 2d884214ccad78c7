# `tollgate serve` with several workers: it lets streams end before it does, replaces what dies, and leaves nothing.

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from gateway.config_file import load_settings
from gateway.processes import descendants_of, is_running
from tests.support.config_text import write_config
from tests.support.house import make_team
from tests.support.ports import free_port
from tests.support.scripted_upstream import ScriptedUpstream

TOLLGATE = Path(sys.executable).with_name("tollgate")
TOKENS, PACE = 20, 0.1  # a stream of two seconds


@dataclass
class Gateway:
    """A running `tollgate serve`."""

    process: subprocess.Popen[bytes]
    url: str
    key: str

    @property
    def workers(self) -> list[int]:
        """The pids of the processes that answer."""
        return descendants_of(self.process.pid) or [self.process.pid]

    def stream(self) -> list[str]:
        """Ask for a slow stream and return its lines."""
        body = {"model": "small", "messages": [{"role": "user", "content": "Slowly."}], "stream": True}
        headers = {"authorization": f"Bearer {self.key}"}
        with httpx.stream("POST", f"{self.url}/v1/chat/completions", json=body, headers=headers, timeout=30) as answer:
            return [line for line in answer.iter_lines() if line]

    def is_alive(self) -> bool:
        """Return whether it answers."""
        try:
            return httpx.get(f"{self.url}/health/live", timeout=2).status_code == 200
        except httpx.HTTPError:
            return False


@pytest.fixture
def serve(tmp_path: Path, database_url: str, redis_url: str) -> Iterator[Callable[[int], Gateway]]:
    """Start `tollgate serve` with so many workers in front of a slow upstream."""
    started: list[Gateway] = []
    with ScriptedUpstream() as upstream:
        upstream.script(f"tokens={TOKENS},pace={PACE}")
        config = write_config(tmp_path / "tollgate.yaml", database_url, redis_url, upstream.url)
        text = (
            config.read_text().replace("drain: 2s", "drain: 10s").replace("openai,", "openai, api_keys: [sk-upstream],")
        )
        config.write_text(text.replace("small: {", "small: {upstream_model: gpt-4o-mini, "))
        key = asyncio.run(make_team(load_settings(config), "team_a"))

        def start(workers: int) -> Gateway:
            port = free_port()
            command = [str(TOLLGATE), "serve", "--config", str(config), "--port", str(port), "--workers", str(workers)]
            gateway = Gateway(subprocess.Popen(command, start_new_session=True), f"http://127.0.0.1:{port}", key)
            started.append(gateway)
            deadline = time.monotonic() + 60
            while not (gateway.is_alive() and len(gateway.workers) == workers):
                assert gateway.process.poll() is None and time.monotonic() < deadline
                time.sleep(0.05)
            return gateway

        yield start
        for gateway in started:
            gateway.process.kill()
            gateway.process.wait()


@pytest.mark.parametrize("workers", [1, 2])
def test_streams_end_before_it_does(serve: Callable[[int], Gateway], workers: int) -> None:
    """SIGTERM in the middle of a stream: the client gets all of it, new ones are refused, then all processes end."""
    gateway = serve(workers)
    lines: list[str] = []
    client = threading.Thread(target=lambda: lines.extend(gateway.stream()))
    client.start()
    time.sleep(TOKENS * PACE / 2)
    pids = gateway.workers
    gateway.process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    refused = not gateway.is_alive()
    client.join(30)
    status = gateway.process.wait(30)

    assert lines[-1] == "data: [DONE]"
    assert refused
    assert status == 0
    assert not any(map(is_running, pids))


def test_a_second_interrupt_ends_it_at_once(serve: Callable[[int], Gateway]) -> None:
    """Whoever interrupts twice does not wait for the drain."""
    gateway = serve(2)
    client = threading.Thread(target=interrupted_stream, args=[gateway])
    client.start()
    time.sleep(TOKENS * PACE / 4)
    pids = gateway.workers
    started = time.monotonic()
    gateway.process.send_signal(signal.SIGINT)
    time.sleep(0.2)
    gateway.process.send_signal(signal.SIGINT)
    gateway.process.wait(30)
    client.join(30)

    assert time.monotonic() - started < TOKENS * PACE / 2
    assert not any(map(is_running, pids))


def interrupted_stream(gateway: Gateway) -> None:
    with contextlib.suppress(httpx.HTTPError):
        gateway.stream()


def test_a_worker_that_dies_is_replaced_and_all_die_with_their_parent(serve: Callable[[int], Gateway]) -> None:
    """The other worker goes on answering; SIGKILL of the parent leaves no worker behind."""
    gateway = serve(2)
    victim = gateway.workers[0]
    os.kill(victim, signal.SIGKILL)
    answered = all(gateway.is_alive() for _ in range(5))
    deadline = time.monotonic() + 20
    while (victim in gateway.workers or len(gateway.workers) < 2) and time.monotonic() < deadline:
        time.sleep(0.05)
    pids = gateway.workers
    gateway.process.kill()
    gateway.process.wait()
    deadline = time.monotonic() + 10
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)

    assert answered
    assert len(pids) == 2 and victim not in pids
    assert not any(map(is_running, pids))


def test_a_taken_port_is_said_in_a_line(serve: Callable[[int], Gateway], tmp_path: Path) -> None:
    """The second gateway on a port ends with status 1 and names it."""
    gateway = serve(1)
    port = gateway.url.rpartition(":")[2]
    command = [str(TOLLGATE), "serve", "--config", str(tmp_path / "tollgate.yaml"), "--port", port]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)

    assert done.returncode == 1
    assert port in done.stderr and "Traceback" not in done.stderr
