# Starts what the gateway's benchmark compares, each as a process of its own on the core it was given: the upstream, a
# bare pass-through, LiteLLM's proxy, and the gateway as a user runs it, on a real Postgres and a real Valkey with every
# limit set.

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
from msgspec import Struct

from gateway.embedded import EmbeddedPostgres, EmbeddedValkey
from gateway.processes import free_port, spawn, stop

ADMIN_KEY = "tgadmin-of-no-account-beyond-a-benchmark"
LIMITS = {
    "requests-per-minute": "100000000",
    "tokens-per-minute": "1000000000000",
    "concurrent-requests": "100000",
    "tokens-per-day": "1000000000000",
    "usd-per-day": "10000000",
    "usd-per-month": "100000000",
}


class Server(Struct, frozen=True):
    """One of the servers that are compared: where it listens, the key it takes, and its processes."""

    name: str
    url: str  # …/v1/chat/completions
    key: str
    pids: tuple[int, ...]
    helpers: tuple[int, ...] = ()  # Postgres and Valkey: their CPU time is told apart

    def cpu(self) -> float:
        """Return the CPU seconds that its own processes have used."""
        return sum(_cpu_of(pid) for pid in self.pids)

    def helpers_cpu(self) -> float:
        """Return the CPU seconds of its database and Redis, children included."""
        return sum(_cpu_of(pid, with_children=True) for pid in self.helpers)

    def memory(self) -> float:
        """Return its resident memory in MiB."""
        return sum(psutil.Process(pid).memory_info().rss for pid in self.pids) / 2**20


@contextmanager
def start_upstream(core: int, *options: str) -> Iterator[Server]:
    """Run the scripted upstream, with prepared answers unless ``options`` say otherwise."""
    port = free_port()
    command = [sys.executable, "-m", "tests.support.scripted_upstream", *(options or ["--fast"]), "--port", str(port)]
    with _run(command, core) as pid:
        _wait_for(port)
        yield Server("upstream", f"http://127.0.0.1:{port}/v1/chat/completions", "sk-upstream", (pid,))


@contextmanager
def start_pass_through(upstream: Server, core: int) -> Iterator[Server]:
    """Run the bare pass-through."""
    port = free_port()
    base = upstream.url.removesuffix("/chat/completions")
    with _run([sys.executable, "-m", "benchmarks.pass_through", base, str(port)], core) as pid:
        _wait_for(port)
        yield Server("pass-through", f"http://127.0.0.1:{port}/v1/chat/completions", "none", (pid,))


@contextmanager
def start_litellm(upstream: Server, models: dict[str, str], folder: Path, core: int, python: Path) -> Iterator[Server]:
    """Run LiteLLM's proxy from the environment of ``python``, in one process, with what it can do without a database:
    it checks a key (its master key, there are no others), reckons the cost of every call and tells it."""
    base, key = upstream.url.removesuffix("/chat/completions"), "sk-litellm"
    price = {"input_cost_per_token": 2.5e-6, "output_cost_per_token": 1e-5}
    same = {"api_base": base, "api_key": upstream.key, **price}
    listed = [
        {"model_name": name, "litellm_params": {"model": f"openai/{theirs}", **same}} for name, theirs in models.items()
    ]
    config = folder / "litellm.yaml"
    config.write_text(json.dumps({"model_list": listed, "general_settings": {"master_key": key}}))
    quiet = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_MODE": "PRODUCTION", "LITELLM_LOG": "ERROR"}
    port = free_port()
    command = [str(python.with_name("litellm")), "--config", str(config), "--host", "127.0.0.1", "--port", str(port)]
    with _run(command, core, log=folder / "litellm.log", more=quiet) as pid:
        _wait_for(port, timeout=120.0)
        yield Server("litellm", f"http://127.0.0.1:{port}/v1/chat/completions", key, (pid,))


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
    """Run the gateway with everything on. ``models`` maps our names to the upstream's; ``wrapper`` is a profiler.

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
        key = make_team(config, "bench")
        port = free_port()
        command = [*(wrapper or [sys.executable]), "-m", "gateway.cli", "serve", "--config", str(config)]
        with _run([*command, "--port", str(port)], core, log=folder / "gateway.log") as pid:
            _wait_for(port)
            url = f"http://127.0.0.1:{port}/v1/chat/completions"
            name = "gateway" if safety == "off" else "gateway, checked"
            yield Server(name, url, key, (pid,), (postgres.pid, valkey.pid))
    finally:
        valkey.stop()
        postgres.remove()


def rows_written(server: Server) -> int:
    """Return how many calls the books of the benchmark's team show today."""
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


def make_team(config: Path, team: str) -> str:
    """Migrate, make a team with every limit set, and return a key of it."""
    limits = [part for name, value in LIMITS.items() for part in (f"--{name}", value)]
    _tollgate("migrate", "--config", str(config))
    _tollgate("teams", "create", team, *limits, "--config", str(config))
    shown = _tollgate("keys", "create", "--team", team, *limits, "--format", "json", "--config", str(config))
    return str(json.loads(shown)["key"])


def _tollgate(*words: str) -> str:
    done = subprocess.run([sys.executable, "-m", "gateway.cli", *words], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"tollgate {' '.join(words)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


@contextmanager
def _run(
    command: list[str], core: int, log: Path = Path(os.devnull), more: Mapping[str, str] | None = None
) -> Iterator[int]:
    process = spawn(command, log=log, env={**os.environ, **(more or {})})
    os.sched_setaffinity(process.pid, {core})
    try:
        yield process.pid
    finally:
        stop(process, 30.0)


def _pin(pid: int, core: int) -> None:
    os.sched_setaffinity(pid, {core})
    for child in psutil.Process(pid).children(recursive=True):
        os.sched_setaffinity(child.pid, {core})


def _wait_for(port: int, timeout: float = 30.0) -> None:
    deadline = time.monotonic() + timeout
    while not any(
        connection.laddr.port == port
        for connection in psutil.net_connections("tcp4")
        if connection.status == psutil.CONN_LISTEN
    ):
        if time.monotonic() > deadline:
            raise SystemExit(f"nothing listens on port {port} after {timeout:g} s")
        time.sleep(0.05)


def _cpu_of(pid: int, with_children: bool = False) -> float:
    process = psutil.Process(pid)
    times = process.cpu_times()
    total = times.user + times.system
    if with_children:
        total += times.children_user + times.children_system
        for child in process.children(recursive=True):
            try:
                child_times = child.cpu_times()
                total += child_times.user + child_times.system
            except psutil.NoSuchProcess:
                continue
    return total
