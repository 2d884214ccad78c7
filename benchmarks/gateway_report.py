# The gateway benchmark's numbers as a table for people and a file for programs, with all it takes to repeat them.

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import msgspec
from msgspec import Struct

RESULTS = Path(__file__).parent / "results"
LIBRARIES = (
    *("litestar", "uvicorn", "uvloop", "httptools", "msgspec"),  # server
    *("httpx", "httpx-aiohttp", "aiohttp", "redis", "asyncpg"),  # clients
)
SERVERS = ("upstream", "pass-through", "gateway", "litellm")


class Case(Struct, frozen=True, kw_only=True):
    """One kind of request."""

    name: str
    model: str  # our name for it
    script: str  # what the scripted upstream does
    streams: bool
    connections: int
    requests: int  # a round


class Measured(Struct, frozen=True, kw_only=True):
    """One server, one case, one round. CPU is milliseconds a request, latencies are milliseconds, memory MiB."""

    case: str
    server: str
    round: int
    requests: int
    cpu_ms: float
    helpers_ms: float  # Postgres and Valkey
    per_second: float
    memory: float
    bytes_per_answer: float
    first: dict[str, float]
    total: dict[str, float]

    def line(self) -> str:
        """Return it as one line for whoever waits."""
        return (
            f"{self.case:24} round {self.round} {self.server:14} {self.cpu_ms:7.3f} ms CPU  {self.per_second:8.0f}/s  "
            f"first byte p50 {self.first['p50']:.2f} p99 {self.first['p99']:.2f} ms"
        )


def write_report(
    measured: Sequence[Measured],
    cases: Sequence[Case],
    paced: Sequence[Case],
    booked: int,
    rounds: int,
    body_bytes: int,
    litellm: Path | None,
) -> None:
    """Write gateway-DATE.json and gateway-DATE.md, and print the latter. ``litellm``: the Python that has the peer."""
    now = datetime.now(UTC)
    words = ["PYTHON" if word == str(litellm) else word for word in sys.argv[1:]]
    conditions = {
        "date": now.isoformat(timespec="seconds"),
        "command": " ".join(["python -m benchmarks.gateway", *words]),
        "commit": output_of("git", "rev-parse", "--short", "HEAD"),
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if os.cpu_count() is None else os.cpu_count(),
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "kernel": platform.release(),
        "python": platform.python_version(),
        "libraries": {name: version(name) for name in LIBRARIES},
        "rounds": rounds,
        "request_bytes": body_bytes,
        "calls_in_the_gateways_books": booked,
    }
    head = [*_head(conditions), *(_of_litellm(litellm) if litellm is not None else ())]
    text = "\n".join(
        [*head, *_costs(measured, cases), *(line for case in paced for line in _latencies(measured, case))]
    )
    RESULTS.mkdir(exist_ok=True)
    stem = RESULTS / f"gateway-{now:%Y-%m-%d}"
    stem.with_suffix(".md").write_text(text)
    rows = [msgspec.to_builtins(row) for row in measured]
    stem.with_suffix(".json").write_text(json.dumps({"conditions": conditions, "rounds": rows}, indent=1) + "\n")
    print(text)


def _head(conditions: dict[str, object]) -> list[str]:
    libraries = conditions["libraries"]
    assert isinstance(libraries, dict)
    return [
        f"# Gateway, {str(conditions['date'])[:10]}",
        "",
        f"`{conditions['command']}` at {conditions['commit']}, on {conditions['cores']} cores of {conditions['cpu']}, "
        f"load average {conditions['load_average']}, Python {conditions['python']}, "
        + ", ".join(f"{name} {number}" for name, number in libraries.items())
        + ".",
        "",
        f"Requests of {conditions['request_bytes']} bytes, answers of 16 tokens. The gateway has every limit set "
        f"and books every call (there are {conditions['calls_in_the_gateways_books']} in its books now). One core for "
        "the server that is measured, another for upstream, generator, Postgres and Valkey; "
        f"{conditions['rounds']} rounds in turns: median (least – most).",
        "",
    ]


def _of_litellm(python: Path) -> list[str]:
    """What LiteLLM has on, so that nobody takes the comparison for more than it is."""
    told = "import importlib.metadata as m; print(m.version('litellm'))"
    return [
        f"LiteLLM {output_of(str(python), '-c', told)}: one process on uvicorn, uvloop and httptools. It checks its "
        "master key and reckons the cost of each call. Without a database, as here, it has no keys of teams, no limits "
        "and no spend log: it does less than the gateway beside it.",
        "",
    ]


def _costs(measured: Sequence[Measured], cases: Sequence[Case]) -> list[str]:
    lines = [
        "| case | server | CPU ms a request | + Postgres, Valkey | requests/s | first byte p50 / p99 ms | MiB |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for case in cases:
        for server in SERVERS:
            if not (rows := _rows(measured, case.name, server)):
                continue
            helpers = _median(rows, lambda row: row.helpers_ms) if server == "gateway" else "–"
            first = " / ".join(_middle(rows, lambda row, name=name: row.first[name]) for name in ("p50", "p99"))  # type: ignore[misc]
            lines.append(
                f"| {case.name} | {server} | {_median(rows, lambda row: row.cpu_ms)} | {helpers} | "
                f"{_median(rows, lambda row: row.per_second, 0)} | {first} | "
                f"{_middle(rows, lambda row: row.memory, 0)} |"
            )
        costs = {row.server: _number(_rows(measured, case.name, row.server)) for row in measured}
        for dear, cheap in (("gateway", "pass-through"), ("litellm", "gateway")):
            if dear in costs:
                lines.append(f"| {case.name} | **{dear} : {cheap}** | **{costs[dear] / costs[cheap]:.2f} ×** | | | | |")
    return [*lines, ""]


def _latencies(measured: Sequence[Measured], case: Case) -> list[str]:
    """What the gateway and the pass-through add to the upstream's own latency."""
    rate = _middle(_rows(measured, case.name, "upstream"), lambda row: row.per_second, 0)
    lines = [
        f"{case.name}: {rate} requests/s at fixed moments (coordinated omission excluded).",
        "",
        "| server | p50 ms | p90 ms | p99 ms | added p50 | added p99 | of its core |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    alone = _rows(measured, case.name, "upstream")
    for server in SERVERS:
        if not (rows := _rows(measured, case.name, server)):
            continue
        shown = [_median(rows, lambda row, name=name: row.total[name], 2) for name in ("p50", "p90", "p99")]  # type: ignore[misc]
        added = [
            statistics.median(row.total[name] for row in rows) - statistics.median(row.total[name] for row in alone)
            for name in ("p50", "p99")
        ]
        more = " | ".join(f"{number:.2f}" for number in added)
        busy = _middle(rows, lambda row: row.cpu_ms * row.per_second / 10, 0)
        lines.append(f"| {server} | {' | '.join(shown)} | {more} | {busy} % |")
    return [*lines, ""]


def _rows(measured: Sequence[Measured], case: str, server: str) -> list[Measured]:
    return [row for row in measured if row.case == case and row.server == server]


def _number(rows: Sequence[Measured]) -> float:
    return statistics.median(row.cpu_ms for row in rows)


def _middle(rows: Sequence[Measured], value: Callable[[Measured], float], digits: int = 2) -> str:
    return f"{statistics.median(map(value, rows)):.{digits}f}"


def _median(rows: Sequence[Measured], value: Callable[[Measured], float], digits: int = 3) -> str:
    values = sorted(map(value, rows))
    return f"{statistics.median(values):.{digits}f} ({values[0]:.{digits}f} – {values[-1]:.{digits}f})"


def cpu_name() -> str:
    """Return what the machine calls its processor."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def output_of(*command: str) -> str:
    """Return what a command prints, or nothing where it fails."""
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
