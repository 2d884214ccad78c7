# Answers from the cache, by real calls: who gets one and who does not, what it costs, what is told of it, and what
# becomes of it when the policy changes, Redis goes, or room is short.

from __future__ import annotations

import asyncio
import json
import re
import uuid
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis
from msgspec.structs import replace

from gateway.accounts.schemas import LimitsInput
from gateway.cache import store
from gateway.core.settings import CacheSettings, Safety
from tests.support.house import House, make_team, serving
from tests.support.redis_proxy import RedisProxy, Way
from tests.support.scripted_upstream import ScriptedUpstream
from tests.support.upstream_scripts import Script
from tests.support.waiting import until

ON, ALL = {"x-cache": "on"}, {"x-cache": "all"}
CHAT, TEXT, VECTORS, ITEMS = "chat/completions", "completions", "embeddings", "responses"


@pytest.fixture(autouse=True)
def _quiet(upstream: ScriptedUpstream, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No record of another test's; and a Redis that is waited for, however busy the machine is."""
    monkeypatch.setattr(store, "DEADLINE", 5.0)
    monkeypatch.setattr(store, "PUT_WITHIN", 5.0)
    upstream.forget()
    yield
    upstream.forget()


def body(path: str = CHAT, **more: Any) -> dict[str, Any]:
    """Return a request that no other test makes, for the likeliest answer."""
    said = f"Say something of {uuid.uuid4()}."
    match path:
        case "chat/completions" | "messages":
            asked: dict[str, Any] = {"messages": [{"role": "user", "content": said}]}
        case "completions":
            asked = {"prompt": said}
        case _:
            asked = {"input": said}
    likeliest = {} if path == VECTORS else {"temperature": 0}
    limit = {"max_tokens": 50} if path == "messages" else {}
    return {"model": "small", **asked, **likeliest, **limit, **more}


def ask(
    house: House, asked: dict[str, Any], headers: dict[str, str] = ON, path: str = CHAT, key: str | None = None
) -> httpx.Response:
    """Return the answer to a call, once it is kept or found not to be worth it."""
    before = settled(house)
    with house.client(key) as client:
        answer = client.post(f"/v1/{path}", json=asked, headers=headers)
    if answer.status_code == 200 and answer.headers["x-cache"] == "miss":
        until(lambda: settled(house) > before)
    return answer


def settled(house: House) -> float:
    """Return of how many answers it is decided whether they are kept."""
    lines = [line for line in metrics_of(house).splitlines() if line.startswith("tollgate_cache_total")]
    return sum(float(line.split()[-1]) for line in lines if 'kept"' in line)


def metrics_of(house: House) -> str:
    with house.client(house.admin_key) as admin:
        return admin.get("/metrics").text


def words(answer: httpx.Response) -> str:
    """Return what an answer says, streamed or not."""
    if "event-stream" not in answer.headers["content-type"]:
        return str(answer.json()["choices"][0]["message"]["content"])
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
    return "".join(choice["delta"].get("content") or "" for line in lines for choice in json.loads(line)["choices"])


STREAMED = {"stream": True, "stream_options": {"include_usage": True}}


@pytest.mark.parametrize(
    ("path", "more"),
    [
        *((path, more) for path in (CHAT, TEXT) for more in ({}, STREAMED)),
        *((path, more) for path in (ITEMS, "messages") for more in ({}, {"stream": True})),
        (VECTORS, {}),
        ("messages", {"model": "claude"}),
    ],
)
def test_the_same_request_is_answered_again_for_nothing(
    house: House, upstream: ScriptedUpstream, path: str, more: dict[str, Any]
) -> None:
    """On every endpoint, streamed or not: the upstream is asked once, the second answer says the same with the same
    tokens and costs nothing; its row has no tokens, and what it saved."""
    asked = body(path, **more)
    first, second = ask(house, asked, path=path), ask(house, asked, path=path)
    paid, free = house.record_of(first), house.record_of(second)

    assert (first.status_code, first.headers["x-cache"], second.headers["x-cache"]) == (200, "miss", "hit")
    assert len(upstream.requests) == 1
    assert masked(first) == masked(second)
    assert free["status"] == "answered"
    assert [attempt["outcome"] for attempt in free["attempts"]] == ["cached"]
    assert (free["cost_usd"], free["input_tokens"], free["output_tokens"], free["held_nanousd"]) == (0, 0, 0, 0)
    assert free["saved_usd"] == paid["cost_usd"] > 0 == paid["saved_usd"]


def masked(answer: httpx.Response) -> str:
    """Return an answer without what is each call's own: ids, moments, what it cost."""
    own = ("id", "created", "created_at", "completed_at", "item_id", "cost_usd", "obfuscation")

    def mask(value: Any) -> Any:
        match value:
            case dict():
                return {name: mask(each) for name, each in value.items() if name not in own}
            case list():
                return [mask(each) for each in value]
        return value

    if "event-stream" not in answer.headers["content-type"]:
        return json.dumps(mask(answer.json()))
    lines = [mask(json.loads(line[6:])) for line in answer.text.splitlines() if line.startswith("data: {")]
    for line in lines:
        line.get("message", {}).pop("usage", None)  # what was known when the stream began
    return json.dumps(lines)


def test_a_stream_comes_again_in_its_pieces(house: House, upstream: ScriptedUpstream) -> None:
    """The chunks of a stream are the same ones, usage and end included, and each tells that it costs nothing; a plain
    call has an answer of its own."""
    upstream.script("text=one two three four", times=1)
    asked = body(stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True})
    first, second = ask(house, asked), ask(house, asked)
    plain = ask(house, {name: value for name, value in asked.items() if name not in STREAMED})

    assert second.headers["x-cache"] == "hit"
    assert words(first) == words(second) == "one two three four"
    assert first.text.count("data: ") == second.text.count("data: ") > 4
    assert second.text.endswith("data: [DONE]\n\n")
    costs = [re.findall(r'"cost_usd": ?"([^"]+)"', answer.text) for answer in (first, second)]
    assert len(costs[0]) > 4 and "0.00" not in costs[0] and costs[1] == ["0.00"] * len(costs[0])
    assert plain.headers["x-cache"] == "miss"


def test_only_what_asks_for_it_goes_by_the_cache(house: House, upstream: ScriptedUpstream) -> None:
    """Without a word nothing does; `on` takes no sampled answer, unsaid temperature included; `all` does."""
    for asked, headers, told in [
        (body(), {}, "off"),
        (body(), {"x-cache": "off"}, "off"),
        (body(temperature=0.7), ON, "off"),
        (body(temperature=None), ON, "off"),
        (body(temperature=0.7), ALL, "miss"),
        (body(cache="on"), {}, "miss"),
    ]:
        seen = [ask(house, asked, headers).headers["x-cache"] for _ in range(2)]
        assert seen == ([told, told] if told == "off" else ["miss", "hit"]), (asked, headers)
    wrong = ask(house, body(), {"x-cache": "yes"})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "cache")
    assert "'on', 'all' or 'off'" in wrong.json()["error"]["message"]


def test_tool_calls_are_kept_where_all_is_asked(house: House, upstream: ScriptedUpstream) -> None:
    """An answer that calls a tool is no answer from the cache, unless it is asked for."""
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
    asked = body(tools=[tool], tool_choice="required")
    assert [ask(house, asked, ON).headers["x-cache"] for _ in range(2)] == ["miss", "miss"]
    asked = body(tools=[tool], tool_choice="required")
    answers = [ask(house, asked, ALL) for _ in range(2)]

    assert [answer.headers["x-cache"] for answer in answers] == ["miss", "hit"]
    first, second = (answer.json()["choices"][0]["message"]["tool_calls"] for answer in answers)
    assert first == second != []
    assert ask(house, asked, ON).headers["x-cache"] == "miss"  # kept for those who take it, and for no others


def test_what_differs_is_another_request(house: House, upstream: ScriptedUpstream) -> None:
    """Every field counts but those that say who asks; the order of keys and the words of one's name do not."""
    asked = body(max_tokens=20)
    ask(house, asked)
    others = [asked | {"max_tokens": 21}, asked | {"model": "large"}, asked | {"seed": 7}, asked | {"stop": ["x"]}]

    assert [ask(house, other).headers["x-cache"] for other in others] == ["miss"] * 4
    assert ask(house, dict(reversed(asked.items()))).headers["x-cache"] == "hit"
    tagged = [ask(house, asked | {"user": user}).headers["x-cache"] for user in ("anna", "ben")]
    assert tagged == ["miss", "hit"]  # what an upstream lacks is told to those who said it: so that one says counts


def test_teams_share_nothing_unless_they_are_named(house: House, upstream: ScriptedUpstream, tmp_path: Path) -> None:
    """Another team's answer is a miss; two that `cache.shared` names get each other's; a third still gets none. What a
    team's own key paid for is that team's alone, and what is taken out of its answers is missing in no other's."""
    teams = [f"cache-{uuid.uuid4().hex[:8]}" for _ in range(2)]
    keys = [asyncio.run(make_team(house.settings, team)) for team in teams]
    asked = body()
    assert [ask(house, asked, key=key).headers["x-cache"] for key in (None, *keys)] == ["miss"] * 3

    shared = CacheSettings(shared=frozenset(teams))
    with serving(replace(house.settings, data_dir=tmp_path, cache=shared)) as url:
        other = replace_url(house, url)
        asked = body()
        seen = [ask(other, asked, key=key).headers["x-cache"] for key in (*keys, None)]
        with other.client(house.admin_key) as admin:
            redacts = {"output": "flag", "levels": {"contacts": "redact"}, "redacts": "output"}
            admin.patch(f"/admin/teams/{teams[0]}", json={"safety": redacts}).raise_for_status()
            upstream.script(Script(text="Ask anna@example.com."), model="small", times=2)
            asked = body()
            told = [ask(other, asked, key=key) for key in (*keys, *keys)]
            admin.patch(f"/admin/teams/{teams[0]}", json={"safety": None}).raise_for_status()
            said = {"provider": "upstream", "key": "sk-own-of-a-cache"}
            admin.post(f"/admin/teams/{teams[0]}/provider-keys", json=said).raise_for_status()
            asked = body()
            paid = [ask(other, asked, key=key).headers["x-cache"] for key in (*keys, keys[0])]
    assert seen == ["miss", "hit", "miss"]
    assert paid == ["miss", "miss", "hit"]
    assert [answer.headers["x-cache"] for answer in told] == ["miss", "miss", "hit", "hit"]
    texts = [answer.json()["choices"][0]["message"]["content"] for answer in told]
    assert texts == ["Ask [redacted email 1].", "Ask anna@example.com."] * 2


def replace_url(house: House, url: str) -> House:
    return House(url, house.team_id, house.team_key, house.admin_key, house.settings)


def test_a_key_and_a_name_may_ask_for_it(house: House, upstream: ScriptedUpstream, tmp_path: Path) -> None:
    """The call's word comes before its key's, the key's before the name's; a rotated key keeps its own."""
    with house.client(house.admin_key) as admin:
        made = admin.post("/admin/keys", json={"team_id": house.team_id, "cache": "all"}).json()
        wrong = admin.post("/admin/keys", json={"team_id": house.team_id, "cache": "sometimes"})
        again = admin.post(f"/admin/keys/{made['key_id']}/rotate", json={}).json()
    assert (made["cache"], again["cache"], wrong.status_code) == ("all", "all", 400)
    asked = body(temperature=1)
    assert [ask(house, asked, {}, key=key).headers["x-cache"] for key in (made["key"], again["key"])] == ["miss", "hit"]
    assert ask(house, asked, {"x-cache": "off"}, key=made["key"]).headers["x-cache"] == "off"

    named = CacheSettings(models={"auto": "all", "old-name": "off"})
    with serving(replace(house.settings, data_dir=tmp_path, cache=named)) as url:
        other = replace_url(house, url)
        asked = body(model="auto", temperature=1)
        assert [ask(other, asked, {}).headers["x-cache"] for _ in range(2)] == ["miss", "hit"]
        assert ask(other, body(model="small"), {}).headers["x-cache"] == "off"
        assert ask(other, body(model="old-name"), {}, key=made["key"]).headers["x-cache"] == "miss"


def test_a_hit_needs_no_budget_and_no_upstream(house: House, upstream: ScriptedUpstream) -> None:
    """A team whose dollars are used up, and a model that is down, still get what is kept; requests count."""
    team = f"cache-{uuid.uuid4().hex[:8]}"
    key = asyncio.run(make_team(house.settings, team, LimitsInput(usd_per_day=Decimal(1))))
    asked = body()
    ask(house, asked, key=key)
    with house.client(house.admin_key) as admin:
        admin.patch(f"/admin/teams/{team}", json={"limits": {"usd_per_day": 0}}).raise_for_status()
        upstream.script("status=500")
        until(lambda: ask(house, body(), key=key).status_code == 429)
        seen = ask(house, asked, key=key)
        limits = {"limits": {"requests_per_minute": 1}}
        admin.patch(f"/admin/teams/{team}", json=limits).raise_for_status()

    assert (seen.status_code, seen.headers["x-cache"]) == (200, "hit"), seen.text
    until(lambda: ask(house, asked, key=key).status_code == 429)


def test_usage_tells_what_was_saved(house: House, upstream: ScriptedUpstream) -> None:
    """`cache_saved_usd` of a team's day is what its hits would have cost, in JSON, CSV and the report; books agree."""
    key = asyncio.run(make_team(house.settings, team := f"cache-{uuid.uuid4().hex[:8]}"))
    asked = body()
    answers = [ask(house, asked, key=key) for _ in range(3)]
    saved = sum(house.record_of(answer)["saved_usd"] for answer in answers)
    with house.client(key) as client:
        until(lambda: client.get("/v1/usage").json()["requests"] == 3)
        usage, csv = client.get("/v1/usage").json(), client.get("/v1/usage?format=csv").text
    paid = house.record_of(answers[0])

    assert paid["cost_usd"] > 0
    assert saved == pytest.approx(2 * paid["cost_usd"])
    assert usage["cache_saved_usd"] == pytest.approx(saved)
    assert usage["input_tokens"] == paid["input_tokens"]
    assert "cache_saved_usd" in csv.splitlines()[0]
    assert f'tollgate_cache_saved_nanousd_total{{model="small",team="{team}"}} {saved * 10**9:.0f}' in metrics_of(house)


def test_the_policy_of_now_looks_at_a_kept_answer(house: House, upstream: ScriptedUpstream, tmp_path: Path) -> None:
    """An answer, and a request, that were fine when they were kept are not once a phrase of theirs is denied."""
    upstream.script("text=The secret word is xylophone indeed.", times=2)
    plain, streamed = body(), body(**STREAMED)
    assert [ask(house, asked).status_code for asked in (plain, streamed)] == [200, 200]

    safety = Safety(input="off", output="block", deny=("xylophone",))
    with serving(replace(house.settings, data_dir=tmp_path, safety=safety)) as url:
        refused, cut = (ask(replace_url(house, url), asked) for asked in (plain, streamed))
        row = house.record_of(cut)
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "content_policy_violation"
    assert "content_filter" in cut.text and "xylophone" not in cut.text
    assert (row["status"], row["cost_usd"], row["saved_usd"]) == ("blocked", 0, 0)
    assert len(upstream.requests) == 2


def test_a_broken_answer_is_not_kept(house: House, upstream: ScriptedUpstream) -> None:
    """A stream that its upstream broke, and one that its filter cut, are asked anew."""
    for script in ("reset,after=2", "finish=content_filter"):
        upstream.script(script, times=1)
        asked = body(**STREAMED)
        with house.client() as client:
            client.post("/v1/chat/completions", json=asked, headers=ON)
        assert ask(house, asked).headers["x-cache"] == "miss", script


def test_with_an_idempotency_key_a_hit_is_stored_as_any_answer(house: House, upstream: ScriptedUpstream) -> None:
    """The key's first answer may come from the cache; said again it is the stored one, and both cost nothing."""
    asked = body()
    ask(house, asked)
    headers = ON | {"idempotency-key": str(uuid.uuid4())}
    first, again = (ask(house, asked, headers) for _ in range(2))

    assert first.headers["x-cache"] == again.headers["x-cache"] == "hit"
    assert again.headers["idempotent-replayed"] == "true"
    assert first.content == again.content
    assert house.record_of(again)["cost_usd"] == 0


def test_what_is_kept_is_sealed_and_within_its_bound(house: House, upstream: ScriptedUpstream, tmp_path: Path) -> None:
    """No word of a request or an answer can be read in Redis, no team's id but in its keys' names; the oldest answers
    of the team that has most make room, and a short answer beside them stays."""
    upstream.script("text=The word is marmalade.")
    few = CacheSettings(max_bytes=6000)
    with serving(replace(house.settings, data_dir=tmp_path, cache=few)) as url, serving_redis(house) as kept:
        other = replace_url(house, url)
        kept.flushall()
        quiet = asyncio.run(make_team(house.settings, f"cache-{uuid.uuid4().hex[:8]}"))
        beside = body()
        ask(other, beside, key=quiet)
        many = [body() for _ in range(14)]
        for asked in many:
            ask(other, asked)
        values = [kept.get(name) or b"" for name in kept.keys("tollgate:{cache}:answer:*")]
        counted = int(kept.get("tollgate:{cache}:all") or 0)

        assert all(b"marmalade" not in value and b"Say something" not in value for value in values)
        assert sum(map(len, values)) < counted <= 6000
        assert 3 <= len(values) < 15
        assert ask(other, beside, key=quiet).headers["x-cache"] == "hit"
        assert ask(other, many[-1]).headers["x-cache"] == "hit"
        assert ask(other, many[0]).headers["x-cache"] == "miss"


def serving_redis(house: House) -> redis.Redis:
    return redis.Redis.from_url(house.settings.redis_url)


@pytest.mark.parametrize("way", [Way.CUT, Way.SILENT, Way.ANOTHER])
def test_without_redis_every_call_is_a_miss(
    house: House, upstream: ScriptedUpstream, tmp_path: Path, way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Redis that is away, frozen or out of its mind costs a call a moment, and never an error."""
    monkeypatch.setattr(store, "DEADLINE", 0.05)

    async def run() -> list[tuple[int, str]]:
        proxy = RedisProxy(house.settings.redis_url)
        await proxy.start()
        try:
            with serving(replace(house.settings, data_dir=tmp_path, redis_url=proxy.url)) as url:
                other, asked = replace_url(house, url), body()
                await asyncio.to_thread(ask, other, asked)
                proxy.turn(way)
                answers = [await asyncio.to_thread(lost, other, asked) for _ in range(4)]
                proxy.turn(Way.OPEN)
                return answers
        finally:
            await proxy.stop()

    def lost(other: House, asked: dict[str, Any]) -> tuple[int, str]:
        with other.client() as client:
            answer = client.post("/v1/chat/completions", json=asked, headers=ON)
        return answer.status_code, answer.headers["x-cache"]

    assert asyncio.run(run()) == [(200, "miss")] * 4
