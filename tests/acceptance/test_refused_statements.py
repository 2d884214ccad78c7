# What Postgres refuses stays between gateway and Postgres: whatever it was about, no log and no answer quotes it, and
# a refusal that passes is a 503 that says when to come back.

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import asyncpg
import httpx
import pytest

from gateway.http.routes import HANDLERS
from tests.support.fault_house import ADMIN_KEY, FaultHouse, running_fault_house

SECRET = "CANARY-never-in-a-log"
TABLES = """
    SELECT string_agg(format('%I', relname), ', ') FROM pg_class
    WHERE relkind IN ('r', 'p') AND NOT relispartition AND relnamespace = 'public'::regnamespace
"""
TALK = {"model": "steady", "max_tokens": 8, "messages": [{"role": "user", "content": SECRET}]}
ADMIN = {"authorization": f"Bearer {ADMIN_KEY}"}
HOOK = f"http://127.0.0.1:9/{SECRET}?signature={SECRET}"
AT_ONCE = 9  # calls: the gateway's pool has room for them

Refusal = tuple[str, str, dict[str, Any]]  # method, path, what the client sends


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultHouse]:
    """A house whose statements Postgres may be made to refuse."""
    with running_fault_house(tmp_path_factory.mktemp("house"), gateways=1) as house:
        yield house


@asynccontextmanager
async def lock(house: FaultHouse, mode: str) -> AsyncIterator[None]:
    """Hold all tables, as a migration or a backup may."""
    connection = await asyncpg.connect(house.postgres.url)
    try:
        async with connection.transaction():
            await connection.execute(f"LOCK TABLE {await connection.fetchval(TABLES)} IN {mode} MODE")
            yield
    finally:
        await connection.close()


@asynccontextmanager
async def setting(house: FaultHouse, name: str, value: str) -> AsyncIterator[None]:
    """Have the server run with a setting."""
    connection = await asyncpg.connect(house.postgres.url)
    try:
        await connection.execute(f"ALTER SYSTEM SET {name} = {value}")
        await connection.execute("SELECT pg_reload_conf()")
        yield
        await connection.execute(f"ALTER SYSTEM RESET {name}")
        await connection.execute("SELECT pg_reload_conf()")
    finally:
        await connection.close()


@asynccontextmanager
async def constraint_against_all(house: FaultHouse) -> AsyncIterator[None]:
    """Have every table refuse every row, and quote it."""
    connection = await asyncpg.connect(house.postgres.url)
    tables = (await connection.fetchval(TABLES)).split(", ")
    try:
        for table in tables:
            await connection.execute(f"ALTER TABLE {table} ADD CONSTRAINT refused CHECK (false) NOT VALID")
        yield
    finally:
        for table in tables:
            await connection.execute(f"ALTER TABLE {table} DROP CONSTRAINT IF EXISTS refused")
        await connection.close()


def team_and_file(house: FaultHouse) -> tuple[str, str]:
    """Return the key of a team, and a file of it that a batch can be made of."""
    key = next(iter(house.make_team(f"team-{len(house.gateways[0].log.read_bytes())}", {}, [{}]).values()))
    line = {"custom_id": "one", "method": "POST", "url": "/v1/chat/completions", "body": TALK}
    headers = {"authorization": f"Bearer {key}"}
    upload = {"file": ("in.jsonl", json.dumps(line).encode())}
    url = f"{house.gateways[0].url}/v1/files"
    made = httpx.post(url, files=upload, data={"purpose": "batch"}, headers=headers).raise_for_status()
    return key, made.json()["id"]


def telling_calls(file: str) -> list[Refusal]:
    """Return a call for each statement that carries what a team or an admin says."""
    batch = {"requests": [{"body": TALK}], "callback_url": HOOK, "metadata": {"note": SECRET}}
    of_file = {"input_file_id": file, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    upload = {"files": {"file": (f"{SECRET}.jsonl", SECRET.encode())}, "data": {"purpose": "batch"}}
    correction = {"team_id": "other", "date": "2026-01-01", "cost_usd": "-1", "reason": SECRET}
    return [
        ("POST", "/v1/batch", {"json": batch}),
        ("POST", "/v1/batches", {"json": {**of_file, "metadata": {"note": SECRET}}}),
        ("POST", "/v1/files", upload),
        ("POST", "/v1/chat/completions", {"json": TALK, "headers": {"idempotency-key": SECRET}}),
        ("POST", "/admin/teams", {"json": {"id": "new", "name": SECRET, "webhook_url": HOOK}, "headers": ADMIN}),
        ("PATCH", "/admin/teams/other", {"json": {"name": SECRET, "webhook_url": HOOK}, "headers": ADMIN}),
        ("POST", "/admin/keys", {"json": {"team_id": "other", "name": SECRET}, "headers": ADMIN}),
        ("POST", "/admin/corrections", {"json": correction, "headers": ADMIN}),
        ("POST", "/admin/teams/other/webhook-secrets", {"headers": ADMIN}),
    ]


async def send_all(house: FaultHouse, key: str, calls: list[Refusal]) -> list[httpx.Response]:
    """Send calls, a few at once."""
    few = asyncio.Semaphore(AT_ONCE)
    headers = {"authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=house.gateways[0].url, headers=headers, timeout=60) as client:

        async def send(method: str, path: str, sent: dict[str, Any]) -> httpx.Response:
            async with few, client.stream(method, path, **sent) as answer:
                if method != "GET" or "event-stream" not in answer.headers["content-type"]:  # which does not end
                    await answer.aread()
                return answer

        return await asyncio.gather(*(send(*call) for call in calls))


FAULTS = {
    "lock": (lambda house: lock(house, "SHARE"), 503, b"LockNotAvailableError"),
    "read only": (lambda house: setting(house, "default_transaction_read_only", "on"), 503, b"ReadOnlySQLTransaction"),
    "constraint": (constraint_against_all, 500, b"CheckViolationError"),
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_refused_statement_is_quoted_nowhere(house: FaultHouse, fault: str) -> None:
    """Prompts, metadata, names, file names, callback URLs and keys stay out of all logs and answers."""
    refused, status, named = FAULTS[fault]
    key, file = team_and_file(house)
    before = {path: path.stat().st_size for path in logs_of(house)}
    async with httpx.AsyncClient(base_url=house.gateways[0].url, headers=ADMIN) as admin:
        await admin.post("/admin/teams", json={"id": "other"})
    async with refused(house):
        answers = await send_all(house, key, telling_calls(file))
    written = {path: path.read_bytes()[start:] for path, start in before.items()}

    assert [path.name for path, text in written.items() if SECRET.encode() in text] == []
    assert [answer.text for answer in answers if SECRET in answer.text] == []
    assert named in written[house.gateways[0].log]
    assert written[house.postgres.log].count(b"ERROR:") >= 5  # it was Postgres that refused
    idempotent = 503  # whatever the reason, the call may not run
    assert {answer.status_code for answer in answers} <= {status, idempotent}
    for answer in answers:
        if answer.status_code == 503:
            assert answer.json()["error"]["code"] == "overloaded"
            assert int(answer.headers["retry-after"]) >= 1


async def test_a_database_that_stands_still_is_a_503_on_every_route(house: FaultHouse) -> None:
    """While all tables are held, a route answers what needs none of them, or 503 `overloaded` with `retry-after`."""
    key, file = team_and_file(house)
    batch = {"input_file_id": file, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    (made,) = await send_all(house, key, [("POST", "/v1/batches", {"json": batch})])
    ids = {"file_id": file, "batch_id": made.json()["id"], "team_id": "other"}
    calls: list[Refusal] = []
    for handler in HANDLERS:
        for path in sorted(handler.paths):
            url = re.sub(r"\{(\w+):\w+\}", lambda found: ids.get(found[1], SECRET), path)
            headers = ADMIN if path.startswith("/admin") else {}
            for method in handler.http_methods - {"HEAD", "OPTIONS"}:
                body = {"json": TALK} if method in ("POST", "PATCH") else {}
                calls.append((method, url, {"headers": headers, **body}))
    async with lock(house, "ACCESS EXCLUSIVE"):
        answers = await send_all(house, key, [*calls, *telling_calls(file)])
    failed = [answer for answer in answers if answer.status_code >= 500 and answer.request.url.path != "/health/ready"]

    assert len(failed) > 25
    told = [error.get("data", error) for answer in failed if (error := answer.json()["error"])]
    # Of OpenAI's shape, of JSON-RPC's, whose data has the code, and of Anthropic's, which has none.
    assert {error["code"] if "code" in error else error["type"] for error in told} == {"overloaded", "overloaded_error"}
    assert {answer.status_code for answer in failed} == {503}
    assert all(int(answer.headers["retry-after"]) >= 1 for answer in failed)
    assert SECRET.encode() not in b"".join(path.read_bytes() for path in logs_of(house))


def logs_of(house: FaultHouse) -> list[Path]:
    """Return everything that is written to be read by people."""
    return [house.postgres.log, house.redis.log, *(service.log for service in house.services)]
