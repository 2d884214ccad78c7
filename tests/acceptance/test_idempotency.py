# The same Idempotency-Key gets the same answer and pays once, by the stock openai package: streamed and not, on every
# endpoint, on any gateway, whoever leaves, fails or dies on the way.

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import asyncpg
import httpx
import pytest
from msgspec.structs import replace
from openai import OpenAI

from gateway.accounts.schemas import LimitsInput
from gateway.http import reply_response
from tests.support.house import House, make_team, serving
from tests.support.leaving import ask_and_leave
from tests.support.scripted_upstream import ScriptedUpstream
from tests.support.waiting import until

CHAT: dict[str, Any] = {"model": "small", "messages": [{"role": "user", "content": "Say something."}]}
TEXT: dict[str, Any] = {"model": "small", "prompt": "Once"}
ITEMS: dict[str, Any] = {"model": "small", "input": [{"role": "user", "content": "Say something."}]}
WORDS: dict[str, Any] = {"model": "small", "input": ["one", "two"]}
STREAMED: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
CHAT_URL = "/v1/chat/completions"


@pytest.fixture(autouse=True)
def _quiet(upstream: ScriptedUpstream) -> Iterator[None]:
    upstream.forget()
    yield
    upstream.forget()


@pytest.fixture(scope="module")
def neighbour(house: House, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a second gateway of the same house, on another machine."""
    with serving(replace(house.settings, data_dir=tmp_path_factory.mktemp("neighbour"))) as url:
        yield url


@pytest.fixture
def key() -> str:
    """A key that nobody has used, which is also the call's `user`, so that its rows are found."""
    return f"key of {uuid.uuid4()}"


class Got(NamedTuple):
    """An answer as it came over the wire."""

    status: int
    headers: httpx.Headers
    body: bytes


def ask(house: House, key: str, url: str = CHAT_URL, body: dict[str, Any] = CHAT, **more: Any) -> Got:
    """POST as the house's team, or as what ``more`` says: headers, base_url, timeout."""
    headers = {"authorization": f"Bearer {house.team_key}", "idempotency-key": key} | more.pop("headers", {})
    base_url = more.pop("base_url", house.url)
    with httpx.Client(base_url=base_url, headers=headers, timeout=more.pop("timeout", 30)) as client:
        answer = client.post(url, json=body | {"user": key} | more)
    return Got(answer.status_code, answer.headers, answer.content)


def sql(house: House, query: str, *values: Any) -> list[asyncpg.Record]:
    async def run() -> list[asyncpg.Record]:
        connection = await asyncpg.connect(house.settings.database_url)
        try:
            return list(await connection.fetch(query, *values))
        finally:
            await connection.close()

    return asyncio.run(run())


def rows_of(house: House, key: str) -> list[tuple[str, str, int]]:
    """Return request id, status and cost of the calls under ``key``, once the journal is empty."""
    with house.client() as client:
        until(lambda: not client.get("/health/ready").json()["journal_backlog"])
    query = "SELECT request_id::text, status, cost_nanousd FROM usage_records WHERE user_tag = $1 ORDER BY created_at"
    return [tuple(row) for row in sql(house, query, key)]


ENDPOINTS = {
    "chat": (lambda api: api.chat.completions, CHAT),
    "chat stream": (lambda api: api.chat.completions, CHAT | STREAMED),
    "completion": (lambda api: api.completions, TEXT),
    "completion stream": (lambda api: api.completions, TEXT | STREAMED),
    "response": (lambda api: api.responses, ITEMS),
    "response stream": (lambda api: api.responses, ITEMS | {"stream": True}),
    "embeddings": (lambda api: api.embeddings, WORDS),
    "embeddings as floats": (lambda api: api.embeddings, WORDS | {"encoding_format": "float"}),
}


@pytest.mark.parametrize("what", ENDPOINTS)
def test_a_retry_gets_the_same_bytes_and_pays_nothing(
    house: House, openai: OpenAI, upstream: ScriptedUpstream, key: str, what: str
) -> None:
    """Status, type, request id and every byte of the first answer, and a header that says so: one call, one row."""
    endpoint, body = ENDPOINTS[what]

    def create() -> Got:
        create = endpoint(openai).with_streaming_response.create
        with create(**body, user=key, extra_headers={"Idempotency-Key": key}) as answer:
            return Got(answer.status_code, answer.headers, answer.read())

    first, again, once_more = create(), create(), create()

    assert again.body == first.body == once_more.body and len(first.body) > 50
    assert (first.status, again.status) == (200, 200)
    for name in ("content-type", "x-request-id", "x-model-used", "x-route-reason", "cache-control"):
        assert again.headers.get(name) == first.headers.get(name)
    assert "idempotent-replayed" not in first.headers and again.headers["idempotent-replayed"] == "true"
    assert len(upstream.requests) == 1 and upstream.violations == []
    (row,) = rows_of(house, key)
    assert row[:2] == (first.headers["x-request-id"], "answered") and row[2] > 0


def test_a_replayed_stream_is_a_stream_to_the_package(openai: OpenAI, key: str) -> None:
    """The chunks that it makes of a replay are those of the first time, to the last."""

    def chunks() -> list[Any]:
        return list(openai.chat.completions.create(**CHAT, **STREAMED, extra_headers={"Idempotency-Key": key}))

    first = chunks()

    assert chunks() == first and first[-1].usage is not None


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
def test_another_dialect_has_it_too(house: House, upstream: ScriptedUpstream, stream: bool) -> None:
    """Every inference route answers in one way; Anthropic's dialect gets its own bytes back, and its own errors."""
    headers = {"idempotency-key": str(uuid.uuid4())}
    body = CHAT | {"max_tokens": 20, "stream": stream}
    with house.client() as client:
        first, again = (client.post("/v1/messages", json=body, headers=headers) for _ in range(2))
        other = client.post("/v1/messages", json=body | {"max_tokens": 3}, headers=headers)

    assert (first.status_code, again.content) == (200, first.content) and len(upstream.requests) == 1
    assert again.headers["idempotent-replayed"] == "true"
    assert (other.status_code, other.json()["type"]) == (409, "error")


def test_the_same_request_may_be_written_differently(house: House, upstream: ScriptedUpstream, key: str) -> None:
    """Order of keys, whitespace, and options in headers or body: what is asked counts, not how it is written."""
    headers = {"authorization": f"Bearer {house.team_key}", "idempotency-key": key, "content-type": "application/json"}
    one = json.dumps(CHAT | {"seed": 1, "x-quality": 0.5}).encode()
    other = json.dumps({"seed": 1, **dict(reversed(CHAT.items()))}, indent=2).encode()
    with httpx.Client(base_url=house.url, headers=headers) as client:
        first = client.post(CHAT_URL, content=one)
        again = client.post(CHAT_URL, content=other, headers={"x-quality": "0.5"})

    assert first.status_code == 200 and again.content == first.content
    assert len(upstream.requests) == 1


@pytest.mark.parametrize(
    "change",
    [{"seed": 2}, {"stream": True}, {"headers": {"x-tier": "batch"}}, {"headers": {"x-max-cost-usd": "1"}}],
    ids=["seed", "stream", "tier", "max cost"],
)
def test_another_request_under_the_same_key_is_a_conflict(
    house: House, upstream: ScriptedUpstream, key: str, change: dict[str, Any]
) -> None:
    """409, in words that say so, and SDKs do not try again: nothing that they could send would be right."""
    ask(house, key)
    answer = ask(house, key, **change)
    error = json.loads(answer.body)["error"]

    assert (answer.status, error["type"], error["code"]) == (409, "invalid_request_error", "idempotency_key_reused")
    assert "Use a new key" in error["message"] and answer.headers["x-should-retry"] == "false"
    assert len(upstream.requests) == len(rows_of(house, key)) == 1


def test_other_teams_and_endpoints_have_keys_of_their_own(house: House, upstream: ScriptedUpstream, key: str) -> None:
    """A key means something to one team at one endpoint; nobody can ask for another's answer by it."""
    other_key = asyncio.run(make_team(house.settings, f"team_{uuid.uuid4().hex}"))
    mine = ask(house, key)
    theirs = ask(house, key, headers={"authorization": f"Bearer {other_key}"})
    elsewhere = ask(house, key, "/v1/completions", TEXT)

    assert (mine.status, theirs.status, elsewhere.status) == (200, 200, 200)
    assert len({got.headers["x-request-id"] for got in (mine, theirs, elsewhere)}) == 3
    assert len(upstream.requests) == len(rows_of(house, key)) == 3


@pytest.mark.parametrize("key", ["", "x" * 256, "schlüssel"], ids=["empty", "long", "not ASCII"])
def test_a_key_that_is_none_is_refused(house: House, key: str) -> None:
    """It is 1 to 255 characters of printable ASCII; anything else is a 400, never a call without its promise."""
    headers = {"authorization": f"Bearer {house.team_key}", "idempotency-key": key.encode()}
    answer = httpx.post(house.url + CHAT_URL, json=CHAT, headers=headers)

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "Idempotency-Key")


def test_a_replay_uses_no_limit(house: House, key: str) -> None:
    """With one request a minute, the same one may be repeated; the next other one is refused."""
    limits = LimitsInput(requests_per_minute=1)
    team_key = asyncio.run(make_team(house.settings, f"team_{uuid.uuid4().hex}", limits))
    headers = {"authorization": f"Bearer {team_key}"}
    got = [ask(house, key, headers=headers) for _ in range(4)]
    other = ask(house, key + " other", headers=headers)

    assert [one.status for one in got] == [200] * 4 and other.status == 429
    assert "x-ratelimit-remaining-requests" in got[0].headers
    assert "x-ratelimit-remaining-requests" not in got[1].headers  # what was left then says nothing now


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
def test_twenty_at_once_on_two_gateways_are_one_call(
    house: House, neighbour: str, upstream: ScriptedUpstream, key: str, stream: bool
) -> None:
    """One runs, nineteen wait for it, and all get the same bytes."""
    upstream.script("tokens=10,pace=0.03,first_token=0.2")
    with ThreadPoolExecutor(20) as pool:
        urls = [house.url, neighbour] * 10
        got = list(pool.map(lambda url: ask(house, key, base_url=url, stream=stream), urls))

    assert {one.status for one in got} == {200}
    assert len({one.body for one in got}) == len({one.headers["x-request-id"] for one in got}) == 1
    assert sum("idempotent-replayed" in one.headers for one in got) == 19
    assert len(upstream.requests) == len(rows_of(house, key)) == 1


def test_a_client_that_leaves_in_mid_stream_can_come_back(
    house: House, neighbour: str, upstream: ScriptedUpstream, key: str
) -> None:
    """The upstream runs to its end and is charged in full; the retry, on another gateway, gets all of it."""
    upstream.script("tokens=20,pace=0.06")
    headers = {"idempotency-key": key}
    with house.client() as client:
        with client.stream("POST", CHAT_URL, json=CHAT | STREAMED | {"user": key}, headers=headers) as answer:
            beginning = next(answer.iter_bytes())
    assert upstream.requests[0].tokens_sent < 20
    again = ask(house, key, body=CHAT | STREAMED, base_url=neighbour)

    assert again.body.startswith(beginning) and again.body.endswith(b"data: [DONE]\n\n")
    assert b'"completion_tokens":20' in again.body
    assert len(upstream.requests) == 1 and upstream.requests[0].closed_at is None
    assert [row[:2] for row in rows_of(house, key)] == [(answer.headers["x-request-id"], "answered")]


def test_a_client_that_loses_patience_can_come_back(house: House, upstream: ScriptedUpstream, key: str) -> None:
    """Before the first byte, too: the call goes on without it."""
    upstream.script("latency=0.6")
    body = CHAT | {"user": key}
    ask_and_leave(house, CHAT_URL, body, lambda: upstream.requests, **{"idempotency-key": key})
    again = ask(house, key)

    assert again.status == 200 and again.headers["idempotent-replayed"] == "true"
    assert len(upstream.requests) == len(rows_of(house, key)) == 1


def test_without_a_key_a_client_that_leaves_still_frees_its_upstream(house: House, upstream: ScriptedUpstream) -> None:
    """The promise to run to the end is for calls with a key alone."""
    upstream.script("tokens=50,pace=0.05")
    with house.client() as client:
        with client.stream("POST", CHAT_URL, json=CHAT | STREAMED) as answer:
            next(answer.iter_bytes())

    until(lambda: upstream.requests[0].closed_at)
    assert upstream.requests[0].tokens_sent < 50


def test_who_waits_for_a_call_that_fails_runs_it(house: House, upstream: ScriptedUpstream, key: str) -> None:
    """A failure is nobody's answer: the first hears of it, the second asks the upstream itself."""
    upstream.script("500,latency=0.4", times=1)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(ask, house, key)
        until(lambda: upstream.requests)
        second = pool.submit(ask, house, key)

    assert (first.result().status, second.result().status) == (502, 200)
    assert "idempotent-replayed" not in second.result().headers
    assert [row[1] for row in rows_of(house, key)] == ["failed", "answered"]


def test_a_refusal_is_not_stored(house: House, upstream: ScriptedUpstream, key: str) -> None:
    """A mistake may be put right under the same key, with another body: nothing was answered, nothing was paid."""
    refused = ask(house, key, model="no-such-model")
    answered = ask(house, key)

    assert (refused.status, answered.status) == (404, 200)


def test_a_broken_stream_is_not_stored_and_owes_nothing(house: House, upstream: ScriptedUpstream, key: str) -> None:
    """With a key a team pays for one whole answer: the part that it got before is the house's loss."""
    upstream.script("reset,after=3", times=1)
    broken = ask(house, key, body=CHAT | STREAMED)
    whole = ask(house, key, body=CHAT | STREAMED)

    assert b'"error"' in broken.body and not broken.body.endswith(b"[DONE]\n\n")
    assert whole.body.endswith(b"[DONE]\n\n") and b'"error"' not in whole.body
    rows = rows_of(house, key)
    assert [row[1] for row in rows] == ["superseded", "answered"]
    assert rows[0][2] == 0 < rows[1][2]


def test_a_stream_that_takes_all_the_time_of_its_call_is_charged(
    house: House, upstream: ScriptedUpstream, key: str
) -> None:
    """That is the call's own doing: as without a key, what was sent is owed, and the same key runs it again."""
    upstream.script("tokens=100,pace=0.05", times=1)
    broken = ask(house, key, body=CHAT | STREAMED)
    whole = ask(house, key, body=CHAT | STREAMED)

    assert b'"error"' in broken.body and whole.body.endswith(b"[DONE]\n\n")
    rows = rows_of(house, key)
    assert [row[1] for row in rows] == ["interrupted", "answered"]
    assert rows[0][2] >= 15 * 2000


def forget_answer(house: House, key: str, lease: float) -> None:
    """Make it look as if another gateway ran the call, last heard of so that its lease ends in ``lease`` seconds."""
    query = (
        "UPDATE idempotency SET status = NULL, answer = NULL, owner = 'another', request_id = $3,"
        " lease_until = clock_timestamp() + make_interval(secs => $2) WHERE key = $1"
    )
    sql(house, query, key, lease, "of another gateway")


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
def test_the_call_of_a_dead_gateway_is_taken_over(
    house: House, upstream: ScriptedUpstream, key: str, stream: bool
) -> None:
    """Whoever waited runs the call itself once the lease of the dead one has ended."""
    ask(house, key, stream=stream)
    forget_answer(house, key, lease=0.7)
    started = time.monotonic()
    got = ask(house, key, stream=stream)

    assert got.status == 200 and "idempotent-replayed" not in got.headers
    assert time.monotonic() - started > 0.6
    assert len(upstream.requests) == 2
    assert ask(house, key, stream=stream).body == got.body


def test_waiting_has_an_end(house: House, upstream: ScriptedUpstream, key: str) -> None:
    """Longer than an upstream may take in all, nobody waits: 409, and try again."""
    ask(house, key)
    forget_answer(house, key, lease=60)
    got = ask(house, key)

    assert (got.status, json.loads(got.body)["error"]["code"]) == (409, "idempotency_key_in_use")
    assert got.headers["retry-after"] == "1" and "x-should-retry" not in got.headers
    assert len(upstream.requests) == 1


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
def test_the_answer_of_a_gateway_that_was_believed_dead_does_not_count(
    house: House, upstream: ScriptedUpstream, key: str, stream: bool
) -> None:
    """Somebody took its call over while it slept: its own run is nobody's to pay, and its client is to ask again."""
    upstream.script("tokens=10,pace=0.05")
    with ThreadPoolExecutor(1) as pool:
        got = pool.submit(ask, house, key, stream=stream)
        until(lambda: upstream.requests)
        forget_answer(house, key, lease=0)
        late = got.result()
    again = ask(house, key, stream=stream)

    assert late.status == (200 if stream else 503)
    assert b"Idempotency-Key" in late.body and not late.body.endswith(b"[DONE]\n\n")
    assert again.status == 200 and again.headers["x-request-id"] != late.headers["x-request-id"]
    rows = rows_of(house, key)
    assert [row[1] for row in rows] == ["superseded" if stream else "failed", "answered"]
    assert rows[0][2] == 0


def test_an_answer_that_was_tampered_with_is_not_given_out(house: House, upstream: ScriptedUpstream, key: str) -> None:
    """Neither the changed bytes nor a second call that would be paid again: 500, once, and no retry."""
    ask(house, key)
    sql(house, "UPDATE idempotency SET answer = set_byte(answer, 50, 255 - get_byte(answer, 50)) WHERE key = $1", key)
    got = ask(house, key)

    assert (got.status, json.loads(got.body)["error"]["code"]) == (500, "idempotency_answer_unreadable")
    assert got.headers["x-should-retry"] == "false"
    assert len(upstream.requests) == 1


def test_no_answer_can_be_read_in_postgres(house: House, upstream: ScriptedUpstream, key: str) -> None:
    """Neither what was asked nor what was answered is in the table."""
    upstream.script("text=the quick brown fox")
    assert b"brown fox" in ask(house, key).body
    (row,) = sql(house, "SELECT * FROM idempotency WHERE key = $1", key)

    stored = b" ".join(value if isinstance(value, bytes) else str(value).encode() for value in row.values())
    assert b"fox" not in stored and b"Say something" not in stored and b"x-model-used" not in stored


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
def test_an_answer_too_long_to_keep_passes_through(
    house: House, upstream: ScriptedUpstream, key: str, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is delivered and paid like any other, and its key says so from then on: it neither runs nor pays again."""
    monkeypatch.setattr(reply_response, "LARGEST_KEPT", 400)
    upstream.script("tokens=40")
    first, second = (ask(house, key, stream=stream) for _ in range(2))

    error = json.loads(second.body)["error"]
    assert (first.status, second.status) == (200, 409) and len(first.body) > 400
    assert error["code"] == "idempotency_answer_not_kept" and first.headers["x-request-id"] in error["message"]
    assert second.headers["x-should-retry"] == "false"
    assert len(upstream.requests) == 1
    assert [(row[0], row[1]) for row in rows_of(house, key)] == [(first.headers["x-request-id"], "answered")]


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
def test_an_answer_too_long_to_keep_is_charged_though_its_client_left(
    house: House, upstream: ScriptedUpstream, key: str, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was produced to its end, as the key asks for: whoever hangs up at its last token pays for all of it."""
    monkeypatch.setattr(reply_response, "LARGEST_KEPT", 400)
    upstream.script("tokens=40,pace=0.005")
    body = CHAT | {"user": key, "stream": stream}
    ask_and_leave(house, CHAT_URL, body, lambda: upstream.requests, **{"idempotency-key": key})
    until(lambda: rows_of(house, key))

    (row,) = rows_of(house, key)
    assert row[1] == "answered" and row[2] > 40 * 2000
    assert ask(house, key, stream=stream).status == 409


def test_metrics_tell_what_became_of_calls_with_keys(house: House, key: str) -> None:
    """Run, replayed, refused for another body."""

    def counts() -> dict[str, float]:
        with house.client(house.admin_key) as admin:
            lines = [line for line in admin.get("/metrics").text.splitlines() if "idempotent_calls_total{" in line]
        return {line.split('"')[1]: float(line.split()[-1]) for line in lines}

    before = counts()
    for seed in (1, 1, 2):
        ask(house, key, seed=seed)
    after = counts()

    assert {name: after[name] - before.get(name, 0) for name in ("run", "replayed", "reused")} == {
        "run": 1,
        "replayed": 1,
        "reused": 1,
    }
