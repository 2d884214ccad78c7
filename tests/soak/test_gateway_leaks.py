# Twelve thousand calls of every kind through one gateway's process: answered, streamed, left, refused, repeated, wrong.
# What is kept on purpose is there after the first few thousand; from then on the process does not grow.

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gateway.accounts.schemas import LimitsInput
from gateway.config.file import load_settings
from gateway.core.keys import new_key
from gateway.run.processes import free_port
from tests.support.config_text import write_config
from tests.support.house import make_team
from tests.support.scripted_upstream import ScriptedUpstream

CALLS = 12_000
WARM_UP = 4_000
AT_ONCE = 24
TEAMS = 12
MOST_GROWTH = 16 * 2**20  # bytes, over the other 8,000: two kilobytes a call
ADMIN = {"authorization": "Bearer tgadmin-of-the-tests"}

pytestmark = pytest.mark.soak


@pytest.fixture
def gateway(database_url: str, redis_url: str, tmp_path: Path) -> Iterator[tuple[str, int, list[str]]]:
    """Its URL, its process's id, and a key of each team; the last team may spend nothing."""
    with ScriptedUpstream(models=("small",)) as upstream:
        config = write_config(tmp_path / "tollgate.yaml", database_url, redis_url, upstream.url)
        config.write_text(config.read_text().replace("openai,", "openai, api_keys: [sk-upstream],"))
        settings = load_settings(config)
        limits = [LimitsInput(requests_per_minute=1_000_000)] * (TEAMS - 1) + [LimitsInput(tokens_per_day=1)]
        keys = [asyncio.run(make_team(settings, f"team_{number}", each)) for number, each in enumerate(limits)]
        port = free_port()
        tollgate = str(Path(sys.executable).with_name("tollgate"))
        with (tmp_path / "log").open("wb") as log:
            process = subprocess.Popen([tollgate, "serve", "--config", config, "--port", str(port)], stderr=log)
        try:
            yield f"http://127.0.0.1:{port}", process.pid, keys
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(30)


def test_twelve_thousand_calls_leave_nothing(gateway: tuple[str, int, list[str]]) -> None:
    """Every call ends as it should, and the process has not grown since it was warm."""
    url, pid, keys = gateway

    async def scene() -> tuple[Counter[int], int]:
        ends: Counter[int] = Counter()
        dice = random.Random(1)
        connections = aiohttp.TCPConnector(limit=AT_ONCE)
        async with aiohttp.ClientSession(url, connector=connections) as session:
            await settle(session)
            turns = asyncio.Semaphore(AT_ONCE)

            async def call(ask: dict[str, Any], leaves: bool) -> None:
                async with turns, session.post(**ask) as answer:
                    ends[answer.status] += 1
                    if not leaves:
                        await answer.read()

            async def calls(count: int) -> None:
                async with asyncio.TaskGroup() as group:
                    for _ in range(count):
                        group.create_task(call(*some_call(dice, keys)))

            await calls(WARM_UP)
            await settle(session)
            before = resident_bytes(pid)
            for _ in range(WARM_UP, CALLS, 1000):
                await calls(1000)
                print(f"{resident_bytes(pid) / 2**20:.1f} MiB")
            await settle(session)
        return ends, resident_bytes(pid) - before

    ends, growth = asyncio.run(scene())

    assert ends[200] > CALLS // 2 and {401, 404, 429} <= ends.keys(), ends
    assert not {500, 502, 503, 504} & ends.keys(), ends
    assert growth < MOST_GROWTH, f"{growth / 2**20:.1f} MiB"


def some_call(dice: random.Random, keys: list[str]) -> tuple[dict[str, Any], bool]:
    """Return what to ask, never twice the same, and whether its client leaves as soon as it is answered."""
    words = " ".join(f"{dice.randrange(2**32):x}" for _ in range(dice.randrange(1, 120)))
    streams = dice.random() < 0.5
    body = {"model": "small", "messages": [{"role": "user", "content": words}], "stream": streams, "user": words[:8]}
    headers = {"authorization": f"Bearer {dice.choice(keys)}", "x-client-request-id": words[:40].replace(" ", "-")}
    kind = dice.random()
    if kind < 0.1:
        headers["idempotency-key"] = f"{dice.randrange(2**64):x}"
    elif kind < 0.15:
        headers["authorization"] = f"Bearer {new_key()}"
    elif kind < 0.2:
        body["model"] = words[:12]
    elif kind < 0.25:
        return {"url": f"/v1/batches/batch_{words[:8]}", "headers": headers, "json": body}, False
    return {"url": "/v1/chat/completions", "headers": headers, "json": body}, streams and dice.random() < 0.2


async def settle(session: aiohttp.ClientSession) -> None:
    """Wait until the gateway answers, no call runs, and all that has ended is in the ledger."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            async with session.get("/metrics", headers=ADMIN) as answer:
                lines = (await answer.text()).splitlines()
        except aiohttp.ClientError:
            lines = []
        if {"tollgate_calls_in_flight 0.0", "tollgate_journal_backlog 0.0"} <= set(lines):
            return
        await asyncio.sleep(0.1)
    raise AssertionError("the gateway does not come to rest")


def resident_bytes(pid: int) -> int:
    """Return what the process holds of memory that is no file's."""
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("RssAnon:"))
