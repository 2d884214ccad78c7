# Going back to a backup of Postgres, or with archived WAL to a moment, as docs/operations/changes.md has it, with a
# real gateway before and after.

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import asyncpg
import httpx
import pytest
from redis import Redis
from sqlalchemy import make_url

import migrations
from gateway.core.settings import Settings
from tests.support.audits import differences
from tests.support.house import ADMIN_KEY, House, make_team, serving, settings_for
from tests.support.scripted_upstream import ScriptedUpstream
from tests.support.servers import execute, text_of
from tests.support.standby import Copy
from tests.support.temporary_stores import temporary_postgres
from tests.support.waiting import until


def answer_calls(settings: Settings, key: str, count: int, known: int) -> int:
    """Run a gateway until ``known`` calls are in the ledger, and ``count`` more; return the day's requests."""
    with serving(settings) as url:
        house = House(url, "team_a", key, ADMIN_KEY, settings)
        with house.client() as client:
            until(lambda: requests_of_today(client) == known)
            body = {"model": "small", "messages": [{"role": "user", "content": "Hello"}]}
            for answer in [client.post("/v1/chat/completions", json=body).raise_for_status() for _ in range(count)]:
                house.record_of(answer)
            return requests_of_today(client)


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
    """Keys work, what was booked after the backup is booked again, from the segments that are kept for a day; ledger,
    leases and balances agree, and new calls come on top."""
    Redis.from_url(redis_url).flushall()
    settings = settings_for(new_database_url, redis_url, upstream.url, tmp_path)
    key = asyncio.run(make_team(settings, "team_a"))
    answer_calls(settings, key, 2, known=0)
    name = make_url(new_database_url).database
    asyncio.run(execute(postgres_url, f"CREATE DATABASE backup TEMPLATE {name}"))
    answer_calls(settings, key, 3, known=2)
    Redis.from_url(redis_url).flushall()

    backup = text_of(make_url(postgres_url).set(database="backup"))
    restored = settings_for(backup, redis_url, upstream.url, tmp_path)
    try:
        requests = answer_calls(restored, key, 1, known=5)
        differ = asyncio.run(differences(restored.database_url))
    finally:
        asyncio.run(execute(postgres_url, "DROP DATABASE backup WITH (FORCE)"))

    assert requests == 6
    assert differ == []


def test_a_house_goes_on_from_a_moment_in_its_archive(
    redis_url: str, upstream: ScriptedUpstream, tmp_path: Path
) -> None:
    """A base backup and the WAL up to a moment; the calls after it come from the kept segments."""
    Redis.from_url(redis_url).flushall()
    archive = "mkdir -p ../archive && cp %p ../archive/%f"
    with temporary_postgres(archive_mode="on", archive_command=archive) as postgres, ExitStack() as stack:
        migrations.upgrade(postgres.url)
        settings = settings_for(postgres.url, redis_url, upstream.url, tmp_path)
        key = asyncio.run(make_team(settings, "team_a"))
        restored = Copy(postgres, restore_command="cp ../archive/%f %p", archive_mode="off")
        stack.callback(restored.remove)
        restored.make()
        answer_calls(settings, key, 2, known=0)
        moment = asyncio.run(value_of(postgres.url, "SELECT clock_timestamp()"))
        answer_calls(settings, key, 3, known=2)
        last = asyncio.run(value_of(postgres.url, "SELECT pg_walfile_name(pg_switch_wal())"))
        archived = postgres.data_dir / postgres.name / "archive"
        until((archived / last).exists)
        until(lambda: asyncio.run(value_of(postgres.url, "SELECT last_archived_wal FROM pg_stat_archiver")) >= last)
        postgres.stop()

        restored.go_back_to(moment, archived)
        restored.start()
        Redis.from_url(redis_url).flushall()
        rows = asyncio.run(value_of(restored.url, "SELECT count(*) FROM usage_records"))
        requests = answer_calls(settings_for(restored.url, redis_url, upstream.url, tmp_path), key, 1, known=5)
        differ = asyncio.run(differences(restored.url))

    assert (rows, requests) == (2, 6)
    assert differ == []


async def value_of(url: str, query: str) -> Any:
    connection = await asyncpg.connect(url)
    try:
        return await connection.fetchval(query)
    finally:
        await connection.close()
