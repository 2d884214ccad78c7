# kill -9 of a gateway at any moment: every answered call has exactly one row, refused ones none, and no hold stays.

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import asyncpg
import httpx
import pytest

import migrations
from gateway.config_file import load_settings
from gateway.embedded import temporary_postgres, temporary_valkey
from tests.support.config_text import write_config
from tests.support.house import make_team
from tests.support.ports import free_port
from tests.support.scripted_upstream import ScriptedUpstream

TOLLGATE = Path(sys.executable).with_name("tollgate")
CALLERS = 12


class Gateway:
    """`tollgate serve` on one configuration, killed and started again."""

    def __init__(self, config: Path) -> None:
        self.config = config
        self.url = ""

    def start(self) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.process = subprocess.Popen(
            [str(TOLLGATE), "serve", "--config", str(self.config), "--port", str(port)], stderr=subprocess.DEVNULL
        )
        deadline = time.monotonic() + 40
        while True:
            try:
                httpx.get(self.url + "/health/live", timeout=1).raise_for_status()
                return
            except httpx.HTTPError:
                assert self.process.poll() is None and time.monotonic() < deadline
                time.sleep(0.05)

    def end(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        return self.process.wait(30)


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[tuple[Gateway, str, str]]:
    """Give a gateway, a team's key and the database, with an upstream that speaks slowly."""
    with temporary_postgres() as postgres, temporary_valkey() as valkey:
        with ScriptedUpstream(models=("small",)) as upstream:
            upstream.script("tokens=12,pace=0.01")
            migrations.upgrade(postgres.url)
            config = write_config(tmp_path / "tollgate.yaml", postgres.url, valkey.url, upstream.url)
            config.write_text(config.read_text().replace("format: openai", "format: openai, api_keys: [sk-upstream]"))
            key = asyncio.run(make_team(load_settings(config), "team_a"))
            gateway = Gateway(config)
            gateway.start()
            try:
                yield gateway, key, postgres.url
            finally:
                if gateway.process.poll() is None:
                    gateway.process.kill()
                    gateway.process.wait()


async def call_until_it_dies(url: str, key: str, seed: int, answered: list[str], refused: list[str]) -> None:
    """Call over and over, streamed and plain, and note whose answer came whole and who was refused."""
    headers = {"authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=10) as client:
        dice = random.Random(seed)
        try:
            while True:
                body = {"model": "small", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 40}
                body |= {"stream": dice.random() < 0.5, "temperature": 9 if dice.random() < 0.2 else 1}
                async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
                    text = (await answer.aread()).decode()
                if answer.status_code != 200:
                    refused.append(answer.headers["x-request-id"])
                elif not body["stream"] or text.endswith("data: [DONE]\n\n"):
                    answered.append(answer.headers["x-request-id"])
        except httpx.HTTPError:
            return


async def rows_of(database_url: str, settled: int) -> dict[str, list[str]]:
    """Return the statuses of every request's rows, once ``settled`` rows are there and no more come."""
    connection = await asyncpg.connect(database_url)
    deadline, before = time.monotonic() + 20, -1
    while True:
        rows = await connection.fetch("SELECT request_id, status FROM usage_records")
        if (len(rows) >= settled and len(rows) == before) or time.monotonic() > deadline:
            break
        before = len(rows)
        await asyncio.sleep(0.5)
    sums = await connection.fetchrow(
        "SELECT (SELECT sum(cost_nanousd) FROM usage_records) AS ledger,"
        " (SELECT sum(cost_nanousd) FROM usage_daily) AS statements"
    )
    await connection.close()
    assert sums["ledger"] == sums["statements"]
    found: dict[str, list[str]] = {}
    for row in rows:
        found.setdefault(str(row["request_id"]), []).append(row["status"])
    return found


SEEDS = [1, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(2, 21))]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_killed_gateway_loses_no_answered_call(gateway: tuple[Gateway, str, str], seed: int) -> None:
    """After kill -9 under load and a start on the same journal, ledger and answers agree call by call."""
    house, key, database_url = gateway
    answered: list[str] = []
    refused: list[str] = []
    moment = random.Random(seed).uniform(1.5, 3.0)  # seconds

    async def load() -> None:
        calls = [call_until_it_dies(house.url, key, 100 * seed + n, answered, refused) for n in range(CALLERS)]
        killer = asyncio.to_thread(lambda: (time.sleep(moment), house.end(signal.SIGKILL)))
        await asyncio.gather(*calls, killer)

    asyncio.run(load())
    house.start()
    rows = asyncio.run(rows_of(database_url, len(answered)))

    assert len(answered) > 2 * CALLERS and refused
    assert {request for request, statuses in rows.items() if len(statuses) != 1} == set()
    assert [request for request in answered if rows.get(request) != ["answered"]] == []
    assert not rows.keys() & set(refused)
    assert len(rows) <= len(answered) + CALLERS  # what was running when it died, and nothing else
    assert house.end(signal.SIGTERM) == 0
