# The end of a team: who may say it, what dies at once, what is erased after it, and what stays.

from __future__ import annotations

import asyncio
from decimal import Decimal
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis
from sqlalchemy import text

from gateway.accounts import team_deletion
from gateway.accounts.team_deletion import ERASE, purge_deleted_teams
from gateway.batch.finishing import finish_cancelled
from gateway.cache.store import PREFIX, CacheStore
from gateway.core.clock import Clock
from gateway.storage.database import Database
from tests.support.house import House
from tests.support.paying_team import PayingTeam
from tests.support.scripted_upstream import ScriptedUpstream
from tests.support.upstream_scripts import Script
from tests.support.waiting import until

CHAT = {"model": "small", "messages": [{"role": "user", "content": "hi"}], "temperature": 0}
# What speaks of a deleted team in the end: its row, its keys, the books, and refused calls for their few days.
KEPT = {
    "admin_keys",
    "api_keys",
    "audit_log",
    "refused_calls",
    "usage_asked",
    "usage_daily",
    "usage_records",
    "usage_series",
}
FILLED = {
    "unusual_uses",
    "key_networks",
    "provider_keys",
    "webhook_secrets",
    "idempotency",
    "stored_responses",
    "call_contents",
}
FAULT = ("faults", text("SELECT CAST(:teams AS text[]), 1 / (CAST(:limit AS integer) - 1)"), 1)
UNINDEXED = text("""
    SELECT conrelid::regclass || '.' || attname
    FROM pg_constraint JOIN pg_attribute ON attrelid = conrelid AND attnum = conkey[1]
    WHERE contype = 'f' AND confrelid::regclass::text = ANY(:tables)
      AND NOT EXISTS (SELECT FROM pg_index WHERE indrelid = conrelid AND indkey[0] = conkey[1])
""")
SEEN = (
    text("INSERT INTO unusual_uses (key_id, day, signal, team_id, details) VALUES (:key, now(), 'spend', :team, '{}')"),
    text("INSERT INTO key_networks (key_id, day, network) SELECT id, now(), 'a network' FROM api_keys WHERE id = :key"),
)
NETWORKS = text("SELECT count(*) FROM key_networks JOIN api_keys ON id = key_id WHERE team_id = :team_id")
HOLDERS = text("SELECT table_name FROM information_schema.columns WHERE column_name = 'team_id'")


def fill(house: House, team: PayingTeam) -> str:
    """Let a team keep something of every kind here; return the cost that its books have."""
    of_team = f"/admin/teams/{team.id}"
    with house.client(house.admin_key) as admin:
        for path, body in (
            ("/provider-keys", {"provider": "upstream", "key": "sk-of-a-team"}),
            ("/webhook-secrets", None),
        ):
            admin.post(of_team + path, json=body).raise_for_status()
        changes = {"webhook_url": "https://93.184.216.34/hook", "contents": {"keep_days": 1}}
        admin.patch(of_team, json=changes | {"own_key_cost": "list"}).raise_for_status()
        made = {"role": "team-admin", "team_id": team.id, "name": "its admin"}
        admin.post("/admin/admin-keys", json=made).raise_for_status()
    with house.client(team.key) as client:
        for path, asked, headers in (
            ("/v1/chat/completions", CHAT, {"x-cache": "on"}),
            ("/v1/chat/completions", CHAT, {"idempotency-key": "once"}),
            ("/v1/responses", {"model": "small", "input": "hi"}, {}),
            ("/v1/conversations", {"items": [{"role": "user", "content": "hi"}]}, {}),
            ("/v1/batch", {"requests": [CHAT, CHAT]}, {}),
        ):
            client.post(path, json=asked, headers=headers).raise_for_status()
        file = {"file": ("in.jsonl", b'{"custom_id": "a"}\n')}
        client.post("/v1/files", files=file, data={"purpose": "batch"}).raise_for_status()
        assert client.post("/v1/chat/completions", json=CHAT | {"model": "none"}).status_code == 404
        until(lambda: team.usage().json()["requests"] == 3)
        return str(team.usage().json()["cost_usd_exact"])


def usage_of(client: httpx.Client, team: PayingTeam) -> dict[str, Any]:
    report: dict[str, Any] = client.get("/v1/usage", params={"team_id": team.id}).json()
    return report


async def see_unusual_use(house: House, team: PayingTeam) -> None:
    """Note what was unusual about a team's key, and whence it was used."""
    database = Database(house.settings.database_url)
    async with database.begin() as connection:
        for statement in SEEN:
            await connection.execute(statement, {"key": team.key_id, "team": team.id})
    await database.close()


async def holding(house: House, team_id: str) -> tuple[set[str], int]:
    """Return the tables that speak of a team, or of its keys, and how many answers of it are cached."""
    database, redis = Database(house.settings.database_url), Redis.from_url(house.settings.redis_url)
    found = set()
    async with database.begin() as connection:
        for table in (await connection.execute(HOLDERS)).scalars().all():
            query = text(f"SELECT EXISTS (SELECT FROM {table} WHERE team_id = :team_id)")
            if (
                not table.startswith("usage_records_")
                and (await connection.execute(query, {"team_id": team_id})).scalar()
            ):
                found.add(table)
        if (await connection.execute(NETWORKS, {"team_id": team_id})).scalar():
            found.add("key_networks")
    cached = len([key async for key in redis.scan_iter(f"{PREFIX}:answer:team:{team_id}:*")])
    await redis.aclose()
    await database.close()
    return {table for table in found if not table.startswith("usage_records_")}, cached


async def purge(house: House) -> None:
    """Do what a worker does within a minute."""
    database, redis = Database(house.settings.database_url), Redis.from_url(house.settings.redis_url)
    async with database.begin() as connection:
        await finish_cancelled(connection, Clock(), 86400.0)
    for team_id in await purge_deleted_teams(database):
        await CacheStore(redis, Clock()).forget(f"team:{team_id}")
    await redis.aclose()
    await database.close()


async def unindexed(house: House) -> list[str]:
    """Return what refers to rows that are erased with a team and is not found by an index."""
    database = Database(house.settings.database_url)
    async with database.begin() as connection:
        rows = (await connection.execute(UNINDEXED, {"tables": [table for table, *_ in ERASE]})).scalars().all()
    await database.close()
    return list(rows)


def test_no_row_that_is_erased_has_a_whole_table_read(house: House) -> None:
    """A thousand of them would take longer than a statement may, at every try."""
    assert asyncio.run(unindexed(house)) == []


def test_a_deleted_team_leaves_its_books_and_nothing_else(
    house: House, upstream: ScriptedUpstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys die at once, a running call is answered and booked, what the team kept here is gone after a worker's round,
    but for what cannot be erased now; its rows, sums and audit entries stay under its id, which no other team gets."""
    monkeypatch.setattr(team_deletion, "ERASE", (FAULT, *ERASE))
    team = PayingTeam(house, usd_per_day=5)
    cost = fill(house, team)
    asyncio.run(see_unusual_use(house, team))
    until(lambda: asyncio.run(holding(house, team.id))[0] >= FILLED)
    before, cached = asyncio.run(holding(house, team.id))
    upstream.script(Script(tokens=6, pace=0.1), times=1)
    with house.client(team.key) as client, house.client(house.admin_key) as admin:
        path = f"/admin/teams/{team.id}"
        with client.stream("POST", "/v1/chat/completions", json=CHAT | {"stream": True}) as running:
            lines = running.iter_lines()
            next(lines)
            asked = admin.delete(path)
            deleted = admin.delete(f"{path}?confirm={team.id}", headers={"x-audit-reason": "the team was dissolved"})
            refused = client.get("/v1/models")
            told = list(lines)
        row = house.record_of(running)
        again = [
            admin.patch(path, json={"suspended": False}),
            admin.post("/admin/keys", json={"team_id": team.id}),
            admin.delete(f"{path}?confirm={team.id}"),
            admin.post("/admin/teams", json={"id": team.id}),
        ]
        shown, listed = admin.get(path).json(), admin.get("/admin/teams", params={"search": team.id}).json()
        until(lambda: usage_of(admin, team)["requests"] == 4)
        usage = usage_of(admin, team)
        keys = [admin.get("/admin/keys", params=query).text for query in ({"limit": 200}, {"team_id": team.id})]
        [entry] = admin.get("/admin/audit-log", params={"team_id": team.id, "action": "team.deleted"}).json()["data"]
    asyncio.run(purge(house))
    after, still_cached = asyncio.run(holding(house, team.id))

    assert before >= {"conversations", "batches", "files", "api_keys", "admin_keys"} and cached == 1
    assert (asked.status_code, asked.json()["error"]["code"]) == (409, "confirmation_needed")
    assert f"confirm={team.id}" in asked.text and "1 of its batches" in asked.text
    assert deleted.status_code == 200 and refused.status_code == 401
    assert told[-2:] == ["data: [DONE]", ""] and row["status"] == "answered"
    assert [answer.status_code for answer in again] == [404, 404, 404, 409]
    assert "stay under that id" in again[-1].json()["error"]["message"]
    assert shown["deleted_at"] == deleted.json()["deleted_at"] and shown["webhook_url"] is None
    assert listed["data"] == [] and [team.id in each for each in keys] == [False, True]
    assert Decimal(usage["cost_usd_exact"]) > Decimal(cost) > 0
    assert entry["reason"] == "the team was dissolved"
    assert (entry["details"]["keys"], entry["details"]["open_batches"]) == (1, 1)
    assert after <= KEPT and after >= {"usage_records", "audit_log"} and still_cached == 0
