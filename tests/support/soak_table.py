# The table of a soak: what became of every seed of every fault, written down when the session that ran them ends.
# The hooks here are pytest's; tests/conftest.py takes them in.

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections import defaultdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from msgspec import Struct

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
SEEN = ("answered", "interrupted", "failed", "refused", "left", "lost")  # how clients saw their calls end
SOAKED = 2  # seeds of one fault from which on a session was a soak

EXPLAINED = """\
From the second seed on, every other run has a second fault, after the first or before it is healed. A run passes when \
every answered call has exactly one row and no refused one has any, every cost is that of its tokens, ledger, \
statements, usage report, audit and counters agree to the nano-dollar, no hold, open journal or dead process's segment \
is left, no limit was passed, no call hung and no log shows an unexpected error. Calls are counted as their clients \
saw them end; *lost*: the connection broke with the process behind it. Recovery is the time from the last call until \
all of that was true."""


class Run(Struct, frozen=True, kw_only=True):
    """One seed of one fault."""

    fault: str
    seed: int
    faults: str  # all that happened in it
    calls: dict[str, int]  # by how they ended, as their clients saw it
    rows: int
    away: float  # seconds that the longest of its faults lasted, the restart included
    recovered: float  # seconds from the last call until all books agreed and nothing was held
    seconds: float
    has_passed: bool


_runs: list[Run] = []
_commit: list[str] = []  # the one that the session began with


def pytest_sessionstart() -> None:
    """Note what is tested."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    _commit[:] = [subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Collect what a test of a fault told of itself."""
    told: dict[str, Any] = dict(report.user_properties)
    if report.when == "call" and "recovered" in told:
        _runs.append(Run(**told, seconds=round(report.duration, 1), has_passed=report.passed))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the table, if this was a soak; under xdist in the process that hears of all tests."""
    by_fault: dict[str, list[Run]] = defaultdict(list)
    for run in _runs:
        by_fault[run.fault].append(run)
    if os.environ.get("PYTEST_XDIST_WORKER") or max(map(len, by_fault.values()), default=0) < SOAKED:
        return
    now = datetime.now(UTC)
    path = RESULTS / f"soak-{now:%Y-%m-%d}.md"
    path.write_text("\n".join([*_head(now), *_table(by_fault), *_failures(), ""]))


def _head(now: datetime) -> list[str]:
    seeds = len({run.seed for run in _runs})
    return [
        f"# Soak, {now:%Y-%m-%d}",
        "",
        f"`pytest {' '.join(sys.argv[1:])}` at {''.join(_commit)}, on {os.cpu_count()} cores of {_cpu()}, "
        f"Python {platform.python_version()}, ended {now:%H:%M} UTC.",
        "",
        f"{len(_runs)} runs, up to {seeds} seeds of each fault. {EXPLAINED}",
        "",
    ]


def _table(by_fault: dict[str, list[Run]]) -> list[str]:
    columns = ("fault", "seeds passed", *SEEN, "rows", "longest recovery, s")
    lines = [f"| {' | '.join(columns)} |", f"| {' | '.join('---' for _ in columns)} |"]
    return [*lines, *(_line(fault, runs) for fault, runs in by_fault.items()), _line("**all**", _runs), ""]


def _line(name: str, runs: list[Run]) -> str:
    passed = sum(run.has_passed for run in runs)
    seen = [sum(run.calls.get(one, 0) for run in runs) for one in SEEN]
    rows, longest = sum(run.rows for run in runs), max(run.recovered for run in runs)
    return f"| {name} | {passed} of {len(runs)} | {' | '.join(map(str, seen))} | {rows} | {longest:.1f} |"


def _failures() -> list[str]:
    failed = [run for run in _runs if not run.has_passed]
    if not failed:
        return []
    return ["Failed:", "", *(f"- {run.fault}, seed {run.seed} ({run.faults})" for run in failed)]


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
