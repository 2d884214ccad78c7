# What test_fault_table.py does not play: refusals in the upstream's own words, deadlines, clients that leave, and what
# reaches an upstream. For a model behind either format.

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from sqlalchemy import text

from gateway.calls.early_leaves import FREE
from gateway.storage.database import Database
from protocol.chat import ImageUrl
from protocol.serving.off_loop import HEAVY
from router.prompt_size.pictures import Picture, picture_of
from tests.support.house import House, make_team
from tests.support.leaving import ask_and_leave
from tests.support.scripted_upstream import ScriptedUpstream
from tests.support.waiting import until

ASK: dict[str, Any] = {"model": "small", "messages": [{"role": "user", "content": "Say something."}]}


@pytest.fixture
def house(house: House) -> House:
    """Give each test a team of its own: what one leaves early is not counted against the next."""
    team = f"team_{uuid.uuid4().hex[:12]}"
    return replace(house, team_id=team, team_key=asyncio.run(make_team(house.settings, team)))


@pytest.fixture(autouse=True, params=["small", "claude"])
def _each_dialect(
    request: pytest.FixtureRequest, house: House, upstream: ScriptedUpstream, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Every rule holds for a model behind either dialect."""
    monkeypatch.setitem(ASK, "model", request.param)
    upstream.forget()
    yield
    upstream.forget()
    house.reset_breakers()


def rows_of(house: House, user: str) -> list[Any]:
    """Return the usage records of calls that named this user."""

    async def read() -> list[Any]:
        database = Database(house.settings.database_url)
        try:
            async with database.begin() as connection:
                wanted = text("SELECT * FROM usage_records WHERE user_tag = :user")
                return list(await connection.execute(wanted, {"user": user}))
        finally:
            await database.close()

    return asyncio.run(read())


def ask(house: House, **more: Any) -> httpx.Response:
    with house.client() as client:
        return client.post("/v1/chat/completions", json={**ASK, **more})


@pytest.mark.parametrize(
    ("script", "status", "code"),
    [
        ("403", 502, "upstream_error"),
        ("400", 400, "invalid_value"),
        ("status=302", 502, "upstream_error"),
        ("status=304", 502, "upstream_error"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_fault_before_the_first_token_has_an_honest_status(
    house: House, upstream: ScriptedUpstream, script: str, status: int, code: str | None, stream: bool
) -> None:
    """Nothing has been sent yet, so the status tells; the call costs nothing and leaves one row, `failed`."""
    upstream.script(script)
    answer = ask(house, stream=stream)
    error = answer.json()["error"]
    row = house.record_of(answer)

    if ASK["model"] == "claude" and code == "invalid_value":
        code = None  # Anthropic's errors have no codes of that kind
    assert (answer.status_code, error["code"]) == (status, code)
    assert error["request_id"] == answer.headers["x-request-id"]
    assert (error["model"], error["endpoint"]) == (row["model_used"], f"{row['provider']}/local")
    assert "sk-upstream" not in answer.text
    assert (row["status"], row["cost_usd"]) == ("failed", 0)


def test_a_stream_ends_at_its_total_deadline(house: House, upstream: ScriptedUpstream) -> None:
    """Tokens that keep dripping keep nobody past `timeouts.total`: an error chunk says so, what came is charged."""
    upstream.script("tokens=40,pace=0.25")
    answer = ask(house, stream=True)
    row = house.record_of(answer)

    assert "[DONE]" not in answer.text and '"upstream_timeout"' in answer.text
    assert f'"request_id":"{answer.headers["x-request-id"]}"' in answer.text and '"endpoint":' in answer.text
    assert row["status"] == "interrupted" and 3 <= row["output_tokens"] < 40


def test_an_answer_without_usage_is_charged_by_what_was_seen(house: House, upstream: ScriptedUpstream) -> None:
    """An upstream that counts nothing is counted by its pieces: never zero tokens, never free."""
    upstream.script("usage=none,tokens=7")
    answer = ask(house, stream=True, stream_options={"include_usage": True})
    row = house.record_of(answer)

    assert (row["status"], row["output_tokens"]) == ("answered", 7)
    assert row["input_tokens"] > 0 and row["cost_usd"] > 0


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_closes_its_upstream(
    house: House, upstream: ScriptedUpstream, stream: bool, path: str
) -> None:
    """The upstream is closed within 200 ms of the client's leaving, and what was sent is on the books."""
    upstream.script("tokens=100,pace=0.02")
    for _ in range(5):  # the machine may be busy; not each time
        upstream.requests.clear()
        body = {**ASK, "stream": stream, "max_tokens": 500}
        if stream:
            with house.client() as client, client.stream("POST", path, json=body) as answer:
                next(answer.iter_bytes())
                left = time.monotonic()
        else:
            left = ask_and_leave(house, path, body, lambda: upstream.requests)
        until(lambda: upstream.requests[0].closed_at)
        closed = upstream.requests[0].closed_at
        if closed is not None and closed - left < 0.2:
            break

    assert closed is not None and closed - left < 0.2
    if stream:
        row = house.record_of(answer)
        assert row["status"] == "interrupted"
        assert 1 <= row["output_tokens"] <= upstream.requests[-1].tokens_sent + 1


@pytest.mark.parametrize("script", ["tokens=100,first_token=1", "hang-before-headers", "role-only"])
@pytest.mark.parametrize("stream", [True, False])
def test_a_call_that_is_left_before_a_first_token_costs_its_prompt(
    house: House, upstream: ScriptedUpstream, script: str, stream: bool
) -> None:
    """The upstream has the prompt and bills it. The row says who was asked, and that it was abandoned."""
    ask(house).raise_for_status()  # no earlier test's calls count
    upstream.forget()
    upstream.script(script)
    who = f"leaves {script} {stream} {ASK['model']}"
    asked = {**ASK, "user": who, "stream": stream, "messages": [{"role": "user", "content": "word " * 400}]}
    ask_and_leave(house, "/v1/chat/completions", asked, lambda: upstream.requests)
    until(lambda: upstream.requests[0].closed_at)
    until(lambda: rows_of(house, who))
    (row,) = rows_of(house, who)

    assert (row.status, row.output_tokens, row.cached_input_tokens) == ("interrupted", 0, 0)
    assert 300 <= row.input_tokens <= 1000
    assert row.cost_nanousd == row.input_tokens * 1000  # $1 per million
    assert [attempt["outcome"] for attempt in row.attempts] == ["abandoned"]


def test_a_prompt_that_is_only_estimated_costs_no_more_than_was_held(house: House, upstream: ScriptedUpstream) -> None:
    """No prompt is longer than its model's context, whatever its bytes say."""
    ask(house).raise_for_status()
    upstream.forget()
    upstream.script("hang-before-headers")
    who = f"leaves a word {ASK['model']}"
    asked = {**ASK, "user": who, "messages": [{"role": "user", "content": "a" * 60_000}]}
    ask_and_leave(house, "/v1/chat/completions", asked, lambda: upstream.requests)
    until(lambda: rows_of(house, who))

    assert [(row.status, row.input_tokens) for row in rows_of(house, who)] == [("interrupted", 8192)]


def test_a_long_prompt_that_is_left_holds_up_no_other_calls(
    house: House, upstream: ScriptedUpstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is charged for it rests on its hold; its pictures are not looked into again, on the event loop."""
    looked: list[str] = []

    def picture(image: ImageUrl) -> Picture:
        looked.append(threading.current_thread().name)
        return picture_of(image)

    monkeypatch.setattr("router.prompt_size.prompt_bounds.picture_of", picture)
    ask(house).raise_for_status()
    upstream.forget()
    upstream.script("hang-before-headers")
    who = f"leaves a picture {ASK['model']}"
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * HEAVY}}
    asked = {**ASK, "user": who, "messages": [{"role": "user", "content": [part]}]}
    ask_and_leave(house, "/v1/chat/completions", asked, lambda: upstream.requests)
    until(lambda: rows_of(house, who))

    assert [row.status for row in rows_of(house, who)] == ["interrupted"]
    assert looked and all(name.startswith(("long-bodies", "huge-bodies")) for name in looked)


def test_a_key_whose_calls_are_left_again_and_again_has_to_wait(house: House, upstream: ScriptedUpstream) -> None:
    """Five are let pass; then 429 with retry-after until a call has had a first token."""
    ask(house).raise_for_status()
    upstream.script("first_token=1")
    for left in range(1, FREE + 2):
        ask_and_leave(house, "/v1/chat/completions", ASK, lambda left=left: len(upstream.requests) == left + 1)
        until(lambda left=left: upstream.requests[left].closed_at)
    upstream.forget()
    refused = ask(house)
    asked = list(upstream.requests)
    time.sleep(float(refused.headers["retry-after"]))
    answers = [ask(house) for _ in range(3)]

    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert asked == []
    assert [answer.status_code for answer in answers] == [200] * 3


@pytest.mark.parametrize("script", ["500,latency=0.3", "429,latency=0.3,retry_after=30"])
def test_a_call_that_was_refused_before_it_was_left_costs_nothing(
    house: House, upstream: ScriptedUpstream, script: str
) -> None:
    """An attempt that failed is not charged, although the client has left by the time it is known."""
    upstream.script(script)
    who = f"refused {script} {ASK['model']}"
    with house.client() as client:
        client.post("/v1/chat/completions", json={**ASK, "user": who})
    until(lambda: rows_of(house, who))

    assert [(row.status, row.cost_nanousd) for row in rows_of(house, who)] == [("failed", 0)]


def test_no_header_of_the_client_reaches_the_upstream(house: House, upstream: ScriptedUpstream) -> None:
    """Requests are built anew: cookies, forwarding headers and unknown fields stay here."""
    with house.client() as client:
        client.post(
            "/v1/chat/completions",
            json={**ASK, "some_new_field": {"x": 1}, "tier": "interactive"},
            headers={"cookie": "a=b", "x-forwarded-for": "1.2.3.4", "x-secret": "s", "x-tier": "interactive"},
        ).raise_for_status()

    assert upstream.violations == []
    assert "some_new_field" not in (upstream.requests[-1].body or {})
    assert not {"cookie", "x-forwarded-for", "x-secret", "x-tier"} & upstream.requests[-1].headers.keys()
