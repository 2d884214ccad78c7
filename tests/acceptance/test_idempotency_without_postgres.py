# An Idempotency-Key is a promise that needs Postgres: without it nothing is run, and nothing leaves before it is kept.

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from gateway.dev.embedded import EmbeddedPostgres
from gateway.inference import idempotency
from gateway.run.processes import descendants_of
from gateway.stored_responses import memory
from tests.support.fault_service import frozen
from tests.support.house import House, running_house, settings_for
from tests.support.scripted_upstream import ScriptedUpstream
from tests.support.servers import execute
from tests.support.temporary_stores import temporary_postgres, temporary_valkey
from tests.support.waiting import until

CHAT: dict[str, Any] = {"model": "small", "messages": [{"role": "user", "content": "Say something."}]}
CHAT_URL = "/v1/chat/completions"


@pytest.fixture(scope="module")
def postgres() -> Iterator[EmbeddedPostgres]:
    """A Postgres that can be hurt."""
    with temporary_postgres() as postgres:
        yield postgres


@pytest.fixture(scope="module")
def fragile(
    postgres: EmbeddedPostgres, upstream: ScriptedUpstream, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[House]:
    """A house on it."""
    with temporary_valkey() as valkey:
        settings = settings_for(postgres.url, valkey.url, upstream.url, tmp_path_factory.mktemp("fragile"))
        with running_house(settings) as house:
            yield house


@pytest.fixture(autouse=True)
def _quiet(upstream: ScriptedUpstream) -> Iterator[None]:
    upstream.forget()
    yield
    upstream.forget()


def ask(house: House, headers: dict[str, str], **more: Any) -> httpx.Response:
    with house.client() as client:
        return client.post(CHAT_URL, json=CHAT | more, headers=headers)


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
def test_an_answer_waits_for_postgres_before_its_last_bytes_leave(
    fragile: House, postgres: EmbeddedPostgres, upstream: ScriptedUpstream, stream: bool
) -> None:
    """Frozen when the answer is to be stored: the client gets its end when it is, and only then."""
    headers = {"idempotency-key": str(uuid.uuid4())}
    upstream.may_answer.clear()
    assert postgres.pid is not None
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask, fragile, headers, stream=stream)
        until(lambda: upstream.requests)
        with frozen([postgres.pid, *descendants_of(postgres.pid)]):
            upstream.may_answer.set()
            until(lambda: upstream.requests[0].answered_at)
            time.sleep(0.5)
            is_early = answer.done()
        first = answer.result()
    again = ask(fragile, headers, stream=stream)

    assert not is_early
    assert first.status_code == 200 and again.content == first.content and len(upstream.requests) == 1


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
def test_a_client_is_sent_away_when_storing_takes_too_long(
    fragile: House,
    postgres: EmbeddedPostgres,
    upstream: ScriptedUpstream,
    stream: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It never hangs, and its answer is not lost: asked again, it is there, and paid once."""
    monkeypatch.setattr(idempotency, "CLIENT_WAITS", 0.3)
    headers = {"idempotency-key": str(uuid.uuid4())}
    upstream.may_answer.clear()
    assert postgres.pid is not None
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask, fragile, headers, stream=stream)
        until(lambda: upstream.requests)
        with frozen([postgres.pid, *descendants_of(postgres.pid)]):
            upstream.may_answer.set()
            sent_away = answer.result()
    again = ask(fragile, headers, stream=stream)

    assert sent_away.status_code == (200 if stream else 503)
    assert "Ask again with the same Idempotency-Key" in sent_away.text and "[DONE]" not in sent_away.text
    assert again.status_code == 200 and again.headers["idempotent-replayed"] == "true"
    assert not stream or again.text.endswith("data: [DONE]\n\n")
    assert len(upstream.requests) == 1


def test_an_answer_that_postgres_refuses_is_none(
    fragile: House, postgres: EmbeddedPostgres, upstream: ScriptedUpstream
) -> None:
    """What cannot be stored is not delivered and not charged; nobody waits for it for ever."""
    headers = {"idempotency-key": str(uuid.uuid4())}
    asyncio.run(
        execute(postgres.url, "ALTER TABLE idempotency ADD CONSTRAINT full_up CHECK (status IS NULL) NOT VALID")
    )
    try:
        refused = ask(fragile, headers)
    finally:
        asyncio.run(execute(postgres.url, "ALTER TABLE idempotency DROP CONSTRAINT full_up"))
    answered = ask(fragile, headers)

    assert (refused.status_code, answered.status_code) == (503, 200) and len(upstream.requests) == 2
    records = [fragile.record_of(answer) for answer in (refused, answered)]
    assert [record["status"] for record in records] == ["failed", "answered"]
    assert records[0]["cost_usd"] == 0


def test_without_postgres_a_call_with_a_key_does_not_run(
    fragile: House, postgres: EmbeddedPostgres, upstream: ScriptedUpstream
) -> None:
    """503 with retry-after, and the upstream hears of nothing. A call without a key goes on as ever."""
    headers = {"idempotency-key": str(uuid.uuid4())}
    assert ask(fragile, {}).status_code == 200  # the key of the team is known
    upstream.requests.clear()
    postgres.stop()
    try:
        refused = ask(fragile, headers)
        asked_upstream = len(upstream.requests)
        plain = ask(fragile, {})
    finally:
        postgres.start()

    assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1
    assert "Idempotency-Key" in json.loads(refused.content)["error"]["message"]
    assert asked_upstream == 0 and plain.status_code == 200


def test_with_postgres_back_the_same_key_runs(fragile: House, upstream: ScriptedUpstream) -> None:
    """Nothing is left behind of the time without it."""
    headers = {"idempotency-key": str(uuid.uuid4())}
    until(lambda: ask(fragile, headers).status_code != 503)
    answer = ask(fragile, headers)

    assert answer.status_code == 200 and ask(fragile, headers).content == answer.content


def test_a_response_is_answered_that_cannot_be_stored(
    fragile: House, postgres: EmbeddedPostgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Postgres frozen: it says that it is not stored, a conversation cannot go on, and later all is well."""
    monkeypatch.setattr(memory, "STORE_WITHIN", 0.3)
    monkeypatch.setattr(memory, "READ_WITHIN", 0.3)
    asked: dict[str, Any] = {"model": "small", "input": "Say something."}
    assert postgres.pid is not None
    with fragile.client() as client:
        first = client.post("/v1/responses", json=asked).json()
        more = asked | {"previous_response_id": first["id"]}
        with frozen([postgres.pid, *descendants_of(postgres.pid)]):
            answer = client.post("/v1/responses", json=asked)
            after = client.post("/v1/responses", json=more)
        until(lambda: client.post("/v1/responses", json=more).json().get("store") is True)

    assert first["store"] is True and (answer.status_code, answer.json()["store"]) == (200, False)
    assert after.status_code == 503 and "Nothing was run" in after.json()["error"]["message"]
