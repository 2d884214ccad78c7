# `tollgate work` and `tollgate audit` as processes: what the dead left behind is booked, and the books agree.

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import asyncpg
import httpx
import pytest

from billing.core.records import Status
from gateway.core.clock import Clock
from gateway.run.processes import free_port
from tests.support.config_text import write_config
from tests.support.raw_client import tell
from tests.support.waiting import until

TOLLGATE = Path(sys.executable).with_name("tollgate")
ROOT = Path(__file__).parents[2]


@pytest.fixture
def config(tmp_path: Path, database_url: str, redis_url: str) -> Path:
    """A configuration for the commands."""
    return write_config(tmp_path / "tollgate.yaml", database_url, redis_url)


@pytest.fixture
def worker(config: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Start a worker; it is gone at the end."""
    started: list[subprocess.Popen[bytes]] = []

    def start(*options: str) -> subprocess.Popen[bytes]:
        command = [str(TOLLGATE), "work", "--config", str(config), *options]
        started.append(subprocess.Popen(command, stderr=subprocess.PIPE))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def leave_journal_of_the_dead(config: Path) -> tuple[str, str]:
    """Have a process die with one call closed and one still running; return their request ids."""
    clock = Clock()
    ids = clock.new_id(), clock.new_id()
    code = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from billing.journal.journal import Journal\n"
        "from gateway.core.clock import Clock\n"
        "from protocol.usage import Usage\n"
        "from tests.support.factories import make_record\n"
        "from billing.core.records import Status\n"
        "journal = Journal.open(Path(sys.argv[1]), clock=Clock())\n"
        "closed, running = (make_record(id) for id in sys.argv[2:])\n"
        "journal.opened(closed)\n"
        "journal.opened(running)\n"
        "journal.progress(running.request_id, Usage(input_tokens=5, output_tokens=2), 90)\n"
        "journal.closed(closed)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    journal = config.parent / "data" / "journal"
    subprocess.run([sys.executable, "-c", code, str(journal), *ids], cwd=ROOT, check=False, timeout=60)
    return ids


def rows(url: str, statement: str) -> list[tuple[object, ...]]:
    async def run() -> list[tuple[object, ...]]:
        connection = await asyncpg.connect(url)
        try:
            return [tuple(row) for row in await connection.fetch(statement)]
        finally:
            await connection.close()

    return asyncio.run(run())


def test_a_worker_shows_what_it_does_and_what_waits(
    config: Path, database_url: str, worker: Callable[..., subprocess.Popen[bytes]]
) -> None:
    """Its port for Prometheus answers; a port that is taken is said before anything starts, and ends it."""
    port = str(free_port())
    rows(database_url, "INSERT INTO teams (id, name, limits) VALUES ('a', 'A', '{\"tokens_per_day\": 100}')")
    process = worker("--metrics-port", port)
    until(lambda: "tollgate_budget_used_ratio{" in (scrape(port) or ""))  # once they were looked at
    told = scrape(port) or ""

    assert 'tollgate_batch_requests_left{priority="normal"} 0.0' in told
    assert 'tollgate_callbacks_waiting{state="failed"} 0.0' in told
    assert "tollgate_batch_requests_running 0.0" in told
    assert 'tollgate_budget_used_ratio{limit="tokens_per_day",team="a"} 0.0' in told
    assert "tollgate_journal_backlog 0.0" in told
    endless = tell(f"http://127.0.0.1:{port}", b"GET /metrics HTTP/1.1\r\nx: ", *[b"x" * 65536] * 6)
    assert endless.startswith(b"HTTP/1.1 431 ")  # its port has the bounds of a gateway's
    second = worker("--metrics-port", port)
    _, said = second.communicate(timeout=30)
    assert (second.returncode, said) == (1, f"127.0.0.1:{port} cannot be had: Address already in use\n".encode())
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0


def scrape(port: str) -> str | None:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/metrics", trust_env=False).text
    except httpx.ConnectError:
        return None


def test_a_worker_books_what_the_dead_left_and_ends_when_asked(
    config: Path, database_url: str, worker: Callable[[], subprocess.Popen[bytes]]
) -> None:
    """A neighbour's journal is adopted: the closed call as it ended, the running one at its last progress. SIGTERM
    ends the worker within a moment."""
    closed, running = leave_journal_of_the_dead(config)
    process = worker()
    query = "SELECT request_id::text, status, cost_nanousd FROM usage_records ORDER BY cost_nanousd DESC"
    until(lambda: len(rows(database_url, query)) >= 2)
    found = rows(database_url, query)

    assert found == [(closed, Status.ANSWERED.value, 400_000), (running, Status.INTERRUPTED.value, 90)]
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0


def test_the_audit_finds_a_row_that_no_statement_knows(config: Path, database_url: str) -> None:
    """Books that agree exit 0; a ledger changed behind the statements' back is printed and exits 1."""
    command = [str(TOLLGATE), "audit", "--config", str(config)]
    agreeing = subprocess.run(command, capture_output=True, text=True)
    rows(
        database_url,
        "INSERT INTO usage_daily (team_id, day, booked_on, key_id, model_used, tier, status, calls, input_tokens, "
        "cached_input_tokens, output_tokens, cost_nanousd) VALUES ('team_a', (now() AT TIME ZONE 'utc')::date, "
        "(now() AT TIME ZONE 'utc')::date, 'key_a', 'gpt-4o', 'interactive', 'answered', 1, 2, 0, 3, 4)",
    )
    differing = subprocess.run(command, capture_output=True, text=True, env={"COLUMNS": "200", "PATH": ""})

    assert (agreeing.returncode, agreeing.stderr) == (0, "")
    assert differing.returncode == 1
    assert "team_a" in differing.stdout
