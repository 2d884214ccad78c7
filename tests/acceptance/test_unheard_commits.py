# A connection to Postgres that breaks while it commits: what was asked for is done, and nobody heard of it. Every book
# must say so all the same.

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from sqlalchemy.exc import DBAPIError

from billing.core.records import UsageRecord
from gateway.idempotency.store import IdempotencyStore
from gateway.idempotency.stored_answers import Claim, StoredAnswer
from tests.support.audits import lasting_differences
from tests.support.house import House, running_house, settings_for
from tests.support.paying_team import PayingTeam
from tests.support.postgres_proxy import PostgresProxy, postgres_proxy
from tests.support.scripted_upstream import ScriptedUpstream


@pytest.fixture
def way(database_url: str) -> Iterator[PostgresProxy]:
    """The way to a database of the test's own."""
    with postgres_proxy(database_url) as way:
        yield way


@pytest.fixture
def house(way: PostgresProxy, redis_url: str, upstream: ScriptedUpstream, tmp_path: Path) -> Iterator[House]:
    """A gateway that takes it."""
    with running_house(settings_for(way.url, redis_url, upstream.url, tmp_path)) as house:
        yield house


def test_a_correction_is_counted_though_its_commit_was_unheard(house: House, way: PostgresProxy) -> None:
    """Said again it changes nothing in the ledger; the counters, which nobody told, are built anew."""
    team = PayingTeam(house, usd_per_day=10)
    team.ask()
    said = {"id": str(uuid.uuid4()), "cost_usd": "4"}
    way.lose_commit_of("INSERT INTO corrections")
    unheard = team.correct(**said)
    again = team.correct(**said)

    assert (way.lost, unheard.status_code, again.status_code) == (1, 503, 201)
    assert team.usage().json()["corrections"]["entries"] == 1
    assert lasting_differences(house.settings.database_url) == []


def test_refusals_after_an_unheard_commit_do_not_make_a_call_free(
    house: House, way: PostgresProxy, upstream: ScriptedUpstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer is stored and charged, unheard, and then Postgres refuses every further try: the row is asked, and the
    client has the answer that it pays for."""
    store, tries = IdempotencyStore.store, 0

    async def refused_once_done(
        self: IdempotencyStore, claim: Claim, answer: StoredAnswer, record: UsageRecord | None, *also: Any
    ) -> bool:
        nonlocal tries
        tries += 1
        if tries == 1:
            return await store(self, claim, answer, record, *also)
        raise DBAPIError("UPDATE", {}, refusal())

    upstream.forget()
    monkeypatch.setattr(IdempotencyStore, "store", refused_once_done)
    way.lose_commit_of("UPDATE idempotency SET status")
    body = {"model": "small", "messages": [{"role": "user", "content": "hello"}]}
    headers = {"idempotency-key": str(uuid.uuid4())}
    with house.client() as client:
        first, again = (client.post("/v1/chat/completions", json=body, headers=headers) for _ in range(2))

    assert (way.lost, tries) == (1, 5 + 1)
    assert (first.status_code, again.status_code) == (200, 200) and again.content == first.content
    record = house.record_of(first)
    assert record["status"] == "answered" and record["cost_usd"] > 0 and len(upstream.requests) == 1
    assert lasting_differences(house.settings.database_url) == []


def refusal() -> Exception:
    """Return what SQLAlchemy wraps when a lock is not to be had."""
    error = Exception("canceling statement due to lock timeout")
    error.__cause__ = asyncpg.QueryCanceledError("canceling statement due to lock timeout")
    return error
