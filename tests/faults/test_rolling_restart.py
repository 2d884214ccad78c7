# Two gateways behind a balancer, under load, each restarted in its turn: nobody notices.

from __future__ import annotations

import asyncio
import os
import subprocess
import threading
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import aiohttp
import asyncpg
import pytest

from gateway.config.file import load_settings
from gateway.run.processes import free_port
from tests.support.balancer import Balancer
from tests.support.config_text import write_config
from tests.support.fault_service import TOLLGATE, Service
from tests.support.house import make_team
from tests.support.scripted_upstream import ScriptedUpstream
from tests.support.waiting import until

CLIENTS = 12
TOKENS, PACE = 8, 0.03  # a call of a quarter of a second


@dataclass
class Load:
    """Clients that call one after the other until the block ends, every second call a stream."""

    url: str
    key: str
    ids: list[str] = field(default_factory=list)  # of every call, as x-client-request-id
    faults: list[str] = field(default_factory=list)  # calls that were not answered whole

    def __enter__(self) -> Self:
        self._is_over = False
        self._thread = threading.Thread(target=lambda: asyncio.run(self._call_all()), name="load", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        self._thread.join(60)
        assert not self._thread.is_alive(), "the clients do not end"

    async def _call_all(self) -> None:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            await asyncio.gather(*(self._be_client(session, number) for number in range(CLIENTS)))

    async def _be_client(self, session: aiohttp.ClientSession, number: int) -> None:
        while not self._is_over:
            number += 1
            call_id = str(uuid.uuid4())
            self.ids.append(call_id)
            try:
                fault = await self._call(session, call_id, streams=number % 2 == 0)
            except (aiohttp.ClientError, OSError) as exc:
                fault = repr(exc)
            if fault:
                self.faults.append(f"{call_id}: {fault}")

    async def _call(self, session: aiohttp.ClientSession, call_id: str, *, streams: bool) -> str:
        """Make one call; return what was wrong with its answer."""
        body: dict[str, Any] = {"model": "small", "messages": [{"role": "user", "content": "Go."}], "stream": streams}
        headers = {"authorization": f"Bearer {self.key}", "x-client-request-id": call_id}
        async with session.post(f"{self.url}/v1/chat/completions", json=body, headers=headers) as answer:
            if answer.status != 200:
                return f"{answer.status}: {(await answer.text())[:300]}"
            if not streams:
                return "" if (await answer.json())["usage"]["completion_tokens"] == TOKENS else "not whole"
            lines = [line async for line in answer.content if line.startswith(b"data: ")]
            return "" if lines[-1] == b"data: [DONE]\n" else f"ended with {lines[-1]!r}"


@pytest.mark.soak  # what each gateway does meanwhile is in test_serve_lifecycle.py
@pytest.mark.timeout(300)
@pytest.mark.parametrize("workers", [1, 2])
def test_a_rolling_restart_loses_no_request(tmp_path: Path, database_url: str, redis_url: str, workers: int) -> None:
    """Each gateway is ended by SIGTERM in mid-load and started again: every answer whole, one row each, books true."""
    with ScriptedUpstream() as upstream:
        upstream.script(f"tokens={TOKENS},pace={PACE}")
        config = write_config(tmp_path / "tollgate.yaml", database_url, redis_url, upstream.url)
        text = config.read_text().replace("lame_duck: 0s", "lame_duck: 1s").replace("drain: 2s", "drain: 30s")
        text = text.replace("openai,", "openai, api_keys: [sk-upstream],")
        config.write_text(text.replace("small: {", "small: {upstream_model: gpt-4o-mini, "))
        key = asyncio.run(make_team(load_settings(config), f"team-of-{workers}"))
        gateways = [gateway_on(free_port(), workers, config, tmp_path / f"{number}.log") for number in range(2)]
        try:
            for gateway in gateways:
                gateway.start()
            with Balancer([gateway.url for gateway in gateways]) as balancer, Load(balancer.url, key) as load:
                until(lambda: len(load.ids) > 3 * CLIENTS)
                statuses = [restart(gateway, balancer) for gateway in gateways]
                until(lambda: all(balancer.is_ready.values()))
                calls = len(load.ids)
                until(lambda: len(load.ids) > calls + 3 * CLIENTS)
        finally:
            for gateway in gateways:
                gateway.end()
    rows = asyncio.run(read_rows(database_url))
    audit = subprocess.run([TOLLGATE, "audit", "--config", str(config)], capture_output=True, timeout=120)

    assert load.faults == [] and balancer.broken == []
    assert statuses == [0, 0]
    assert sorted(row["client_request_id"] for row in rows) == sorted(load.ids)
    assert {(row["status"], row["output_tokens"]) for row in rows} == {("answered", TOKENS)}
    assert audit.returncode == 0, audit.stdout


def gateway_on(port: int, workers: int, config: Path, log: Path) -> Service:
    words = ["serve", "--config", str(config), "--port", str(port), "--workers", str(workers)]
    return Service("gateway", words, log, {**os.environ}, f"http://127.0.0.1:{port}")


def restart(gateway: Service, balancer: Balancer) -> int:
    """End a gateway while calls run there, and start it again; return its exit status."""
    until(lambda: balancer.running[gateway.url] >= 3)
    status = gateway.end(patience=60)
    assert not balancer.is_ready[gateway.url]
    gateway.start()
    until(lambda: balancer.is_ready[gateway.url])
    return status


async def read_rows(url: str) -> list[asyncpg.Record]:
    connection = await asyncpg.connect(url)
    try:
        return list(await connection.fetch("SELECT client_request_id, status, output_tokens FROM usage_records"))
    finally:
        await connection.close()
