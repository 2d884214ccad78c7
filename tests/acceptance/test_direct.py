# Inference calls go past Litestar's steps, or through them where they are not plain ones: a client cannot tell which.

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import httpx
import pytest

from gateway.http.direct import DirectRequest
from tests.support.house import House, running_house, settings_for
from tests.support.scripted_upstream import ScriptedUpstream
from tests.support.servers import database_of_its_own

CHAT: dict[str, Any] = {"model": "small", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
CHANGING = re.compile(rb'[0-9a-f]{32}|[0-9a-f-]{36}|"created":\d+|\d{4}-\d\d-\d\dT[^"]*')
BOTH = ["/v1/chat/completions", "/v1/messages", "/v1/completions", "/v1/embeddings"]


@pytest.fixture(scope="module")
def house(
    upstream: ScriptedUpstream, tmp_path_factory: pytest.TempPathFactory, postgres_url: str, redis_url: str
) -> Iterator[House]:
    """A gateway of these tests' own: of so many refusals in a second only the first are logged."""
    with database_of_its_own(postgres_url) as database_url:
        folder = tmp_path_factory.mktemp("direct")
        with running_house(settings_for(database_url, redis_url, upstream.url, folder)) as house:
            yield house


def ask(house: House, path: str, body: bytes, is_plain: bool, headers: Mapping[str, str | None]) -> httpx.Response:
    """Send a call the short way, or as chunks, which go the long one."""

    def pieces() -> Iterator[bytes]:
        yield body

    with house.client() as client:
        told = {"content-type": "application/json", "authorization": f"Bearer {house.team_key}", **headers}
        said = {name.encode(): value.encode("latin-1") for name, value in told.items() if value is not None}
        client.headers.pop("authorization", None)
        return client.post(path, content=body if is_plain else pieces(), headers=said)


def seen(answer: httpx.Response) -> tuple[int, set[str], bytes]:
    """Return what of an answer is the same whenever it is given: of a stream not how it was cut."""
    if answer.headers["content-type"].startswith("text/event-stream"):
        return answer.status_code, set(answer.headers.keys()), b""
    return answer.status_code, set(answer.headers.keys()), CHANGING.sub(b"*", answer.content)


@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize(
    ("more", "headers"),
    [
        ({}, {}),
        ({"stream": True}, {}),
        ({}, {"x-client-request-id": "mine", "x-priority": "high"}),
        ({"model": "nobody's"}, {}),
        ({"temperature": 9}, {}),
        ({}, {"authorization": None}),
        ({}, {"authorization": "Bearer tg-" + "x" * 43}),
        ({}, {"authorization": None, "x-api-key": "nonsense"}),
        ({}, {"x-team-id": "others"}),
        ({}, {"anthropic-version": "2023-06-01", "x-quality": "2"}),
        ({}, {"idempotency-key": "ü".encode().decode("latin-1")}),
        ({}, {"content-encoding": "gzip"}),
    ],
)
def test_both_ways_give_the_same_answer(
    house: House, path: str, more: dict[str, Any], headers: dict[str, str | None]
) -> None:
    """Status, headers and body, of answers and of refusals."""
    body = json.dumps({**CHAT, **more}).encode()
    if "content-encoding" in headers:
        body = body[:-1]

    assert seen(ask(house, path, body, True, headers)) == seen(ask(house, path, body, False, headers))


def test_plain_calls_go_the_short_way_alone(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above compares something: a short body with its length is read by one, all else by the other."""
    short: list[str] = []
    usual = DirectRequest.body

    async def body(self: DirectRequest) -> bytes:
        short.append(self.scope["path"])
        return await usual(self)

    monkeypatch.setattr(DirectRequest, "body", body)
    asked = json.dumps(CHAT).encode()
    assert ask(house, BOTH[0], asked, True, {}).status_code == 200
    assert short == [BOTH[0]]
    assert ask(house, BOTH[0], asked, False, {}).status_code == 200
    assert ask(house, BOTH[0] + "/", asked, True, {}).status_code == 200
    assert ask(house, BOTH[0], asked + b" " * 70_000, True, {}).status_code == 200
    assert ask(house, BOTH[0], asked, True, {"host": "a b"}).status_code == 400
    assert short == [BOTH[0]]
