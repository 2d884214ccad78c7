# What admins do over HTTP: teams, keys, the audit log, single usage records.

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest

from tests.support.house import House
from tests.support.waiting import until


@pytest.fixture
def admin(house: House) -> Iterator[httpx.Client]:
    """A client with an admin's key."""
    with house.client(house.admin_key) as client:
        yield client


def new_id() -> str:
    return f"team-{uuid.uuid4().hex[:12]}"


def make(admin: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    answer = admin.post(path, json=body)
    assert answer.status_code == 201, answer.text
    return answer.json()  # type: ignore[no-any-return]


def chat(house: House, key: str) -> httpx.Response:
    body = {"model": "small", "messages": [{"role": "user", "content": "hello"}]}
    with house.client(key) as client:
        return client.post("/v1/chat/completions", json=body)


def chat_until(house: House, key: str, status: int) -> httpx.Response:
    """Ask again until the answer has this status: all have heard of the change."""
    return until(lambda: (answer := chat(house, key)).status_code == status and answer)


def test_team_is_shown_as_it_was_made(admin: httpx.Client) -> None:
    """Every field comes back, with what is left of budgets; limits that were not given are null; dollars are exact
    numbers."""
    team_id = new_id()
    limits = {"requests_per_minute": 60, "usd_per_day": 12.34, "usd_per_month": "0.000000001"}

    made = make(admin, "/admin/teams", id=team_id, name="Search", weight=2, allowed_models=["small"], limits=limits)

    shown = admin.get(f"/admin/teams/{team_id}").json()
    assert shown.pop("budgets")["usd_today"] == {"used": 0.0, "held": 0.0, "left": 12.34}
    assert (shown.pop("model_budgets"), made["model_limits"]) == ({}, {})
    assert shown == made
    assert (made["name"], made["weight"], made["allowed_models"]) == ("Search", 2.0, ["small"])
    assert (made["allow_smaller"], made["safety"], made["suspended"]) == (True, None, False)
    assert made["limits"] == {
        "requests_per_minute": 60,
        "tokens_per_minute": None,
        "concurrent_requests": None,
        "tokens_per_day": None,
        "usd_per_day": 12.34,
        "usd_per_month": 0.000000001,
    }


def test_patch_changes_what_it_names(admin: httpx.Client) -> None:
    """Absent stays, null goes."""
    team_id = new_id()
    make(admin, "/admin/teams", id=team_id, limits={"requests_per_minute": 60, "tokens_per_day": 5})

    changed = admin.patch(f"/admin/teams/{team_id}", json={"limits": {"tokens_per_day": None}, "weight": 0.5}).json()

    assert changed["limits"]["requests_per_minute"] == 60
    assert changed["limits"]["tokens_per_day"] is None
    assert (changed["weight"], changed["name"]) == (0.5, team_id)


def test_new_key_answers_and_a_revoked_one_does_not(house: House, admin: httpx.Client) -> None:
    """A key works as soon as it is made, and is refused as soon as the gateway has heard of its revocation."""
    team_id = new_id()
    make(admin, "/admin/teams", id=team_id)
    made = make(admin, "/admin/keys", team_id=team_id, name="ci")
    before = chat(house, made["key"])

    revoked = admin.delete(f"/admin/keys/{made['key_id']}")
    after = chat_until(house, made["key"], 401)

    assert made["key"].startswith("tg-")
    assert len(made["key"]) == 46
    assert before.status_code == 200
    assert (revoked.status_code, revoked.json()["status"]) == (200, "revoked")
    assert (after.status_code, after.json()["error"]["code"]) == (401, "invalid_api_key")


def test_key_is_shown_once(admin: httpx.Client) -> None:
    """Only the answer that makes a key holds it; lists and the audit log know its beginning."""
    team_id = new_id()
    make(admin, "/admin/teams", id=team_id)
    made = make(admin, "/admin/keys", team_id=team_id)
    paths = ("/admin/keys", f"/admin/keys?team_id={team_id}", f"/admin/keys/{made['key_id']}", "/admin/audit-log")

    shown = [admin.get(path).text for path in paths]

    for text in shown:
        assert made["key"] not in text
        assert made["prefix"] in text


def test_rotated_key_overlaps_with_the_old_one(house: House, admin: httpx.Client) -> None:
    """Both keys answer during the overlap; without one the old key is refused."""
    team_id = new_id()
    make(admin, "/admin/teams", id=team_id)
    first = make(admin, "/admin/keys", team_id=team_id)

    second = make(admin, f"/admin/keys/{first['key_id']}/rotate", overlap="1h")
    again = admin.post(f"/admin/keys/{first['key_id']}/rotate")  # its end is the overlap's, and would be the new key's
    both = (chat(house, first["key"]).status_code, chat(house, second["key"]).status_code)
    third = make(admin, f"/admin/keys/{second['key_id']}/rotate", overlap=0)
    revoked = admin.delete(f"/admin/keys/{first['key_id']}").json()

    ends = datetime.fromisoformat(second["replaces"]["expires_at"])
    assert abs(ends - datetime.now(UTC) - timedelta(hours=1)) < timedelta(minutes=1)
    assert both == (200, 200)
    assert (again.status_code, again.json()["error"]["code"]) == (409, "key_rotated")
    assert second["key_id"] in again.json()["error"]["message"]
    assert (revoked["status"], revoked["replaced_by"]) == ("revoked", second["key_id"])
    assert chat_until(house, second["key"], 401).status_code == 401
    assert chat(house, third["key"]).status_code == 200
    assert admin.post(f"/admin/keys/{second['key_id']}/rotate").status_code == 409


def patch(admin: httpx.Client, key_id: str, **changes: Any) -> dict[str, Any]:
    answer = admin.patch(f"/admin/keys/{key_id}", json=changes)
    assert answer.status_code == 200, answer.text
    return answer.json()  # type: ignore[no-any-return]


def test_a_key_is_changed_in_place_and_at_once(house: House, admin: httpx.Client) -> None:
    """Its models, whence it may call and its budget bind the next call; null takes each away; the rest stays; a rotated
    key is bound as the old one was."""
    team_id = new_id()
    make(admin, "/admin/teams", id=team_id)
    made = make(admin, "/admin/keys", team_id=team_id, name="ci", limits={"requests_per_minute": 1000})
    key, key_id = made["key"], made["key_id"]

    changed = patch(admin, key_id, allowed_models=["large"], name="web")
    of_models = chat_until(house, key, 403)
    with house.client(key) as client:
        listed = [model["id"] for model in client.get("/v1/models").json()["data"]]
    patch(admin, key_id, allowed_models=None, allowed_addresses=["203.0.113.0/24", "2001:db8::1"])
    of_address = chat_until(house, key, 403)
    patch(admin, key_id, allowed_addresses=["203.0.113.7", "127.0.0.0/8", "::1"])
    from_here = chat_until(house, key, 200)
    patch(admin, key_id, limits={"usd_per_day": 0})
    of_budget = chat_until(house, key, 429)
    rotated = make(admin, f"/admin/keys/{key_id}/rotate")
    freed = patch(admin, key_id, limits={"usd_per_day": None}, allowed_addresses=None)

    assert (changed["name"], changed["allowed_models"], changed["limits"]["requests_per_minute"]) == (
        "web",
        ["large"],
        1000,
    )
    assert of_models.json()["error"]["code"] == "model_not_allowed"
    assert "large" in listed
    assert "small" not in listed
    assert of_address.json()["error"]["code"] == "address_not_allowed"
    assert from_here.status_code == 200
    assert of_budget.json()["error"]["code"] == "insufficient_quota"
    assert rotated["limits"] == freed["limits"] | {"usd_per_day": 0}
    assert rotated["allowed_addresses"] == ["203.0.113.7/32", "127.0.0.0/8", "::1/128"]
    assert (rotated["name"], freed["allowed_addresses"]) == ("web", None)
    assert chat_until(house, key, 200).status_code == 200
    told = admin.get("/admin/audit-log", params={"team_id": team_id, "action": "key.updated"}).json()["data"]
    assert told[-1]["details"] == {"prefix": made["prefix"], "name": "web", "allowed_models": ["large"]}


def test_a_key_calls_its_endpoints_alone(house: House, admin: httpx.Client) -> None:
    """Others are a 403 that names its own, in a batch at its submission; it may read; null opens them again."""
    team_id = new_id()
    make(admin, "/admin/teams", id=team_id)
    made = make(admin, "/admin/keys", team_id=team_id, allowed_endpoints=["embeddings", "embeddings"])
    said = {"model": "small", "messages": [{"role": "user", "content": "Hi"}]}
    with house.client(made["key"]) as client:
        chat = client.post("/v1/chat/completions", json=said)
        message = client.post("/v1/messages", json=said | {"max_tokens": 5})
        batch = {"endpoint": "/v1/chat/completions", "requests": [{"custom_id": "a", "body": said}]}
        batch_refused, models = client.post("/v1/batch", json=batch), client.get("/v1/models")
    wrong = admin.patch(f"/admin/keys/{made['key_id']}", json={"allowed_endpoints": ["chat"]})
    rotated = make(admin, f"/admin/keys/{made['key_id']}/rotate")
    patch(admin, made["key_id"], allowed_endpoints=None)
    opened = chat_until(house, made["key"], 200)

    assert made["allowed_endpoints"] == ["embeddings"] == rotated["allowed_endpoints"]
    assert [refused.status_code for refused in (chat, message, batch_refused)] == [403, 403, 403]
    assert chat.json()["error"]["code"] == "endpoint_not_allowed" == batch_refused.json()["error"]["code"]
    assert "may call: embeddings" in chat.json()["error"]["message"]
    assert message.json()["error"]["type"] == "permission_error"
    assert (models.status_code, opened.status_code) == (200, 200)
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "allowed_endpoints[0]")


def test_a_team_replaces_the_secret_of_its_key(house: House, admin: httpx.Client) -> None:
    """Old and new secret are one key: id, limits and budgets stay, both end when it is revoked, and who has the old one
    gets no other."""
    team_id = new_id()
    make(admin, "/admin/teams", id=team_id)
    made = make(admin, "/admin/keys", team_id=team_id, limits={"usd_per_day": 1}, allowed_models=["small"])
    old, key_id = made["key"], made["key_id"]

    with house.client(old) as client:
        rotated = client.post("/v1/team/key/rotate", json={"overlap": "1h"})
        again = client.post("/v1/team/key/rotate")
        ends = client.get("/v1/team").json()["key"]["expires_at"]
    new = rotated.json()["key"]
    with house.client(new) as client:
        too = client.post("/v1/team/key/rotate")
        shown = client.get("/v1/team").json()["key"]
    both = (chat(house, old).status_code, chat(house, new).status_code)
    listed = admin.get(f"/admin/keys/{key_id}").text
    acts = admin.get("/admin/audit-log", params={"team_id": team_id}).json()["data"]
    admin.delete(f"/admin/keys/{key_id}")

    assert (rotated.status_code, rotated.json()["key_id"], rotated.json()["previous_until"]) == (201, key_id, ends)
    assert abs(datetime.fromisoformat(ends) - datetime.now(UTC) - timedelta(hours=1)) < timedelta(minutes=1)
    assert [(one.status_code, one.json()["error"]["code"]) for one in (again, too)] == [(409, "key_rotated")] * 2
    assert (shown["key_id"], shown["limits"]["usd_per_day"], shown["allowed_models"]) == (key_id, 1, ["small"])
    assert (shown["expires_at"], both) == (None, (200, 200))
    assert new not in listed
    assert (acts[0]["action"], acts[0]["actor"]) == ("key.secret_replaced", f"key:{key_id}")
    assert {chat_until(house, old, 401).status_code, chat_until(house, new, 401).status_code} == {401}


@pytest.mark.parametrize("body", [{"overlap": 0}, {"overlap": "91d"}, {"expires_at": None}])
def test_a_team_moves_no_bound_by_rotating(house: House, admin: httpx.Client, body: Any) -> None:
    """It neither makes its key last nor ends a secret at once, which would shut out whoever else has it."""
    team_id = new_id()
    make(admin, "/admin/teams", id=team_id)
    key = make(admin, "/admin/keys", team_id=team_id)["key"]

    with house.client(key) as client:
        refused = client.post("/v1/team/key/rotate", json=body)

    assert (refused.status_code, chat(house, key).status_code) == (400, 200)


def test_an_ended_key_is_not_changed(admin: httpx.Client) -> None:
    """No change makes a revoked key work again."""
    team_id = new_id()
    make(admin, "/admin/teams", id=team_id)
    key_id = make(admin, "/admin/keys", team_id=team_id)["key_id"]
    admin.delete(f"/admin/keys/{key_id}")

    refused = admin.patch(f"/admin/keys/{key_id}", json={"expires_at": None, "name": "again"})

    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "key_revoked")
    assert admin.get(f"/admin/keys/{key_id}").json()["name"] == ""


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"allowed_adresses": []}, None),
        ({"team_id": "team_a"}, None),
        ({"allowed_addresses": ["10.0.0.1/8"]}, "allowed_addresses[0]"),
        ({"allowed_addresses": ["10.0.0.0/8", "here"]}, "allowed_addresses[1]"),
        ({"allowed_addresses": ["10.0.0.0/8"] * 101}, "allowed_addresses"),
        ({"allowed_addresses": ["1" * 100_000]}, "allowed_addresses[0]"),
        ({"allowed_models": ["smal"]}, "allowed_models[0]"),
        ({"expires_at": "2020-01-01T00:00:00Z"}, "expires_at"),
        ({"limits": {"usd_per_day": -1}}, "limits.usd_per_day"),
        ({"name": "a\nb"}, "name"),
    ],
)
def test_impossible_change_of_a_key_is_refused(admin: httpx.Client, body: Any, param: str | None) -> None:
    """A mistake is named by its field, at making a key as at changing one; nothing is done of the rest."""
    team_id = new_id()
    make(admin, "/admin/teams", id=team_id)
    before = make(admin, "/admin/keys", team_id=team_id)
    key_id = before.pop("key_id")

    answers = [admin.patch(f"/admin/keys/{key_id}", json={"name": "other"} | body)]
    if "team_id" not in body:
        answers.append(admin.post("/admin/keys", json={"team_id": team_id} | body))

    for answer in answers:
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
        assert len(answer.content) < 1000
    assert admin.get(f"/admin/keys/{key_id}").json()["name"] == before["name"]
    assert len(admin.get("/admin/keys", params={"team_id": team_id}).json()["data"]) == 1


def test_expired_key_is_refused(house: House, admin: httpx.Client) -> None:
    """A key works until the moment it was given, and no longer."""
    team_id = new_id()
    make(admin, "/admin/teams", id=team_id)
    ends = time.time() + 2.5
    made = make(admin, "/admin/keys", team_id=team_id, expires_at=ends)

    before = chat(house, made["key"])
    time.sleep(max(0.0, ends + 0.1 - time.time()))

    assert before.status_code == 200
    assert chat(house, made["key"]).status_code == 401
    assert admin.get(f"/admin/keys/{made['key_id']}").json()["status"] == "expired"


def test_suspended_team_is_told_so(house: House, admin: httpx.Client) -> None:
    """Suspension refuses with a 403 that says why, and ends as soon as it is lifted."""
    team_id = new_id()
    make(admin, "/admin/teams", id=team_id)
    key = make(admin, "/admin/keys", team_id=team_id)["key"]

    admin.patch(f"/admin/teams/{team_id}", json={"suspended": True})
    refused = chat_until(house, key, 403)
    admin.patch(f"/admin/teams/{team_id}", json={"suspended": False})

    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "team_suspended")
    assert chat_until(house, key, 200).status_code == 200


def test_team_uses_the_models_it_is_allowed(house: House, admin: httpx.Client) -> None:
    """A model outside the team's list is refused as such: 403."""
    team_id = new_id()
    make(admin, "/admin/teams", id=team_id, allowed_models=["large"])
    key = make(admin, "/admin/keys", team_id=team_id)["key"]

    refused = chat(house, key)

    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "model_not_allowed")
    assert "it may use large (GET /v1/models lists them)" in refused.json()["error"]["message"]
    with house.client(key) as client:
        shown = client.get("/v1/models/large").json()
    price = house.settings.models["large"].price
    told = {"input": price.input, "cached_input": price.cached_input, "output": price.output}
    assert shown["price"] == {name: rate / 1e9 for name, rate in told.items() if rate is not None}


BAD_TEAMS: list[tuple[Any, int, str | None]] = [
    ({}, 400, "id"),
    ({"id": 5}, 400, "id"),
    ({"id": "Not An Id"}, 400, "id"),
    ({"id": "ok", "limit": {}}, 400, None),
    ({"id": "ok", "limits": {"usd_per_week": 1}}, 400, "limits"),
    ({"id": "ok", "limits": {"usd_per_day": -1}}, 400, "limits.usd_per_day"),
    ({"id": "ok", "limits": {"usd_per_day": "a lot"}}, 400, "limits.usd_per_day"),
    ({"id": "ok", "limits": {"requests_per_minute": 1.5}}, 400, "limits.requests_per_minute"),
    ({"id": "ok", "limits": {"requests_per_minute": 10**30}}, 400, "limits.requests_per_minute"),
    ({"id": "ok", "limits": {"usd_per_day": "1e999999999"}}, 400, "limits.usd_per_day"),
    ({"id": "ok", "limits": {"usd_per_day": "Infinity"}}, 400, "limits.usd_per_day"),
    ({"id": "ok", "weight": 0}, 400, "weight"),
    ({"id": "ok", "safety": {"input": "maybe"}}, 400, "safety.input"),
    ({"id": "ok", "safety": {"inptu": "block"}}, 400, "safety"),
    ({"id": "ok", "allowed_models": ["smal"]}, 400, "allowed_models[0]"),
    ({"id": "team_a"}, 409, "id"),
    ([], 400, None),
]


@pytest.mark.parametrize(("body", "status", "param"), BAD_TEAMS)
def test_impossible_team_is_refused(admin: httpx.Client, body: Any, status: int, param: str | None) -> None:
    """A mistake is named by its field; nothing is made of the rest."""
    answer = admin.post("/admin/teams", json=body)

    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (status, "invalid_request_error")
    assert error["param"] == param
    assert admin.get("/admin/teams/ok").status_code == 404


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/admin/teams/nobody", None, 404),
        ("PATCH", "/admin/teams/nobody", {}, 404),
        ("GET", "/admin/keys/key_none", None, 404),
        ("DELETE", "/admin/keys/key_none", None, 404),
        ("PATCH", "/admin/keys/key_none", {}, 404),
        ("POST", "/admin/keys/key_none/rotate", None, 404),
        ("POST", "/admin/keys", {"team_id": "nobody"}, 404),
        ("POST", "/admin/keys", {"team_id": "team_a", "expires_at": "2020-01-01T00:00:00Z"}, 400),
        ("POST", "/admin/keys", {"team_id": "team_a", "expires_at": "tomorrow"}, 400),
        ("POST", "/admin/keys", {"team_id": "team_a", "expires_at": 1e300}, 400),
        ("POST", "/admin/keys", {"team_id": "team_a", "expires_at": 253402300800}, 400),
        ("GET", "/admin/keys?team_id=nobody", None, 404),
        ("GET", "/admin/keys?limit=0", None, 400),
        ("GET", "/admin/keys?limit=1001", None, 400),
        ("GET", "/admin/teams?page=2", None, 400),
        ("GET", "/admin/audit-log?before=x", None, 400),
        ("GET", "/admin/usage-records/nonsense", None, 404),
        ("GET", "/admin/usage-records/0192f0c0-0000-7000-8000-000000000000", None, 404),
        ("GET", "/admin/usage-records/ffffffff-ffff-4fff-bfff-ffffffffffff", None, 404),
        ("GET", "/admin/teams/%00", None, 404),
        ("GET", "/admin/teams/%ff%fe", None, 404),
        ("GET", "/admin/keys/%00", None, 404),
        ("GET", "/admin/keys?after=%00", None, 400),
        ("GET", "/admin/keys?after=key_none", None, 404),
        ("GET", "/admin/usage-records/%00", None, 404),
        ("GET", "/admin/callbacks/%00", None, 404),
        ("POST", "/admin/callbacks/%00/redeliver", None, 404),
        ("POST", "/admin/keys", {"team_id": "\0"}, 404),
        ("POST", "/admin/keys", {"team_id": "team_a", "name": "\0"}, 400),
    ],
)
def test_what_is_not_there_or_makes_no_sense(
    admin: httpx.Client, method: str, path: str, body: Any, status: int
) -> None:
    """Nothing there is 404, nonsense is 400; both with words that help."""
    answer = admin.request(method, path, json=body)

    assert answer.status_code == status, answer.text
    assert answer.json()["error"].keys() == {"message", "type", "param", "code", "request_id"}


def test_lists_go_page_by_page(admin: httpx.Client) -> None:
    """``limit`` and ``after`` walk through all teams once."""
    for _ in range(3):
        make(admin, "/admin/teams", id=new_id())

    whole = [team["id"] for team in admin.get("/admin/teams?limit=1000").json()["data"]]
    walked: list[str] = []
    has_more = True
    while has_more:
        page = admin.get("/admin/teams", params={"limit": 2, **({"after": walked[-1]} if walked else {})}).json()
        walked += [team["id"] for team in page["data"]]
        has_more = page["has_more"]

    assert walked == whole
    assert len(whole) >= 3


def test_audit_log_says_who_did_what(admin: httpx.Client, house: House) -> None:
    """Each act stands there with the admin's fingerprint and the request's id, and never with a key."""
    team_id = new_id()
    made = admin.post("/admin/teams", json={"id": team_id, "limits": {"usd_per_month": 800}})

    (entry,) = admin.get("/admin/audit-log", params={"team_id": team_id}).json()["data"]
    query = {"team_id": team_id, "after": entry["id"] - 1, "format": "ocsf"}
    event = json.loads(admin.get("/admin/audit-log", params=query).text)

    assert entry["action"] == "team.created"
    assert entry["actor"].startswith("admin:")
    assert house.admin_key not in entry["actor"]
    assert entry["request_id"] == made.headers["x-request-id"]
    assert entry["details"]["limits"]["usd_per_month"] == 800 and "nanousd" not in str(entry)
    assert event["unmapped"]["details"] == entry["details"]


def test_who_reads_the_audit_log_on_sees_each_entry_once(admin: httpx.Client) -> None:
    """With the address and the reason of each request, as JSON and as events of OCSF."""
    ids_of = [new_id() for _ in range(3)]
    for number, team_id in enumerate(ids_of):
        headers = {"x-audit-reason": f"ticket {number}"}
        admin.post("/admin/teams", json={"id": team_id}, headers=headers).raise_for_status()
    refused = admin.post("/admin/teams", json={"id": "no"}, headers={"x-audit-reason": "x" * 501})
    seen, after = [], 0
    while page := admin.get("/admin/audit-log", params={"after": after, "limit": 100, "format": "ocsf"}).text:
        seen += [json.loads(line) for line in page.splitlines()]
        after = int(seen[-1]["metadata"]["uid"])
    listed = admin.get("/admin/audit-log", params={"team_id": ids_of[2]}).json()["data"]
    wrong = [admin.get("/admin/audit-log", params=each) for each in ({"after": 0, "before": 9}, {"format": "xml"})]
    ids = [int(event["metadata"]["uid"]) for event in seen]
    ours = [event for event in seen if event["unmapped"]["team_id"] in ids_of]

    assert ids == sorted(set(ids))
    assert [event["message"] for event in ours] == [f"team.created: ticket {number}" for number in range(3)]
    assert {event["src_endpoint"]["ip"] for event in ours} == {"127.0.0.1"}
    assert (listed[0]["reason"], listed[0]["address"]) == ("ticket 2", "127.0.0.1")
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "x-audit-reason"
    assert [answer.status_code for answer in wrong] == [400, 400]


def test_usage_record_is_found_by_the_answers_request_id(house: House, admin: httpx.Client) -> None:
    """The ledger's row of a call carries the id that the answer had."""
    answer = chat(house, house.team_key)
    request_id = answer.headers["x-request-id"]

    row = house.record_of(answer)

    usage = answer.json()["usage"]
    assert (row["request_id"], row["team_id"], row["status"]) == (request_id, house.team_id, "answered")
    assert (row["input_tokens"], row["output_tokens"]) == (usage["prompt_tokens"], usage["completion_tokens"])
    assert row["cost_usd"] == float(usage["cost_usd"]) > 0
