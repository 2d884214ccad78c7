# What a team may have lying here, as its users meet it: tokens that wait in its batches, bytes of its files.

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from ipaddress import ip_network
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from sqlalchemy.exc import OperationalError

from gateway.core.settings import BatchLimits
from gateway.http.routes import batch
from tests.support.house import House, running_house, settings_for

LIMITS = BatchLimits(queued_tokens=1000, stored_bytes=6000)


@pytest.fixture
def house(database_url: str, redis_url: str, tmp_path: Path) -> Iterator[House]:
    """A gateway that allows little, and no worker: what is queued stays queued."""
    allowed = {"batch": LIMITS, "callbacks_allow": (ip_network("127.0.0.0/8"),)}
    settings = settings_for(database_url, redis_url, "http://127.0.0.1:9/v1", tmp_path, **allowed)
    with running_house(settings) as house:
        yield house


def batch_of(size: int) -> dict[str, Any]:
    """Return a batch of one request of ``size`` bytes."""
    frame = len('{"model":"small","x":""}')
    return {"requests": [{"custom_id": "a", "body": {"model": "small", "x": "x" * (size - frame)}}]}


def send(client: httpx.Client, size: int) -> httpx.Response:
    """Submit a batch of about ``size`` bytes."""
    content = httpx.Request("POST", "http://x", json=batch_of(size)).content
    return client.post("/v1/batch", content=content)


def test_more_tokens_than_may_wait_are_refused_until_some_are_done(house: House) -> None:
    """OpenAI's code, in words that say what would be right; nothing of the refused batch is there."""
    with house.client() as client:
        first = send(client, 3000)
        refused = send(client, 1100)
        held = len(client.get("/v1/batch").json()["data"])
        client.post(f"/v1/batch/{first.json()['batch_id']}/cancel").raise_for_status()
        again = send(client, 1100)

    error = refused.json()["error"]
    assert (first.status_code, refused.status_code, again.status_code) == (202, 429, 202)
    assert (error["code"], error["type"]) == ("token_limit_exceeded", "rate_limit_error")
    assert "Limit: 1,000 tokens" in error["message"] and "smaller parts" in error["message"]
    assert (refused.headers["x-should-retry"], held) == ("false", 1)


def test_a_submission_that_is_answered_with_an_error_is_not_there(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client sends it again: Postgres may go away while the callback's secret is looked for."""

    async def away(*_: object) -> None:
        raise OperationalError("SELECT", None, Exception("gone"))

    monkeypatch.setattr(batch, "list_secrets", away)
    with house.client() as client:
        refused = client.post("/v1/batch", json=batch_of(300) | {"callback_url": "http://127.0.0.1:9/"})
        held = client.get("/v1/batch").json()["data"]

    assert (refused.status_code, held) == (503, [])


def test_submissions_at_once_do_not_slip_by_each_other(house: House) -> None:
    """Of eight at once, each more than a quarter of the room, three come through."""
    with house.client() as client, ThreadPoolExecutor(8) as pool:
        statuses = [answer.status_code for answer in pool.map(lambda _: send(client, 1200), range(8))]

    assert statuses.count(202) == 3 and set(statuses) == {202, 429}


def test_the_openai_package_is_told_of_both_limits(house: House) -> None:
    """A batch of a file counts its file; a file beyond what may be stored is refused until another is deleted."""
    line = '{"custom_id":"a","method":"POST","url":"/v1/chat/completions","body":{"model":"small","x":"%s"}}'
    with openai.OpenAI(base_url=f"{house.url}/v1", api_key=house.team_key, max_retries=0) as client:
        file = client.files.create(file=("a.jsonl", (line % ("x" * 3900)).encode()), purpose="batch")
        small = client.files.create(file=("b.jsonl", (line % ("x" * 1000)).encode()), purpose="batch")
        with pytest.raises(openai.RateLimitError, match="its limit is 6,000") as beyond:
            client.files.create(file=("c.jsonl", (line % ("x" * 1500)).encode()), purpose="batch")
        with pytest.raises(openai.RateLimitError, match="Enqueued token limit reached") as queue:
            window: Any = {"endpoint": "/v1/chat/completions", "completion_window": "24h"}
            client.batches.create(input_file_id=small.id, **window)
            client.batches.create(input_file_id=file.id, **window)
        client.files.delete(file.id)
        client.files.create(file=("c.jsonl", (line % ("x" * 1500)).encode()), purpose="batch")

    assert (beyond.value.code, queue.value.code) == ("storage_limit_exceeded", "token_limit_exceeded")
