# Starts what the gateway's benchmark compares, each as a process of its own on the core it was given: the upstream, a
# bare pass-through, and the gateway as a user runs it, on a real Postgres and a real Valkey with every limit set. The
# peers of peers.py are run by the same means.

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
from msgspec import Struct

from gateway.dev.embedded import EmbeddedPostgres, EmbeddedValkey
from gateway.run.processes import descendants_of, free_port, last_lines, spawn, stop

PROCESS_CPU = 2  # clock_getcpuclockid(3): a process's clock of nanoseconds, where /proc has ticks of 10 ms
ADMIN_KEY = "tgadmin-of-no-account-beyond-a-benchmark"
LIMITS = {
    "requests_per_minute": 100_000_000,
    "tokens_per_minute": 1_000_000_000_000,
    "concurrent_requests": 100_000,
    "tokens_per_day": 1_000_000_000_000,
    "usd_per_day": 10_000_000,
    "usd_per_month": 100_000_000,
}


class Server(Struct, frozen=True):
    """One of the servers that are compared: where it listens, the key it takes, and its processes."""

    name: str
    url: str  # …/v1/chat/completions
    key: str
    pids: tuple[int, ...]
    helpers: tuple[int, ...] = ()  # Postgres and Valkey: their CPU time is told apart
    headers: Mapping[str, str] = {}  # what it wants of every call besides the key
    takes_our_names: bool = False  # of models; the others are asked by the upstream's

    def cpu(self) -> float:
        """Return the CPU seconds that its own processes have used, children included."""
        return sum(map(_cpu_of, self.pids))

    def helpers_cpu(self) -> float:
        """Return the CPU seconds of its database and Redis, children included."""
        return sum(map(_cpu_of, self.helpers))

    def memory(self) -> float:
        """Return its resident memory in MiB, children included."""
        pids = [pid for own in self.pids for pid in (own, *descendants_of(own))]
        return sum(psutil.Process(pid).memory_info().rss for pid in pids) / 2**20

    def pin(self, core: int) -> None:
        """Keep every process and thread of it on this core."""
        for pid in self.pids:
            _pin(pid, core)


@contextmanager
def start_upstream(core: int, *options: str) -> Iterator[Server]:
    """Run the scripted upstream, with prepared answers unless ``options`` say otherwise."""
    port = free_port()
    command = [sys.executable, "-m", "tests.support.scripted_upstream", *(options or ["--fast"]), "--port", str(port)]
    with run_server(command, core, port) as pid:
        yield Server("upstream", f"http://127.0.0.1:{port}/v1/chat/completions", "sk-upstream", (pid,))


@contextmanager
def start_pass_through(upstream: Server, core: int) -> Iterator[Server]:
    """Run the bare pass-through."""
    port = free_port()
    base = upstream.url.removesuffix("/chat/completions")
    with run_server([sys.executable, "-m", "benchmarks.pass_through", base, str(port)], core, port) as pid:
        yield Server("pass-through", f"http://127.0.0.1:{port}/v1/chat/completions", "none", (pid,))


@contextmanager
def start_gateway(
    upstream: Server,
    models: dict[str, str],
    folder: Path,
    core: int,
    helpers_core: int,
    wrapper: Sequence[str] = (),
    more: Mapping[str, object] | None = None,
    safety: str = "off",
) -> Iterator[Server]:
    """Run the gateway with everything on. ``models`` maps its names to the upstream's; ``wrapper`` is a profiler.

    ``more`` is said of the provider beside what is always said; ``safety`` is what the content policy does to prompts,
    and unless that is "off" answers are flagged.
    """
    postgres, valkey = EmbeddedPostgres(folder), EmbeddedValkey(folder)
    try:
        postgres.start()
        valkey.start()
        assert postgres.pid is not None and valkey.pid is not None
        for pid in (postgres.pid, valkey.pid):
            _pin(pid, helpers_core)
        config = folder / "tollgate.yaml"
        config.write_text(_config(upstream, models, folder, postgres.url, valkey.url, more or {}, safety))
        _tollgate("migrate", "--config", str(config))
        port = free_port()
        command = [*(wrapper or [sys.executable]), "-m", "gateway.cli", "serve", "--config", str(config)]
        with run_server([*command, "--port", str(port)], core, port, log=folder / "gateway.log") as pid:
            url = f"http://127.0.0.1:{port}/v1/chat/completions"
            key = make_team(url, "bench")
            name = "gateway" if safety == "off" else "gateway, checked"
            yield Server(name, url, key, (pid,), (postgres.pid, valkey.pid), takes_our_names=True)
    finally:
        valkey.stop()
        postgres.remove()


def rows_written(server: Server) -> int:
    """Return how many calls the usage report of the benchmark's team shows today."""
    base = server.url.removesuffix("/chat/completions")
    request = urllib.request.Request(f"{base}/usage", headers={"authorization": f"Bearer {server.key}"})
    with urllib.request.urlopen(request, timeout=10) as answer:
        return int(json.load(answer)["requests"])


def _config(
    upstream: Server,
    models: dict[str, str],
    folder: Path,
    database_url: str,
    redis_url: str,
    more: Mapping[str, object],
    safety: str,
) -> str:
    return json.dumps(  # JSON is YAML
        {
            "database_url": database_url,
            "redis_url": redis_url,
            "data_dir": str(folder / "gateway"),
            "admin_keys": [ADMIN_KEY],
            "key_pepper": "benchmark-pepper-of-no-account-whatsoever",
            "safety": {"input": safety, "output": "off" if safety == "off" else "flag"},
            "providers": {
                "openai": {
                    "format": "openai",
                    "api_keys": [upstream.key],
                    "endpoints": [{"region": "local", "base_url": upstream.url.removesuffix("/chat/completions")}],
                    **more,
                }
            },
            "models": {
                name: {
                    "provider": "openai",
                    "upstream_model": upstream_model,
                    "price": {"input": 2.5, "cached_input": 1.25, "output": 10.0},
                    "context": 128000,
                    "max_output": 16384,
                    "abilities": ["chat", "tools", "json"],
                }
                for name, upstream_model in models.items()
            },
        },
        indent=1,
    )


def make_team(url: str, team: str) -> str:
    """Make a team with every limit set at the gateway whose calls go to ``url``, and return a key of it."""
    admin = url.removesuffix("/v1/chat/completions") + "/admin"
    _post(f"{admin}/teams", {"id": team, "limits": LIMITS})
    return str(_post(f"{admin}/keys", {"team_id": team, "limits": LIMITS})["key"])


def _post(url: str, body: Mapping[str, object]) -> dict[str, object]:
    headers = {"authorization": f"Bearer {ADMIN_KEY}", "content-type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=300) as answer:
        made: dict[str, object] = json.load(answer)
        return made


def _tollgate(*words: str) -> str:
    done = subprocess.run([sys.executable, "-m", "gateway.cli", *words], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"tollgate {' '.join(words)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


@contextmanager
def run_server(
    command: Sequence[str | Path],
    core: int,
    port: int,
    log: Path = Path(os.devnull),
    more: Mapping[str, str] | None = None,
) -> Iterator[int]:
    """Run a server on ``core`` and return its pid once something listens on ``port``; ``more`` is environment."""
    process = spawn(command, log=log, env={**os.environ, **(more or {})})
    os.sched_setaffinity(process.pid, {core})  # before its threads are: they begin where the process is
    try:
        _wait_for(port, process, log)
        _pin(process.pid, core)
        yield process.pid
    finally:
        stop(process, 30.0)


def wait_for_answer(server: Server, model: str, timeout: float = 60.0) -> None:
    """Return when a server answers a call: some know their upstream only a while after they listen."""
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Are you there?"}]}).encode()
    headers = {"authorization": f"Bearer {server.key}", "content-type": "application/json", **server.headers}
    deadline = time.monotonic() + timeout
    while True:
        try:
            urllib.request.urlopen(urllib.request.Request(server.url, body, headers), timeout=10).close()
            return
        except OSError as exc:  # a status that is none of success too
            if time.monotonic() > deadline:
                raise SystemExit(f"{server.name} answers no call after {timeout:g} s: {exc}") from exc
            time.sleep(0.1)


def _pin(pid: int, core: int) -> None:
    for each in (pid, *descendants_of(pid)):
        for thread in Path(f"/proc/{each}/task").glob("*"):
            with suppress(ProcessLookupError):  # it has ended meanwhile
                os.sched_setaffinity(int(thread.name), {core})


def _wait_for(port: int, process: subprocess.Popen[bytes], log: Path, timeout: float = 600.0) -> None:
    deadline = time.monotonic() + timeout
    while not any(
        connection.laddr.port == port
        for connection in psutil.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    ):
        if process.poll() is not None:
            raise SystemExit(f"{process.args} ended with status {process.returncode}\n{last_lines(log)}")
        if time.monotonic() > deadline:
            raise SystemExit(f"nothing listens on port {port} after {timeout:g} s\n{last_lines(log)}")
        time.sleep(0.05)


def _cpu_of(pid: int) -> float:
    """Return the CPU seconds of a process, its threads and its descendants, those that have ended too."""
    total = 0.0
    for each in (pid, *descendants_of(pid)):
        with suppress(OSError, psutil.NoSuchProcess):  # it has ended meanwhile: its parent has its time
            total += time.clock_gettime(~each << 3 | PROCESS_CPU)
            times = psutil.Process(each).cpu_times()
            total += times.children_user + times.children_system
    return total
