# Going back to a backup of Postgres, as docs/operations/changes.md has it, with a real gateway before and after.

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import httpx
import pytest
from redis import Redis
from sqlalchemy import make_url

from gateway.core.settings import Settings
from tests.support.audits import differences
from tests.support.house import ADMIN_KEY, House, make_team, serving, settings_for
from tests.support.scripted_upstream import ScriptedUpstream
from tests.support.servers import execute, text_of


def answer_calls(settings: Settings, key: str, count: int) -> tuple[int, int]:
    """Run a gateway until ``count`` calls are in the ledger; return the day's requests before and after them."""
    with serving(settings) as url:
        house = House(url, "team_a", key, ADMIN_KEY, settings)
        with house.client() as client:
            before = requests_of_today(client)
            body = {"model": "small", "messages": [{"role": "user", "content": "Hello"}]}
            for answer in [client.post("/v1/chat/completions", json=body).raise_for_status() for _ in range(count)]:
                house.record_of(answer)
            return before, requests_of_today(client)


def requests_of_today(client: httpx.Client) -> int:
    today = datetime.now(UTC).date().isoformat()
    report = client.get("/v1/usage", params={"team_id": "team_a", "date": today})
    return int(report.raise_for_status().json()["requests"])


@pytest.fixture
def upstream() -> Iterator[ScriptedUpstream]:
    """The outside world."""
    with ScriptedUpstream(models=("small",)) as upstream:
        yield upstream


def test_a_house_goes_on_from_its_backup(
    new_database_url: str, postgres_url: str, redis_url: str, upstream: ScriptedUpstream, tmp_path: Path
) -> None:
    """Keys work, ledger, leases and balances agree on what the backup has, and new calls come on top."""
    Redis.from_url(redis_url).flushall()
    settings = settings_for(new_database_url, redis_url, upstream.url, tmp_path)
    key = asyncio.run(make_team(settings, "team_a"))
    answer_calls(settings, key, 2)
    name = make_url(new_database_url).database
    asyncio.run(execute(postgres_url, f"CREATE DATABASE backup TEMPLATE {name}"))
    answer_calls(settings, key, 3)
    Redis.from_url(redis_url).flushall()

    backup = text_of(make_url(postgres_url).set(database="backup"))
    restored = settings_for(backup, redis_url, upstream.url, tmp_path)
    try:
        requests = answer_calls(restored, key, 1)
        differ = asyncio.run(differences(restored.database_url))
    finally:
        asyncio.run(execute(postgres_url, "DROP DATABASE backup WITH (FORCE)"))

    assert requests == (2, 3)
    assert differ == []
