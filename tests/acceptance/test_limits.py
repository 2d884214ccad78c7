# A team's limits as its clients meet them: what is left, what is refused, and whether to try again.

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import httpx
import pytest
from openai import APIStatusError, AuthenticationError, OpenAI, PermissionDeniedError, RateLimitError

from gateway.accounts.schemas import LimitsInput
from router.prompt_size.bounds import WORTHWHILE
from tests.support.house import House, make_team
from tests.support.paying_team import PayingTeam
from tests.support.scripted_upstream import ScriptedUpstream
from tests.support.upstream_scripts import Script
from tests.support.waiting import until

ASK: dict[str, Any] = {"model": "small", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 100}


@pytest.fixture(autouse=True)
def _quiet(upstream: ScriptedUpstream) -> Iterator[None]:
    upstream.forget()
    yield
    upstream.forget()


def client_of(house: House, team: str, **limits: Any) -> OpenAI:
    """Return a stock client of a new team with limits; it retries as it does for everybody."""
    key = asyncio.run(make_team(house.settings, team, LimitsInput(**limits)))
    return OpenAI(base_url=house.url + "/v1", api_key=key)


def test_answers_say_what_is_left_of_the_minute(house: House) -> None:
    """The x-ratelimit headers count down with every call."""
    client = client_of(house, "counted", requests_per_minute=10, tokens_per_minute=100_000)
    first = client.chat.completions.with_raw_response.create(**ASK).headers
    second = client.chat.completions.with_raw_response.create(**ASK).headers

    assert first["x-ratelimit-limit-requests"] == "10"
    assert int(first["x-ratelimit-remaining-requests"]) - int(second["x-ratelimit-remaining-requests"]) == 1
    assert int(first["x-ratelimit-remaining-tokens"]) < 100_000
    assert first["x-ratelimit-reset-requests"][-1] == "s"


def test_anthropics_clients_hear_it_in_their_own_headers(house: House) -> None:
    """anthropic-ratelimit headers, on answers and refusals, with moments where OpenAI has durations."""
    key = asyncio.run(make_team(house.settings, "counted_too", LimitsInput(requests_per_minute=2)))
    body = {"model": "small", "max_tokens": 5, "messages": [{"role": "user", "content": "Hi."}]}
    with house.client(key) as client:
        first, _, refused = [client.post("/v1/messages", json=body) for _ in range(3)]
    reset = datetime.strptime(first.headers["anthropic-ratelimit-requests-reset"], "%Y-%m-%dT%H:%M:%S%z")

    assert [answer.status_code for answer in (first, refused)] == [200, 429]
    assert first.headers["anthropic-ratelimit-requests-limit"] == "2"
    assert refused.headers["anthropic-ratelimit-requests-remaining"] == "0"
    assert -5 < (reset - datetime.now(UTC)).total_seconds() <= 62
    assert refused.json()["error"]["type"] == "rate_limit_error" and int(refused.headers["retry-after"]) >= 1


def test_a_full_minute_is_a_429_with_the_buckets_own_wait(house: House) -> None:
    """Past requests_per_minute: rate_limit_exceeded, retry-after within the minute, and headers that say why."""
    client = client_of(house, "hasty", requests_per_minute=2).with_options(max_retries=0)
    for _ in range(2):
        client.chat.completions.create(**ASK)
    with pytest.raises(RateLimitError) as caught:
        client.chat.completions.create(**ASK)
    headers = caught.value.response.headers

    assert caught.value.code == "rate_limit_exceeded"
    assert 1 <= int(headers["retry-after"]) <= 60
    assert headers["x-ratelimit-remaining-requests"] == "0"


def test_a_spent_budget_is_insufficient_quota_and_no_sdk_retries(house: House, upstream: ScriptedUpstream) -> None:
    """What is settled leaves no room: 429 insufficient_quota, and x-should-retry stops the SDK's own retries."""
    client = client_of(house, "spent", usd_per_day=Decimal("0.001"))
    upstream.script("tokens=100")
    with pytest.raises(RateLimitError) as caught:
        for _ in range(20):
            client.chat.completions.create(**ASK)
    asked = len(upstream.requests)

    assert caught.value.code == "insufficient_quota"
    assert caught.value.response.headers["x-should-retry"] == "false"
    assert caught.value.response.request.headers["x-stainless-retry-count"] == "0"
    assert 2 <= asked < 20


def test_operators_see_who_is_refused_and_by_which_limit(house: House) -> None:
    """Refusals have no row; a metric tells whose they are, why, and which limit of team or key had no room."""
    poor = asyncio.run(make_team(house.settings, "seen_poor", LimitsInput(usd_per_day=Decimal("0.000000001"))))
    asyncio.run(make_team(house.settings, "seen_closed"))
    with house.client(house.admin_key) as admin:
        named = {"team_id": "seen_closed", "limits": {"requests_per_minute": 0}}
        closed = admin.post("/admin/keys", json=named).raise_for_status().json()["key"]
        for key, body in ((poor, ASK), (closed, ASK), (closed, ASK), (poor, {"model": "none"}), ("tg-wrong", ASK)):
            with house.client(key) as client:
                client.post("/v1/chat/completions", json=body)
        told = [line for line in admin.get("/metrics").text.splitlines() if line.startswith("tollgate_refused_total")]

    assert sorted(line.partition("{")[2] for line in told if 'team="seen_' in line) == [
        'code="insufficient_quota",limit="key.requests_per_minute",team="seen_closed"} 2.0',
        'code="missing_required_parameter",limit="",team="seen_poor"} 1.0',
        'code="rate_limit_exceeded",limit="team.usd_per_day",team="seen_poor"} 1.0',
    ]
    assert any('code="invalid_api_key",limit="",team=""' in line for line in told)


def test_a_request_that_alone_exceeds_a_limit_is_told_to_ask_for_less(house: House) -> None:
    """No waiting helps: the refusal names max_tokens and forbids the retry."""
    client = client_of(house, "greedy", tokens_per_minute=500)
    with pytest.raises(RateLimitError) as caught:
        client.chat.completions.create(**{**ASK, "max_tokens": 1000})

    assert caught.value.param == "max_tokens"
    assert "max_tokens" in caught.value.message
    assert caught.value.response.headers["x-should-retry"] == "false"


@pytest.mark.parametrize("streams", [False, True])
def test_a_small_budget_answers_who_names_no_limit(house: House, upstream: ScriptedUpstream, streams: bool) -> None:
    """The upstream is told the limit that the budget holds, and the caller which one that was: no cap is passed."""
    cap = Decimal("0.002")  # the model's own 1,024 tokens would come to $0.002048
    client = client_of(house, f"small-budget-{streams}".lower(), usd_per_day=cap)
    ask = {**ASK, "stream": streams}
    del ask["max_tokens"]
    upstream.script("tokens=5")
    with client.chat.completions.with_streaming_response.create(**ask) as response:
        response.read()
    [seen] = upstream.requests
    assert seen.body is not None
    told = seen.body["max_tokens"]

    assert WORTHWHILE <= told < 1_024
    assert response.headers["x-tollgate-max-tokens"] == str(told)
    assert 2 * told < 2_000 < 2 * (told + 200)  # millionths of a dollar; the rest is the prompt's


def test_a_stream_says_what_is_left_too(house: House) -> None:
    """The headers of a streamed answer are those of a whole one."""
    client = client_of(house, "streamed", requests_per_minute=10, tokens_per_minute=100_000)
    with client.chat.completions.with_streaming_response.create(**ASK, stream=True) as response:
        headers = response.headers

    assert (headers["x-ratelimit-limit-requests"], headers["x-ratelimit-remaining-requests"]) == ("10", "9")
    assert 99_000 < int(headers["x-ratelimit-remaining-tokens"]) < 100_000


def test_what_a_call_did_not_use_is_room_for_the_next(house: House) -> None:
    """Calls are held at their most and settled at what they used: a minute's tokens last for many small answers."""
    client = client_of(house, "thrifty", tokens_per_minute=1_000).with_options(max_retries=0)
    used = [client.chat.completions.create(**ASK).usage for _ in range(12)]
    most = 1_000 - int(client.chat.completions.with_raw_response.create(**ASK).headers["x-ratelimit-remaining-tokens"])

    total = sum(usage.total_tokens for usage in used if usage is not None)
    held = most - total

    assert total < 1_000 < 12 * held  # without refunds, the minute would have been full before


def test_an_sdk_waits_for_a_place_and_gets_it(house: House, upstream: ScriptedUpstream) -> None:
    """Room taken by a running call: rate_limit_exceeded, and the stock client is back after the second it is told."""
    client = client_of(house, "queueing", concurrent_requests=1)
    upstream.script("hang,after=1", times=1)
    with ThreadPoolExecutor(1) as elsewhere:
        with client.chat.completions.create(**ASK, stream=True) as running:
            next(iter(running))
            began = time.monotonic()
            waiting = elsewhere.submit(client.chat.completions.with_raw_response.create, **ASK)
            until(lambda: _refusals(house, "queueing") > 0)
        answer = waiting.result()
        waited = time.monotonic() - began

    assert int(answer.http_request.headers["x-stainless-retry-count"]) >= 1
    assert waited >= 1.0
    assert len(upstream.requests) == 2  # the refused tries reached nobody


def test_a_key_has_its_own_tighter_limit(house: House) -> None:
    """What stops one key of a team does not stop another."""
    asyncio.run(make_team(house.settings, "shared", LimitsInput(requests_per_minute=100)))
    with house.client(house.admin_key) as admin:
        tight, free = (
            admin.post("/admin/keys", json={"team_id": "shared", "limits": limits}).raise_for_status().json()["key"]
            for limits in ({"requests_per_minute": 1}, None)
        )
    with house.client(tight) as mine, house.client(free) as yours:
        statuses = [client.post("/v1/chat/completions", json=ASK).status_code for client in (mine, mine, yours, yours)]
        refused = mine.post("/v1/chat/completions", json=ASK)

    assert statuses == [200, 429, 200, 200]
    assert "of this key" in refused.json()["error"]["message"]
    assert refused.headers["x-ratelimit-limit-requests"] == "1"


def test_a_refused_call_uses_nothing_up_and_has_no_row(house: House, upstream: ScriptedUpstream) -> None:
    """Asking in vain costs neither requests nor tokens, whichever limit refused; no upstream hears of it."""
    client = client_of(house, "vain", requests_per_minute=5, tokens_per_minute=500).with_options(max_retries=0)
    for _ in range(20):
        with pytest.raises(RateLimitError):
            client.chat.completions.create(**{**ASK, "max_tokens": 900})
    answers = [client.chat.completions.with_raw_response.create(**ASK) for _ in range(2)]
    with house.client(house.admin_key) as admin:
        until(lambda: _requests_of(admin, "vain") == 2)

    assert [answer.headers["x-ratelimit-remaining-requests"] for answer in answers] == ["4", "3"]
    assert len(upstream.requests) == 2


@pytest.mark.parametrize("streams", [False, True])
def test_an_upstream_that_bills_beyond_its_limits_is_charged_in_full(
    house: House, upstream: ScriptedUpstream, streams: bool
) -> None:
    """The hold is no ceiling on what is owed: the overrun is booked whole, counted, and stops the next call."""
    team = f"overrun-{streams}".lower()
    client = client_of(house, team, usd_per_day=Decimal("0.05")).with_options(max_retries=0)
    before = _exceeded(house)
    upstream.script("tokens=10,reasoning_tokens=50000", times=1)
    if streams:
        [*_, last] = client.chat.completions.create(**ASK, stream=True, stream_options={"include_usage": True})
        usage = last.usage
    else:
        usage = client.chat.completions.create(**ASK).usage
    until(lambda: _exceeded(house) == before + 1)
    with pytest.raises(RateLimitError) as caught:
        client.chat.completions.create(**ASK)
    with house.client(house.admin_key) as admin:
        until(lambda: _requests_of(admin, team) == 1)
        charged = admin.get("/v1/usage", params={"team_id": team}).json()

    assert usage is not None and usage.completion_tokens == 50_010
    assert caught.value.code == "insufficient_quota"
    assert charged["output_tokens"] == 50_010
    # $1 a million in, $2 a million out
    assert Decimal(str(charged["cost_usd"])) == Decimal(usage.prompt_tokens + 2 * 50_010) / 1_000_000


@pytest.mark.parametrize("script", ["wrong-usage", "cached_tokens=1000000"])
def test_absurd_counts_of_an_upstream_never_corrupt_money(
    house: House, upstream: ScriptedUpstream, script: str
) -> None:
    """Negative counts, or more cached tokens than there were: the call costs what it must have, never less than 0."""
    team = script.partition("=")[0].replace("_", "-")
    client = client_of(house, team, usd_per_day=Decimal("0.05")).with_options(max_retries=0)
    upstream.script(script)
    for _ in range(3):
        client.chat.completions.create(**ASK)
    with house.client(house.admin_key) as admin:
        until(lambda: _requests_of(admin, team) == 3)
        charged = admin.get("/v1/usage", params={"team_id": team}).json()

    assert 0 < charged["cost_usd"] < 0.001
    assert 0 <= charged["cached_input_tokens"] <= charged["input_tokens"] < 1_000


def test_a_suspended_team_and_a_revoked_key_are_no_matter_of_limits(house: House) -> None:
    """403 team_suspended and 401 invalid_api_key, without a word of limits or of waiting."""
    client = client_of(house, "naughty", requests_per_minute=1).with_options(max_retries=0)
    client.chat.completions.create(**ASK)
    with house.client(house.admin_key) as admin:
        admin.patch("/admin/teams/naughty", json={"suspended": True}).raise_for_status()
        until(lambda: isinstance(_refused(client), PermissionDeniedError))
        suspended = _refused(client)
        [key] = admin.get("/admin/keys", params={"team_id": "naughty"}).json()["data"]
        admin.delete(f"/admin/keys/{key['key_id']}").raise_for_status()
        until(lambda: isinstance(_refused(client), AuthenticationError))
        revoked = _refused(client)

    assert (suspended.code, revoked.code) == ("team_suspended", "invalid_api_key")
    for refused in (suspended, revoked):
        assert not {"retry-after", "x-ratelimit-limit-requests"} & refused.response.headers.keys()


def test_a_call_that_ends_gives_its_place_to_the_next(house: House, upstream: ScriptedUpstream) -> None:
    """concurrent_requests counts running calls only: ten in a row pass where one at a time may run."""
    client = client_of(house, "single", concurrent_requests=1).with_options(max_retries=0)
    for _ in range(10):
        client.chat.completions.create(**ASK)

    assert len(upstream.requests) >= 10


def test_a_team_may_use_only_its_models(house: House) -> None:
    """A model that exists but is not the team's is a 403, and is not in its list."""
    with house.client(house.admin_key) as admin:
        admin.post("/admin/teams", json={"id": "narrow", "allowed_models": ["small"]}).raise_for_status()
        key = admin.post("/admin/keys", json={"team_id": "narrow"}).raise_for_status().json()["key"]
    with house.client(key) as client:
        refused = client.post("/v1/chat/completions", json={**ASK, "model": "large"})
        names = [model["id"] for model in client.get("/v1/models").json()["data"]]

    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "model_not_allowed")
    assert "small" in names and "large" not in names


def test_a_team_finds_out_no_model_but_its_own(house: House) -> None:
    """A name that is not the team's and one that is none are answered alike, and nothing else names a model."""
    with house.client(house.admin_key) as admin:
        admin.post("/admin/teams", json={"id": "curious", "allowed_models": ["small"]}).raise_for_status()
        key = admin.post("/admin/keys", json={"team_id": "curious"}).raise_for_status().json()["key"]
    turn = {"max_tokens": 5, "messages": [{"role": "user", "content": "Hi."}]}
    paths = ("/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens", "/v1/route")
    others = ("large", "claude", "old-name", "nope")
    with house.client(key) as client:
        asked = [[client.post(path, json={"model": name, **turn}) for name in others] for path in paths]
        asked.append([client.get("/v1/usage", params={"compare": name}) for name in others])
        asked.append([client.get(f"/v1/models/{name}") for name in others])
        asked.append([client.get("/v1/route/curve", params={"route": name}) for name in others])
        own = client.get("/v1/usage", params={"compare": "small"})
        route = client.post("/v1/route", json={"model": "auto", **turn})
        saved = client.get("/v1/usage", params={"analysis": "true"})

    for answers in asked:
        said = {
            answer.text.replace(name, "NAME").replace(answer.headers["x-request-id"], "ID")
            for name, answer in zip(others, answers, strict=True)
        }
        assert len(said) == 1 and len({answer.status_code for answer in answers}) == 1, said
    assert {answer.status_code for answers in asked for answer in answers} == {400, 403, 404}
    assert own.json()["analysis"]["compare"]["model"] == "small"
    for answer in (own, route, saved, *(answers[-1] for answers in asked)):
        text = answer.text.replace("large_cost_usd", "")
        assert not any(name in text for name in ("large", "claude", "old-name")), text


def test_a_question_about_a_call_counts_as_a_request_and_a_prompt_counted_does_not(house: House) -> None:
    """Neither costs anything or leaves a row; the first says what is left of the minute."""
    path = "/v1/route"
    key = asyncio.run(make_team(house.settings, "asks_route", LimitsInput(requests_per_minute=2)))
    body = {"model": "small", "max_tokens": 5, "messages": [{"role": "user", "content": "Hi."}]}
    with house.client(key) as client:
        first, _, refused = [client.post(path, json=body) for _ in range(3)]
        counted = client.post("/v1/messages/count_tokens", json=body)
        usage = client.get("/v1/usage").json()

    assert counted.status_code == 200
    assert (first.status_code, first.headers["x-ratelimit-remaining-requests"]) == (200, "1")
    assert (refused.status_code, refused.json()["error"]["type"]) == (429, "rate_limit_error")
    assert int(refused.headers["retry-after"]) >= 1
    assert (usage["requests"], usage["cost_usd"]) == (0, 0)


def _refused(client: OpenAI) -> APIStatusError:
    with pytest.raises(APIStatusError) as caught:
        client.chat.completions.create(**ASK)
    return caught.value


def _requests_of(admin: httpx.Client, team: str) -> int:
    return admin.get("/v1/usage", params={"team_id": team}).raise_for_status().json()["requests"]


def _exceeded(house: House) -> float:
    with house.client(house.admin_key) as admin:
        text = admin.get("/metrics").raise_for_status().text
    return float(text.split("\ntollgate_hold_exceeded_total ")[1].split()[0])


def _refusals(house: House, team: str) -> float:
    with house.client(house.admin_key) as admin:
        lines = admin.get("/metrics").raise_for_status().text.splitlines()
    mine = [line for line in lines if line.startswith("tollgate_refused_total{") and f'team="{team}"' in line]
    return sum(float(line.rsplit(" ", 1)[1]) for line in mine)


def test_a_model_whose_own_limit_is_spent_leaves_the_routes_of_its_team(
    house: House, upstream: ScriptedUpstream
) -> None:
    """Asked by name it is refused, and told which limit and when it opens; a route with another model goes there, and
    the row says why. The team sees what is used and left of it."""
    key = asyncio.run(make_team(house.settings, "by_model"))
    upstream.script("tokens=100")
    with house.client(house.admin_key) as admin, house.client(key) as client:
        wrong = admin.patch("/admin/teams/by_model", json={"model_limits": {"old-name": {"usd_per_day": 1}}})
        limits = {"usd_per_day": Decimal("0.001"), "usd_per_month": 5}
        body = {"model_limits": {"small": {name: float(limit) for name, limit in limits.items()}}}
        changed = admin.patch("/admin/teams/by_model", json=body).raise_for_status().json()
        refused = until(lambda: next((one for one in [_ask(client, "small")] if "x-should-retry" in one.headers), None))
        elsewhere, auto = _ask(client, "large"), _ask(client, "auto")
        row = house.record_of(auto)  # and so are those before it
        seen = client.get("/v1/team").json()

    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "model_limits.old-name"
    assert changed["model_limits"] == {"small": {"tokens_per_day": None, "usd_per_day": 0.001, "usd_per_month": 5}}
    error = refused.json()["error"]
    assert (refused.status_code, error["code"]) == (429, "insufficient_quota")
    assert "limit of $0.001 per day (UTC) of team by_model for small" in error["message"]
    assert "opens again at 00:00 UTC" in error["message"]
    assert (elsewhere.status_code, auto.status_code) == (200, 200)
    assert (row["model_used"], [attempt["outcome"] for attempt in row["attempts"]]) == ("large", ["team_limit", "ok"])
    assert seen["model_limits"] == changed["model_limits"]
    of_day = seen["model_budgets"]["small"]["usd_today"]
    assert 0 < of_day["used"] <= 0.001 and seen["limits"]["usd_per_day"] is None


def test_what_running_calls_hold_is_told_apart_from_what_is_left(house: House, upstream: ScriptedUpstream) -> None:
    """A call holds what it may cost at the most, and nothing once it is booked: what its gateway has drawn ahead is
    left, not held."""
    team = PayingTeam(house, usd_per_day=5)
    body = {"model": "small", "max_tokens": 500, "messages": [{"role": "user", "content": "Hello"}], "stream": True}
    upstream.script(Script(tokens=4, pace=0.7), times=1)
    with house.client(team.key) as client:
        today = lambda: client.get("/v1/team").json()["budgets"]["usd_today"]  # noqa: E731
        with client.stream("POST", "/v1/chat/completions", json=body) as running:
            while_it_runs = until(lambda: (seen := today())["held"] and seen)
            running.read()
        row = house.record_of(running)
        after = until(lambda: (seen := today())["held"] == 0 and seen)

    held = Decimal(str(row["held_nanousd"])) / 10**9
    assert (while_it_runs["used"], Decimal(str(while_it_runs["held"]))) == (0, held)
    assert Decimal(str(while_it_runs["left"])) == 5 - held
    cost = Decimal(str(row["cost_usd"]))
    assert 0 < cost < held and (Decimal(str(after["used"])), Decimal(str(after["left"]))) == (cost, 5 - cost)


def test_an_end_user_and_a_tag_whose_limits_are_spent_are_refused(house: House, upstream: ScriptedUpstream) -> None:
    """Others go on, in OpenAI's shape and in Anthropic's; a call that names no end user is told to; no audit log has
    their names."""
    key = asyncio.run(make_team(house.settings, "by_user"))
    upstream.script("tokens=100")
    with house.client(house.admin_key) as admin, house.client(key) as client:
        body = {"user_limits": {"*": {"usd_per_day": 0.001}}, "tag_limits": {"agent=research": {"usd_per_day": 0}}}
        changed = admin.patch("/admin/teams/by_user", json=body).raise_for_status().json()
        admin.patch("/admin/teams/by_user", json={"user_limits": {"ann": {"usd_per_day": 5}}}).raise_for_status()
        log = admin.get("/admin/audit-log", params={"team_id": "by_user"}).json()["data"]

        def ask(**fields: object) -> httpx.Response:
            return client.post("/v1/chat/completions", json={**ASK, "model": "small", **fields})

        def spent() -> httpx.Response | None:
            bobs.append(answered := ask(safety_identifier="bob"))
            return answered if answered.status_code == 429 and "x-should-retry" in answered.headers else None

        bobs: list[httpx.Response] = []
        refused = until(spent)
        unnamed, ann, tagged = ask(), ask(user="ann"), ask(user="ann", metadata={"agent": "research"})
        other = ask(user="ann", metadata={"agent": "support"})
        message = {"model": "small", "max_tokens": 5, "messages": [{"role": "user", "content": "Hello"}]}
        spoken = client.post("/v1/messages", json={**message, "metadata": {"user_id": "bob"}})
        row, of_bob = house.record_of(ann), [house.record_of(one)["held_scopes"] for one in (bobs[0], spoken)]
        seen = client.get("/v1/team").json()
        path = "/admin/teams/by_user/value-budgets"
        pages = [admin.get(path, params={"limit": 1}).json()]
        pages.append(admin.get(path, params={"after": pages[0]["data"][0]["id"]}).json())
        of_ann = admin.get(path, params={"name": "ann"}).json()["data"]
        wrong = admin.get(path, params={"of": "metadata:none"}).json()["error"]["message"]
        of_tags = admin.get(path, params={"of": "metadata:agent"}).json()["data"]

    assert [(len(page["data"]), page["has_more"]) for page in pages] == [(1, True), (1, False)]
    assert {one["name"] for page in pages for one in page["data"]} == {None, "ann"}
    today = of_ann[0]["budgets"]["usd_today"]
    assert len(of_ann) == 1 and 0 < 5 - today["left"] < 0.01 and today["used"] > 0
    assert "user, metadata:agent" in wrong and [one["name"] for one in of_tags] == ["agent=research"]
    error = refused.json()["error"]
    assert error["code"] == "insufficient_quota" and "opens again at 00:00 UTC" in error["message"]
    assert "limit of $0.001 per day (UTC) of team by_user for this end user" in error["message"]
    assert (unnamed.status_code, unnamed.json()["error"]["param"]) == (400, "user")
    assert (ann.status_code, other.status_code, tagged.status_code, spoken.status_code) == (200, 200, 429, 200)
    assert "for this value of 'agent' in metadata lets nothing through" in tagged.json()["error"]["message"]
    assert of_bob[0] == of_bob[1] != row["held_scopes"]
    assert row["user_tag"] == "ann" and len(row["held_scopes"]) == 1 and "ann" not in row["held_scopes"][0]
    assert set(seen["user_limits"]) == {"*", "ann"} and changed["tag_limits"]["agent=research"]["usd_per_day"] == 0
    assert "ann" not in str([entry["details"] for entry in log])


def _ask(client: httpx.Client, model: str) -> httpx.Response:
    return client.post("/v1/chat/completions", json={**ASK, "model": model})
