# Every benchmark that opens a gateway still runs: the smallest size of each, from the command line, two at a time:
# they wait more than they work. What they measure is for people to look at.
#
# Left out, for time: quotas and ledger, which open what tests of theirs open and would take as long as two of these;
# router, safety and tracing, which call one function again and again. Tests of the engine run those of the engine. The
# gateways that benchmarks.gateway compares with (--peer) are installed by hand.

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]
COMMANDS = {
    "overload": ("--quick",),
    "first_token": ("--quick",),
    "streams": ("--quick",),
    "gateway": ("--quick", "--only", "a lone caller"),
    "instructions": ("--calls", "40"),
}

Runs = dict[str, Future[subprocess.CompletedProcess[str]]]


def tables() -> dict[str, int]:
    """Return when each table of results was last written."""
    return {path.name: path.stat().st_mtime_ns for path in RESULTS.iterdir()}


@pytest.fixture(scope="module")
def tables_before() -> dict[str, int]:
    """The tables before any run."""
    return tables()


@pytest.fixture(scope="module")
def runs(tables_before: dict[str, int]) -> Iterator[Runs]:
    """All runs under way."""

    def run(name: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", f"benchmarks.{name}", *COMMANDS[name]]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)

    with ThreadPoolExecutor(2) as pool:
        yield {name: pool.submit(run, name) for name in COMMANDS}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_benchmark_runs_in_its_smallest_size(runs: Runs, name: str) -> None:
    """It ends well, below its ceilings where it has any, and prints what it measured."""
    done = runs[name].result()
    if done.stdout.startswith("SKIPPED"):
        pytest.skip(done.stdout)

    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert len(done.stdout.splitlines()) > 3


def test_small_runs_leave_the_tables_of_whole_ones(runs: Runs, tables_before: dict[str, int]) -> None:
    """No result is written over by a run that only shows that a benchmark runs."""
    for run in runs.values():
        run.result()

    assert tables() == tables_before
