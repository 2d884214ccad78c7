# How `tollgate serve` ends, with and without workers: not before its streams, or with a word to each; and what it does
# when a worker dies.

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import asyncpg
import httpx
import pytest

from gateway.config.file import load_settings
from gateway.run.processes import descendants_of, free_port, is_running
from protocol.serving.listening import open_socket
from tests.support.config_text import write_config
from tests.support.house import make_team
from tests.support.scripted_realtime import Answer, ScriptedRealtime
from tests.support.scripted_upstream import ScriptedUpstream
from tests.support.talking import talking
from tests.support.waiting import until

TOLLGATE = Path(sys.executable).with_name("tollgate")
TOKENS, PACE = 20, 0.1  # a stream of two seconds
STARTS_WITHIN = 90.0  # seconds, where a dozen other processes start
prctl = ctypes.CDLL(None).prctl  # resolved before the fork
PR_CAPBSET_DROP, CAP_NET_ADMIN = 24, 12  # linux/prctl.h, linux/capability.h
QUESTION = {"model": "small", "messages": [{"role": "user", "content": "Slowly."}]}


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

    @property
    def auth(self) -> dict[str, str]:
        """The headers of the team."""
        return {"authorization": f"Bearer {self.key}"}

    def stream(self, **headers: str) -> list[str]:
        """Ask for a slow stream and return its lines."""
        body, url = QUESTION | {"stream": True}, f"{self.url}/v1/chat/completions"
        with httpx.stream("POST", url, json=body, headers=self.auth | headers, timeout=30) as answer:
            return [line for line in answer.iter_lines() if line]

    def ask(self) -> httpx.Response:
        """Ask for a slow answer."""
        return httpx.post(f"{self.url}/v1/chat/completions", json=QUESTION, headers=self.auth, timeout=30)

    def is_alive(self) -> bool:
        """Return whether it answers."""
        try:
            return httpx.get(f"{self.url}/health/live", timeout=2).status_code == 200
        except httpx.HTTPError:
            return False

    def refuses(self) -> bool:
        """Return whether nobody listens any more."""
        try:
            socket.create_connection(("127.0.0.1", httpx.URL(self.url).port or 0), timeout=0.5).close()
        except ConnectionRefusedError:
            return True
        except TimeoutError:  # the door is being closed
            return False
        return False


@pytest.fixture
def upstream() -> Iterator[ScriptedUpstream]:
    """An upstream that speaks slowly."""
    with ScriptedUpstream() as upstream:
        upstream.script(f"tokens={TOKENS},pace={PACE}")
        yield upstream


def begin_in_a_small_way() -> None:
    """Have as little to say of the network as a process in a container (nothing changes for who is not root), and few
    descriptors where more may be had."""
    prctl(PR_CAPBSET_DROP, CAP_NET_ADMIN)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def wait_until_asked(upstream: ScriptedUpstream, times: int) -> None:
    """Wait until so many calls are on their way there, and what it says on its way back."""
    until(lambda: len(upstream.requests) >= times)
    time.sleep(3 * PACE)


@pytest.fixture
def voices() -> Iterator[ScriptedRealtime]:
    """An upstream that talks."""
    with ScriptedRealtime() as voices:
        yield voices


@pytest.fixture
def serve(
    tmp_path: Path, database_url: str, redis_url: str, upstream: ScriptedUpstream, voices: ScriptedRealtime
) -> Iterator[Callable[..., Gateway]]:
    """Start `tollgate serve` with so many workers in front of the upstream."""
    started: list[Gateway] = []
    config = write_config(tmp_path / "tollgate.yaml", database_url, redis_url, upstream.url)
    text = config.read_text().replace("drain: 2s", "drain: 10s").replace("openai,", "openai, api_keys: [sk-upstream],")
    text = text.replace("small: {", "small: {upstream_model: gpt-4o-mini, ")
    place = f"endpoints: [{{region: here, base_url: '{voices.url}'}}]"
    text = text.replace("providers: {", f"providers: {{voices: {{format: openai, api_keys: [sk-upstream], {place}}}, ")
    facts = "provider: voices, price: {input: 1, output: 2}, context: 1000, max_output: 100, abilities: [realtime]"
    text = text.replace("models: {", f"models: {{talker: {{{facts}}}, ")
    config.write_text(text)
    key = asyncio.run(make_team(load_settings(config), "team_a"))

    def start(workers: int, drain: str = "10s", lame_duck: str = "0s") -> Gateway:
        changed = text.replace("drain: 10s", f"drain: {drain}").replace("lame_duck: 0s", f"lame_duck: {lame_duck}")
        config.write_text(changed)
        port = free_port()
        command = [str(TOLLGATE), "serve", "--config", str(config), "--port", str(port), "--workers", str(workers)]
        process = subprocess.Popen(command, start_new_session=True, preexec_fn=begin_in_a_small_way)
        gateway = Gateway(process, f"http://127.0.0.1:{port}", key)
        started.append(gateway)
        until(
            lambda: (gateway.is_alive() and len(gateway.workers) == workers) or gateway.process.poll() is not None,
            within=STARTS_WITHIN,
        )
        assert gateway.process.poll() is None
        return gateway

    yield start
    for gateway in started:
        gateway.process.kill()
        gateway.process.wait()


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_streams_end_before_it_does(
    serve: Callable[..., Gateway], upstream: ScriptedUpstream, voices: ScriptedRealtime, workers: int
) -> None:
    """SIGTERM in the middle of a stream: the client gets all of it, new ones are refused, then all processes end. So it
    is over a WebSocket; one on which nothing runs is closed. In a conversation by voice the response ends, too, and no
    other may begin."""
    voices.script(Answer(end="waits"))
    upstream.script(f"tokens={2 * TOKENS},pace={PACE}")
    gateway = serve(workers)
    lines: list[str] = []
    client = threading.Thread(target=lambda: lines.extend(gateway.stream()))
    with (
        talking(gateway.url, gateway.key) as idle,
        talking(gateway.url, gateway.key) as busy,
        talking(gateway.url, gateway.key, path="/v1/realtime?model=talker") as voice,
    ):
        voice.socket.send('{"type":"response.create"}')
        voice.hear_until("response.output_text.delta")
        client.start()
        busy.send(input="Slowly.")
        wait_until_asked(upstream, 2)
        pids = gateway.workers
        gateway.process.send_signal(signal.SIGTERM)
        while not (is_refused := gateway.refuses()) and client.is_alive():
            time.sleep(0.02)
        idle_closed_with = idle.told_at_the_end()
        is_refused_meanwhile = is_refused and client.is_alive()
        voice.socket.send('{"type":"response.create"}')
        refused = voice.hear_until("error")[-1]["error"]["code"]
        voice.socket.send('{"type":"response.cancel"}')
        voice_ends = [each["type"] for each in voice.hear_until("error")], voice.told_at_the_end()
        heard, busy_closed_with = busy.hear_all(), busy.told_at_the_end()
    client.join(30)
    status = gateway.process.wait(30)

    assert lines[-1] == "data: [DONE]"
    assert heard[-1]["response"]["usage"]["output_tokens"] == 2 * TOKENS
    assert (idle_closed_with, busy_closed_with) == (1012, 1012)
    assert (refused, voice_ends) == ("service_unavailable", (["response.done", "error"], 1012))
    assert is_refused_meanwhile
    assert status == 0
    assert not any(map(is_running, pids))


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_it_says_so_before_it_ends(serve: Callable[..., Gateway], workers: int) -> None:
    """SIGTERM: not ready at once, alive all the same; whoever has a connection is answered and asked to close it."""
    gateway = serve(workers, lame_duck="6s")
    with httpx.Client(base_url=gateway.url, headers=gateway.auth, timeout=30) as kept:
        before = [kept.get("/v1/models").headers.get("connection") for _ in range(2)]
        gateway.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 4
        while (ready := httpx.get(f"{gateway.url}/health/ready", timeout=5)).status_code == 200:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        live = httpx.get(f"{gateway.url}/health/live", timeout=5)
        answer = kept.post("/v1/chat/completions", json=QUESTION)
    status = gateway.process.wait(30)

    assert before == [None, None]
    assert (ready.status_code, ready.json()["status"], live.status_code) == (503, "draining", 200)
    assert answer.json()["usage"]["completion_tokens"] == TOKENS
    assert answer.headers["connection"] == "close"
    assert status == 0
    assert not gateway.is_alive()


@pytest.mark.parametrize(("workers", "asked"), [(1, "twice"), (2, "once")])
def test_what_outlasts_the_drain_is_broken_off_honestly(
    serve: Callable[..., Gateway], upstream: ScriptedUpstream, database_url: str, workers: int, asked: str
) -> None:
    """A stream ends with an error and pays for what it brought, a plain call gets a 503 and is free: a row for each.

    It is the same at the end of the drain and for whoever asks twice, who does not wait for it. What an Idempotency-Key
    asks for goes on for a moment, to be had later, or costs nothing.
    """
    gateway = serve(workers, drain="500ms" if asked == "once" else "60s")
    with ThreadPoolExecutor() as clients:
        stream, plain = clients.submit(gateway.stream), clients.submit(gateway.ask)
        keyed = clients.submit(gateway.stream, **{"idempotency-key": "a key"})
        wait_until_asked(upstream, 3)
        pids = gateway.workers
        gateway.process.send_signal(signal.SIGTERM)
        if asked == "twice":
            time.sleep(0.2)
            gateway.process.send_signal(signal.SIGTERM)
        lines, refusal = stream.result(30), plain.result(30)
    status = gateway.process.wait(30)
    rows = asyncio.run(read_rows(database_url))

    assert "data: [DONE]" not in lines
    for last in (lines[-1], keyed.result(30)[-1]):
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "service_unavailable"
    assert (refusal.status_code, refusal.json()["error"]["code"]) == (503, "service_unavailable")
    assert "retry-after" in refusal.headers
    tokens = sum('"content":"' in line and '"content":""' not in line for line in lines)
    assert 0 < tokens < TOKENS
    with_key = "answered" if asked == "once" else "superseded"
    assert [row for row in rows if row[0] != with_key] == [("failed", 0), ("interrupted", tokens)]
    assert [row[0] for row in rows].count(with_key) == 1 and len(rows) == 3
    assert status == 0
    assert not any(map(is_running, pids))


async def read_rows(url: str) -> list[tuple[str, int]]:
    """Return status and tokens of every row."""
    connection = await asyncpg.connect(url)
    try:
        rows = await connection.fetch("SELECT status, output_tokens FROM usage_records ORDER BY status")
        return [(row["status"], row["output_tokens"]) for row in rows]
    finally:
        await connection.close()


def test_a_worker_that_dies_is_replaced_and_all_die_with_their_parent(serve: Callable[..., Gateway]) -> None:
    """The other worker goes on answering; SIGKILL of the parent leaves no worker behind. Each process takes all the
    descriptors that the system gives: it is started with few, as most are, and every connection takes one or two."""
    gateway = serve(2)
    most = min(resource.getrlimit(resource.RLIMIT_NOFILE)[1], 2**20)
    until(lambda: {resource.prlimit(pid, resource.RLIMIT_NOFILE)[0] for pid in gateway.workers} == {most})
    victim = gateway.workers[0]
    os.kill(victim, signal.SIGKILL)
    answered = all(gateway.is_alive() for _ in range(5))
    until(lambda: victim not in gateway.workers and len(gateway.workers) == 2)
    pids = gateway.workers
    gateway.process.kill()
    gateway.process.wait()
    until(lambda: not any(map(is_running, pids)))

    assert answered


def test_a_taken_port_is_said_in_a_line(tmp_path: Path) -> None:
    """A gateway on a port where one listens already ends with status 1 and names it."""
    config = write_config(tmp_path / "tollgate.yaml", "postgresql://127.0.0.1:9/none", "redis://127.0.0.1:9")
    with open_socket("127.0.0.1", 0) as taken:
        port = str(taken.getsockname()[1])
        command = [str(TOLLGATE), "serve", "--config", str(config), "--port", port]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)

    assert done.returncode == 1
    assert port in done.stderr and "Traceback" not in done.stderr
