# A refused call leaves one line in the log, whatever refuses it.

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs

from gateway.accounts.schemas import LimitsInput
from gateway.core.keys import new_key
from gateway.telemetry import refusals
from tests.support.house import House, make_team
from tests.support.scripted_upstream import ScriptedUpstream
from tests.support.servers import execute
from tests.support.waiting import until

SAID = "a-secret-that-a-user-wrote"
CHAT = "/v1/chat/completions"
ASK: dict[str, Any] = {"model": "small", "messages": [{"role": "user", "content": SAID}], "max_tokens": 100}
LONG = [{"role": "user", "content": SAID + " hello" * 20_000}]


@pytest.fixture(scope="module")
def keys(house: House) -> dict[str, str]:
    """Keys of teams that are near one limit or another."""
    limits = {
        "minute": LimitsInput(requests_per_minute=0),
        "day": LimitsInput(usd_per_day=0),
        "small": LimitsInput(tokens_per_day=10),
        "plain": LimitsInput(),
    }
    return {name: asyncio.run(make_team(house.settings, f"refused_{name}", one)) for name, one in limits.items()}


@pytest.fixture(autouse=True)
def _quiet(upstream: ScriptedUpstream) -> Iterator[None]:
    upstream.forget()
    yield
    upstream.forget()


def line_of(house: House, key: str, path: str = CHAT, **said: Any) -> tuple[httpx.Response, dict[str, Any]]:
    """Send a call and return its answer, and the one line that the log has of it."""
    with capture_logs() as logs, house.client(key) as client:
        answer = client.post(path, **said)
    assert answer.status_code >= 400, answer.text
    [line] = [one for one in logs if one.get("request_id") == answer.headers["x-request-id"]]
    assert SAID not in str(logs) and key not in str(logs)
    return answer, dict(line)


@pytest.mark.parametrize(
    ("team", "path", "said", "status", "code", "model", "limit"),
    [
        ("minute", CHAT, {"json": ASK}, 429, "insufficient_quota", "small", "team.requests_per_minute"),
        ("day", CHAT, {"json": {**ASK, "stream": True}}, 429, "insufficient_quota", "small", "team.usd_per_day"),
        ("small", "/v1/messages", {"json": ASK}, 429, "rate_limit_exceeded", "small", "team.tokens_per_day"),
        ("plain", CHAT, {"json": {**ASK, "model": "nothing"}}, 404, "model_not_found", "unknown", None),
        ("plain", CHAT, {"json": {**ASK, "temperature": 9}}, 400, "invalid_value", "small", None),
        ("plain", CHAT, {"json": {**ASK, "messages": LONG}}, 400, "context_length_exceeded", "small", None),
        ("plain", CHAT, {"json": {**ASK, "prediction": {}}}, 400, "unsupported_parameter", "small", None),
        ("plain", CHAT, {"content": b'{"model": "' + SAID.encode()}, 400, "invalid_json", None, None),
        ("plain", "/v1/messages", {"json": {**ASK, "temperature": 9}}, 400, "invalid_value", "small", None),
        ("plain", CHAT, {"json": ASK, "headers": {"x-team-id": "x"}}, 403, "permission_denied", None, None),
        ("plain", "/v1/nothing", {"json": ASK}, 404, "unknown_url", None, None),
        ("plain", CHAT, {"content": b" " * (32 * 2**20 + 1)}, 413, "request_too_large", None, None),
    ],
)
def test_a_refused_call_is_in_the_log(
    house: House,
    keys: dict[str, str],
    team: str,
    path: str,
    said: dict[str, Any],
    status: int,
    code: str,
    model: str | None,
    limit: str | None,
) -> None:
    """One line: the answer's request id, the team and its key, the model, status, code and limit; none of its words."""
    answer, line = line_of(house, keys[team], path, **said)

    assert answer.status_code == line["status"] == status
    assert (line["event"], line["code"], line["model"], line.get("limit")) == ("call_refused", code, model, limit)
    if path != "/v1/nothing":  # where no guard asked who it is
        assert line["team"] == f"refused_{team}" and line["key"].startswith("key_")
        assert line["endpoint"] == path


def test_no_word_of_a_request_is_kept(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it stands in it; and each refusal tells what would have been right."""
    monkeypatch.setattr(refusals, "ALIKE", 1000)
    key = asyncio.run(make_team(house.settings, "refused_wherever"))
    with house.client(key) as client:
        answers = [client.post(CHAT, json={**ASK, **each}) for each in CHATS]
        answers += [client.post(CHAT, json=ASK, headers={each: SAID}) for each in HEADERS]
        answers += [client.post(CHAT, content=b'{"%b": 1, "%b": 2}' % (SAID.encode(), SAID.encode()))]
        answers += [client.post(f"/v1/{path}", json={"model": "small", **each}) for path, each in OTHERS]
        wrong = [answer.headers["x-request-id"] for answer in answers if answer.status_code >= 400]
        until(lambda: len(client.get("/v1/calls", params={"limit": 200}).json()["data"]) >= len(wrong))
        page = client.get("/v1/calls", params={"limit": 200, "status": "refused"})

    assert len(wrong) > 45 and SAID not in page.text
    told = {call["request_id"]: call for call in page.json()["data"]}
    assert {told[each]["code"] for each in wrong if each in told and told[each]["advice"] is None} == set()
    assert sum(call["message"] is None for call in told.values()) < 10  # most tell more than the code's advice


def message(**said: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Hi.", **said}]}


CHATS: list[dict[str, Any]] = [
    *({name: SAID} for name in ("model", "messages", "temperature", "n", "tools", "response_format", "stop_token_ids")),
    *({name: SAID} for name in ("tool_choice", "service_tier", "modalities", "prediction", "reasoning_effort", "seed")),
    *(
        {name: SAID}
        for name in ("stream", "stream_options", "audio", "provider", "logit_bias", "cache", "mock_response")
    ),
    *({name: [SAID]} for name in ("models", "plugins", "transforms", "messages", "tools")),
    *({name: {SAID: SAID}} for name in ("logit_bias", "response_format", "cache", "provider", "audio", "thinking")),
    *({"response_format": {"type": SAID}}, {"tools": [{"type": SAID}]}, {"metadata": {SAID: 5}}, {"user": SAID * 50}),
    *({"metadata": {SAID * 9: "x"}}, {"stop": [SAID] * 50}, {"provider": {"order": [SAID]}}, {"modalities": [SAID]}),
    *(message(role=SAID), message(content=[{"type": SAID}]), message(role="tool", tool_call_id=SAID, content=SAID)),
    message(content=[{"type": "image_url", "image_url": {"url": SAID}}]),
    message(content=[{"type": "file", "file": {"file_id": SAID}}]),
    message(role="assistant", tool_calls=[{"id": SAID, "type": SAID, "function": {"name": SAID, "arguments": SAID}}]),
]
HEADERS = ("x-tier", "x-quality", "x-max-cost-usd", "x-team-id", "x-deadline-ms", "x-route", "x-safety")
OTHERS: list[tuple[str, dict[str, Any]]] = [
    *(("messages", {"messages": SAID}), ("messages", {"max_tokens": 5, **message(role=SAID)})),
    *(("messages", {"max_tokens": 5, **message(), "tools": [{"type": SAID, "name": SAID}]}),),
    *(("responses", {"input": [{"type": SAID}]}), ("responses", {"input": "x", "tools": [{"type": SAID}]})),
    *(("responses", {"input": "x", "previous_response_id": SAID}), ("responses", {"input": "x", "include": SAID})),
    *(("responses", {"input": "x", "conversation": SAID}), ("responses", {"input": [{"role": SAID, "content": "x"}]})),
    *(("embeddings", {"input": {SAID: 1}}), ("embeddings", {"input": "x", "encoding_format": SAID})),
    *(("completions", {"prompt": {SAID: 1}}), ("completions", {"prompt": "x", "suffix": [SAID]})),
    *(("rerank", {"query": SAID, "documents": SAID}), ("images/generations", {"prompt": SAID, "size": SAID})),
]


def test_an_unknown_key_is_in_the_log(house: House) -> None:
    """401 has no team: the address and the beginning of the key that people may see."""
    _, line = line_of(house, "tg-abcdefgh" + "x" * 35, json=ASK)

    assert (line["event"], line["status"], line["code"]) == ("call_refused", 401, "invalid_api_key")
    assert (line["address"], line["key_prefix"]) == ("127.0.0.1", "tg-abcdefgh")


@pytest.mark.parametrize(("script", "status", "outcome"), [("500", 502, "status_500"), ("400", 400, "refused")])
def test_a_failed_call_is_in_the_log(
    house: House, upstream: ScriptedUpstream, keys: dict[str, str], script: str, status: int, outcome: str
) -> None:
    """What an upstream did is told apart from what the gateway refuses, once, by the word of its attempts."""
    upstream.script(script)
    _, line = line_of(house, keys["plain"], json=ASK)

    assert (line["event"], line["status"], line["outcome"]) == ("call_failed", status, outcome)
    assert (line["team"], line["model"]) == ("refused_plain", "small")


def test_a_schema_that_is_too_old_is_no_database_that_is_away(house: House, caplog: pytest.LogCaptureFixture) -> None:
    """Nor worth another try: a 500, and once in the log what helps. Teams without budgets go on."""
    limits = {"with_a_budget": LimitsInput(usd_per_day=1), "without_budgets": LimitsInput()}
    budget, free = (asyncio.run(make_team(house.settings, *each)) for each in limits.items())
    column, function = "TABLE api_keys RENAME COLUMN {} TO {}", "FUNCTION take_room RENAME TO {1}"
    answers, lines = [], []
    taken = function, ("take_room", "gone")
    for key, what, names in ((new_key(), column, ("cache", "gone")), (budget, *taken), (free, *taken)):
        with capture_logs() as logs, house.client(key) as client:
            if what == function:
                client.get("/v1/models")  # it is known before
            try:
                asyncio.run(execute(house.settings.database_url, f"ALTER {what.format(*names)}"))
                answers.append(client.post(CHAT, json=ASK))
            finally:
                back = what.replace("FUNCTION take_room", "FUNCTION gone").format(*names[::-1])
                asyncio.run(execute(house.settings.database_url, f"ALTER {back}"))
        lines += [one for one in logs if one["event"] == "unexpected_error"]

    gc.collect()  # tells of errors that no task's maker has heard
    assert [answer.status_code for answer in answers] == [500, 500, 200]
    assert [answer.json()["error"]["code"] for answer in answers[:2]] == [None] * 2
    assert not [one for one in caplog.records if one.name == "asyncio"]
    assert [line["remedy"] for line in lines] == ["run `tollgate migrate`"] * 2
    assert "UndefinedColumn" in repr(lines[0]["exc_info"].__cause__) and "take_room" in repr(lines[1]["exc_info"])
