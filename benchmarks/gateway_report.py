# The gateway benchmark's numbers as a table for readers and a file for programs, with all it takes to repeat them.

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

from benchmarks.gateway_goals import goal_lines
from benchmarks.measured import Case, Measured
from benchmarks.peers import Peer

RESULTS = Path(__file__).parent / "results"
LIBRARIES = (
    *("litestar", "uvicorn", "uvloop", "httptools", "msgspec"),  # server
    *("httpx", "httpx-aiohttp", "aiohttp", "redis", "asyncpg"),  # clients
)
SERVERS = ("upstream", "pass-through", "gateway", "smg", "portkey", "litellm")
# Which server's CPU a call is told as so many times another's.
RATIOS = (("gateway", "pass-through"), ("gateway", "smg"), ("portkey", "gateway"), ("litellm", "gateway"))


def write_report(
    measured: Sequence[Measured],
    cases: Sequence[Case],
    paced: Sequence[Case],
    peers: Sequence[Peer],
    booked: int,
    rounds: int,
    body_bytes: int,
    *,
    is_kept: bool,
) -> None:
    """Print the tables; where ``is_kept``, write them to gateway-DATE.md, and all that was measured to the .json."""
    now = datetime.now(UTC)
    folders = {f"{peer.name}={peer.folder}": f"{peer.name}=DIR" for peer in peers}
    conditions = {
        "date": now.isoformat(timespec="seconds"),
        "command": " ".join(["python -m benchmarks.gateway", *(folders.get(word, word) for word in sys.argv[1:])]),
        "commit": output_of("git", "rev-parse", "--short", "HEAD"),
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if os.cpu_count() is None else os.cpu_count(),
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "kernel": platform.release(),
        "python": platform.python_version(),
        "libraries": {name: version(name) for name in LIBRARIES},
        "peers": {peer.name: peer.version for peer in peers},
        "rounds": rounds,
        "request_bytes": body_bytes,
        "calls_in_the_gateways_books": booked,
    }
    text = "\n".join(
        [
            *_head(conditions),
            *(f"- {peer.name} {peer.version}: {peer.does}" for peer in peers),
            *([""] if peers else []),
            *goal_lines(measured),
            *_costs(measured, cases),
            *(line for case in cases if case.connections == 1 for line in _latencies(measured, case)),
            *(line for case in paced for line in _latencies(measured, case)),
        ]
    )
    print(text)
    if not is_kept:
        return
    RESULTS.mkdir(exist_ok=True)
    stem = RESULTS / f"gateway-{now:%Y-%m-%d}"
    stem.with_suffix(".md").write_text(text)
    rows = [msgspec.to_builtins(row) for row in measured]
    stem.with_suffix(".json").write_text(json.dumps({"conditions": conditions, "rounds": rows}, indent=1) + "\n")


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
        f"Requests of {conditions['request_bytes']} bytes, answers of 16 tokens. The gateway checks each key, has all "
        f"limits set and books every call (there are {conditions['calls_in_the_gateways_books']} in its books). One "
        "core for the server that is measured, another for upstream, generator, Postgres and Valkey; rounds in turns: "
        f"{conditions['rounds']}, shown as median (least – most). Ratios are of neighbours in one round.",
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
        for dear, cheap in RATIOS:
            if ratios := _ratios(measured, case.name, dear, cheap):
                spread = f"{min(ratios):.2f} – {max(ratios):.2f}"
                shown = f"**{statistics.median(ratios):.2f} ×** ({spread})"
                lines.append(f"| {case.name} | **{dear} : {cheap}** | {shown} | | | | |")
    return [*lines, ""]


def _latencies(measured: Sequence[Measured], case: Case) -> list[str]:
    """What each server adds to the upstream's own latency."""
    rate = _middle(_rows(measured, case.name, "upstream"), lambda row: row.per_second, 0)
    is_open = case.connections > 1
    how = f"{rate} requests/s at fixed moments (coordinated omission excluded)" if is_open else "one call after another"
    lines = [
        f"{case.name}: {how}.",
        "",
        "| server | p50 ms | p90 ms | p99 ms | added p50 | added p99 | CPU ms a call | of its core |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
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
        cpu = _middle(rows, lambda row: row.cpu_ms, 3)
        lines.append(f"| {server} | {' | '.join(shown)} | {more} | {cpu} | {busy} % |")
    return [*lines, ""]


def _rows(measured: Sequence[Measured], case: str, server: str) -> list[Measured]:
    return [row for row in measured if row.case == case and row.server == server]


def _ratios(measured: Sequence[Measured], case: str, dear: str, cheap: str) -> list[float]:
    """How many times another's CPU a call takes at one, in each round that has both."""
    others = {row.round: row.cpu_ms for row in _rows(measured, case, cheap)}
    return [row.cpu_ms / others[row.round] for row in _rows(measured, case, dear) if row.round in others]


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
