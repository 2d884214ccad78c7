# Keys of providers that teams bring: which calls go with them, what these cost, and who hears of them. The scripted
# upstream sees which key came.

from __future__ import annotations

import asyncio
import io
import uuid
import wave
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import httpx
import pytest

from gateway.accounts.schemas import LimitsInput
from tests.support.house import House, make_team
from tests.support.scripted_upstream import ScriptedUpstream

COMPANYS = "sk-upstream"
SAID = {"messages": [{"role": "user", "content": "Hi."}], "max_tokens": 9}
HOUR = [{"type": "text", "text": "Hi.", "cache_control": {"type": "ephemeral", "ttl": "1h"}}]
CALLS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "chat": ("upstream", "/v1/chat/completions", {"model": "small", **SAID}),
    "stream": ("upstream", "/v1/chat/completions", {"model": "small", "stream": True, **SAID}),
    "completion": ("upstream", "/v1/completions", {"model": "small", "prompt": "Hi."}),
    "message": ("anthropic", "/v1/messages", {"model": "claude", **SAID}),
    "count": ("anthropic", "/v1/messages/count_tokens", {"model": "claude", "messages": SAID["messages"]}),
    "gemini": ("gemini", "/v1/chat/completions", {"model": "gemini", **SAID}),
    "azure": ("azure", "/v1/chat/completions", {"model": "gpt", **SAID}),
    "response": ("upstream", "/v1/responses", {"model": "small", "input": "Hi.", "store": False}),
    "native": ("native", "/v1/responses", {"model": "native", "input": "Hi.", "store": False}),
    "search": (
        "native",
        "/v1/responses",
        {"model": "native", "input": "search", "tools": [{"type": "web_search"}], "store": False},
    ),
    "hour": ("anthropic", "/v1/messages", {"model": "claude", **SAID, "messages": [{"role": "user", "content": HOUR}]}),
    "actor": ("upstream", "/v1/audio/speech", {"model": "actor", "input": "Hi.", "voice": "alloy"}),
    "vectors": ("upstream", "/v1/embeddings", {"model": "small", "input": "Hi."}),
    "picture": ("upstream", "/v1/images/generations", {"model": "brush", "prompt": "A cat."}),
    "speech": ("upstream", "/v1/audio/speech", {"model": "voice", "input": "Hi.", "voice": "alloy"}),
    "rank": ("upstream", "/v1/rerank", {"model": "ranker", "query": "a", "documents": ["b", "c"]}),
}


class Party:
    """A team of the test's own, and what its admin does."""

    def __init__(self, house: House, **team: Any) -> None:
        self.id = f"team-{uuid.uuid4().hex[:12]}"
        self.house = house
        self.team_key = asyncio.run(make_team(house.settings, self.id, **team))
        with house.client(house.admin_key) as admin:
            role = {"role": "team-admin", "team_id": self.id}
            self.admin_key = admin.post("/admin/admin-keys", json=role).json()["key"]

    def ask(self, path: str, body: dict[str, Any], **more: Any) -> httpx.Response:
        with self.house.client(self.team_key) as client:
            return client.post(path, json=body, **more)

    def chat(self, **more: Any) -> httpx.Response:
        return self.ask("/v1/chat/completions", {"model": "small", **SAID, **more})

    def act(self, method: str, path: str = "", body: dict[str, Any] | None = None) -> httpx.Response:
        with self.house.client(self.admin_key) as admin:
            return admin.request(method, f"/admin/teams/{self.id}/provider-keys{path}", json=body)

    def bring(self, key: str, provider: str = "upstream") -> str:
        made = self.act("POST", "", {"provider": provider, "key": key})
        assert made.status_code == 201, made.text
        return str(made.json()["id"])


@pytest.fixture(autouse=True)
def _clean(house: House, upstream: ScriptedUpstream) -> Iterator[None]:
    upstream.forget()
    yield
    upstream.forget()
    house.reset_breakers()


def own_key() -> str:
    return f"sk-own-{uuid.uuid4().hex}"


@pytest.fixture(scope="module")
def owner(house: House) -> Party:
    """A team with a key of its own at every provider."""
    team = Party(house)
    for provider in {provider for provider, _, _ in CALLS.values()}:
        team.bring(f"sk-own-of-{provider}", provider)
    return team


@pytest.mark.parametrize("kind", CALLS)
def test_a_teams_own_key_goes_with_its_calls_alone(
    kind: str, house: House, upstream: ScriptedUpstream, owner: Party
) -> None:
    """Whatever is asked for: its own key comes to the provider, and with another team's same call the company's."""
    team, (provider, path, body) = owner, CALLS[kind]
    key = f"sk-own-of-{provider}"
    answer = team.ask(path, body)
    with house.client() as client:
        other = client.post(path, json=body)

    assert (answer.status_code, other.status_code) == (200, 200), answer.text + other.text
    assert [seen.api_key for seen in upstream.requests] == [key, COMPANYS]
    if kind != "count":
        record = house.record_of(answer)
        assert (record["cost_usd"], record["attempts"][-1]["key"]) == (0, "team")
        assert "key" not in house.record_of(other)["attempts"][-1]
    assert key not in answer.text


def test_a_recording_goes_with_the_teams_own_key(house: House, upstream: ScriptedUpstream, owner: Party) -> None:
    """A form, as JSON."""
    recorded = io.BytesIO()
    with wave.open(recorded, "wb") as file:
        file.setparams((1, 2, 8000, 8000, "NONE", ""))
        file.writeframes(b"\0\0" * 8000)
    key = "sk-own-of-upstream"
    with house.client(owner.team_key) as client:
        files = {"file": ("a.wav", recorded.getvalue())}
        answer = client.post("/v1/audio/transcriptions", data={"model": "scribe"}, files=files)

    assert answer.status_code == 200, answer.text
    assert [seen.api_key for seen in upstream.requests] == [key]


@pytest.mark.parametrize(
    ("script", "status", "words"),
    [
        ("401", 502, "own key for upstream was refused"),
        ("status=402,code=insufficient_balance", 429, "own account at upstream is used up"),
        ("429", 429, "rate limit"),
    ],
)
def test_a_bad_key_of_a_team_is_no_others_trouble(
    script: str, status: int, words: str, house: House, upstream: ScriptedUpstream
) -> None:
    """Its own calls say what is wrong with it, those of others and at other keys go on, the company's is not asked for
    it; also where another team has the very same key."""
    team, twin, key = Party(house), Party(house), own_key()
    team.bring(key)
    twin.bring(key)
    upstream.script(script, api_key=key, times=1)
    refused = team.chat()
    others = [twin.chat().status_code, Party(house).chat().status_code]
    with house.client() as client:
        others.append(client.post("/v1/chat/completions", json={"model": "small", **SAID}).status_code)

    assert (refused.status_code, others) == (status, [200, 200, 200])
    assert words in refused.json()["error"]["message"] and key not in refused.text
    assert [seen.api_key for seen in upstream.requests] == [key, key, COMPANYS, COMPANYS]


def test_keys_of_a_team_are_used_in_their_order_and_the_next_where_one_rests(
    house: House, upstream: ScriptedUpstream
) -> None:
    """A refused first one gives way to the second, in the same call; the next call goes to that at once."""
    team, first, second = Party(house), own_key(), own_key()
    team.bring(first)
    team.bring(second)
    upstream.script("401", api_key=first)
    answers = [team.chat().status_code for _ in range(2)]

    assert answers == [200, 200]
    assert [seen.api_key for seen in upstream.requests] == [first, second, second]


def test_the_companys_key_comes_behind_where_the_team_chose_so(house: House, upstream: ScriptedUpstream) -> None:
    """Then the call costs what it costs: the company paid for it."""
    team, key = Party(house, company_keys="fallback"), own_key()
    team.bring(key)
    upstream.script("401", api_key=key)
    answer = team.chat()
    record = house.record_of(answer)

    assert answer.status_code == 200
    assert [(one["outcome"], one.get("key")) for one in record["attempts"]] == [("refused_key", "team"), ("ok", None)]
    assert record["cost_usd"] > 0


def test_a_team_may_be_kept_from_the_companys_keys(house: House, upstream: ScriptedUpstream) -> None:
    """Without a key of its own it is told what is missing, and nothing is asked; with one, it is answered."""
    team, key = Party(house, company_keys="never"), own_key()
    refused = team.chat()
    asked_before = len(upstream.requests)
    team.bring(key)

    error = refused.json()["error"]
    assert (refused.status_code, error["code"], asked_before) == (403, "provider_key_missing", 0)
    assert team.chat().status_code == 200 and upstream.requests[-1].api_key == key


def test_models_that_are_closed_to_a_team_are_none_of_its_models(house: House) -> None:
    """Those of providers where it has no key, with the routes and names that lead to them alone; a key opens them."""
    team = Party(house, company_keys="never")

    def names() -> set[str]:
        with house.client(team.team_key) as client:
            found = {each["id"] for each in client.get("/v1/models").json()["data"]}
            assert {client.get(f"/v1/models/{name}").status_code for name in found} <= {200}
            assert client.get("/v1/models/claude").status_code == (200 if "claude" in found else 404)
        return found

    closed = names()
    team.bring(own_key(), "anthropic")
    opened = names()

    assert not closed & {"small", "claude", "auto"} and "small" not in opened and "claude" in opened


def test_a_team_may_be_charged_the_full_price_for_its_own_key(house: House, upstream: ScriptedUpstream) -> None:
    """As its admins chose: then its budgets hold these calls, too."""
    team, key = Party(house, own_key_cost="list"), own_key()
    team.bring(key)
    record = house.record_of(team.chat())

    assert record["cost_usd"] > 0 and record["attempts"][-1]["key"] == "team"


def test_a_spent_budget_of_dollars_leaves_calls_with_an_own_key(house: House, upstream: ScriptedUpstream) -> None:
    """They cost it nothing, by a price that the row names and the database knows."""
    team = Party(house, limits=LimitsInput(usd_per_day=0))
    before = team.chat().status_code
    team.bring(own_key())
    answer = team.chat()
    house.record_of(answer)
    with house.client(team.team_key) as client:
        told = client.get(f"/v1/calls/{answer.headers['x-request-id']}").json()

    assert (before, answer.status_code, told["key"]) == (429, 200, "team")
    assert [(line["kind"], Decimal(line["cost_usd"])) for line in told["price"]["lines"]] == [
        ("input", 0),
        ("output", 0),
    ]


def test_a_key_is_rotated_and_revoked_and_never_shown(house: House, upstream: ScriptedUpstream) -> None:
    """Calls go with the new one at once and with the company's after it is gone; lists and the audit log have
    fingerprints, who and when."""
    team, old, new = Party(house), own_key(), own_key()
    ident = team.bring(old)
    team.chat()
    rotated = team.act("POST", f"/{ident}/rotate", {"key": new})
    team.chat()
    listed = team.act("GET")
    revoked = team.act("DELETE", f"/{ident}")
    team.chat()
    with house.client(house.admin_key) as admin:
        log = admin.get("/admin/audit-log", params={"team_id": team.id})

    assert [seen.api_key for seen in upstream.requests] == [old, new, COMPANYS]
    assert listed.json()["data"] == [rotated.json()] and rotated.json()["rotated_at"] is not None
    assert revoked.json()["deleted"] and team.act("GET").json()["data"] == []
    acts = [entry["action"] for entry in log.json()["data"] if entry["action"].startswith("provider_key")]
    assert acts == ["provider_key.revoked", "provider_key.rotated", "provider_key.created"]
    told = "".join(each.text for each in (rotated, listed, revoked, log))
    assert old not in told and new not in told and rotated.json()["fingerprint"] in told


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"provider": "upstraem", "key": "sk-12345678"}, 400, "provider"),
        ({"provider": "entra", "key": "sk-12345678"}, 400, "provider"),
        ({"provider": "upstream", "key": "sk 12345678"}, 400, "key"),
        ({"provider": "upstream", "key": "sk-1234\n5678"}, 400, "key"),
        ({"provider": "upstream", "key": "sk-1"}, 400, "key"),
        ({"provider": "upstream", "key": 77777777}, 400, "key"),
        ({"provider": "upstream"}, 400, "key"),
        ({"provider": "upstream", "key": "sk-12345678", "more": 1}, 400, None),
    ],
)
def test_what_is_no_key_is_refused(body: dict[str, Any], status: int, param: str | None, house: House) -> None:
    """By the name of what is wrong, and without a word of the key."""
    team = Party(house)
    refused = team.act("POST", "", body)

    assert (refused.status_code, refused.json()["error"]["param"]) == (status, param), refused.text
    assert str(body.get("key", "sk-")) not in refused.text


def test_a_key_is_there_once_and_a_team_has_few(house: House) -> None:
    """The same key twice, or a sixth at one provider, is a conflict."""
    team, key = Party(house), own_key()
    team.bring(key)
    again = team.act("POST", "", {"provider": "upstream", "key": key})
    for _ in range(4):
        team.bring(own_key())
    sixth = team.act("POST", "", {"provider": "upstream", "key": own_key()})
    unknown = team.act("DELETE", "/pvk_none")

    assert [one.status_code for one in (again, sixth, unknown)] == [409, 409, 404]
    assert [one.json()["error"]["code"] for one in (again, sixth, unknown)] == [
        "provider_key_exists",
        "too_many_provider_keys",
        "provider_key_not_found",
    ]


def test_another_teams_admin_has_no_part_in_it(house: House) -> None:
    """Neither by the path nor by an id of the other team's."""
    team, other = Party(house), Party(house)
    ident = team.bring(own_key())
    with house.client(other.admin_key) as admin:
        there = f"/admin/teams/{team.id}/provider-keys"
        told = [admin.get(there).status_code, admin.delete(f"{there}/{ident}").status_code]
        told.append(admin.delete(f"/admin/teams/{other.id}/provider-keys/{ident}").status_code)

    assert told[2] == 404 and set(told[:2]) <= {403, 404}
    assert len(team.act("GET").json()["data"]) == 1
