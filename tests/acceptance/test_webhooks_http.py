# What admins do about webhooks over HTTP: a team's URL, its secrets, and the outbox.

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from gateway.core.clock import Clock
from gateway.outbox.signing import Event
from gateway.outbox.store import enqueue
from gateway.storage.database import Database
from tests.support.house import House

URL = "https://93.184.216.34/hook?token=1"  # an address: no name is looked up


@pytest.fixture
def admin(house: House) -> Iterator[httpx.Client]:
    """A client with an admin's key."""
    with house.client(house.admin_key) as client:
        yield client


@pytest.fixture
def team_id(admin: httpx.Client) -> str:
    """A team of the test's own."""
    team_id = f"team-{uuid.uuid4().hex[:12]}"
    assert admin.post("/admin/teams", json={"id": team_id}).status_code == 201
    return team_id


def put(house: House, team_id: str) -> str:
    """Put an event into the outbox and return its id."""

    async def run() -> str:
        database = Database(house.settings.database_url)
        async with database.begin() as connection:
            event = Event.now(Clock(), "batch.completed", {"id": "batch_1"})
            callback_id = await enqueue(connection, event, team_id=team_id, url=URL)
        await database.close()
        return callback_id

    return asyncio.run(run())


def test_a_team_has_a_webhook(admin: httpx.Client, team_id: str) -> None:
    """Set, shown, changed, taken away; its one form is what is kept."""
    shown = [admin.get(f"/admin/teams/{team_id}").json()["webhook_url"]]
    for url in ("HTTPS://93.184.216.34:443/a", URL, None):
        shown.append(admin.patch(f"/admin/teams/{team_id}", json={"webhook_url": url}).json()["webhook_url"])
    made = admin.post("/admin/teams", json={"id": f"{team_id}-2", "webhook_url": URL}).json()

    assert shown == [None, "https://93.184.216.34/a", URL, None]
    assert made["webhook_url"] == URL


@pytest.mark.parametrize(
    "url",
    [
        "http://93.184.216.34/",
        "https://127.0.0.1/",
        "https://localhost/",
        "https://[::ffff:10.0.0.1]/",
        "https://169.254.169.254/latest/meta-data",
        "https://0x7f.1/",
        "https://a@93.184.216.34/",
        "https://93.184.216.34:22/",
        "",
    ],
)
def test_a_webhook_leads_outside_or_is_refused(admin: httpx.Client, team_id: str, url: str) -> None:
    """At its setting already, with words that say why, and nothing is changed."""
    changed = admin.patch(f"/admin/teams/{team_id}", json={"webhook_url": url, "name": "changed"})
    made = admin.post("/admin/teams", json={"id": f"{team_id}-2", "webhook_url": url})

    for answer in (changed, made):
        error = answer.json()["error"]
        assert (answer.status_code, error["param"], error["code"]) == (400, "webhook_url", "invalid_callback_url")
    assert admin.get(f"/admin/teams/{team_id}").json()["name"] != "changed"
    assert admin.get(f"/admin/teams/{team_id}-2").status_code == 404


def test_two_secrets_may_be_valid(admin: httpx.Client, team_id: str) -> None:
    """Each is shown once; a third is refused until one is deleted."""
    path = f"/admin/teams/{team_id}/webhook-secrets"
    first, second = (admin.post(path).json() for _ in range(2))
    third = admin.post(path)
    listed = admin.get(path).json()
    deleted = [admin.delete(f"{path}/{first['id']}") for _ in range(2)]
    fourth = admin.post(path)

    assert first["secret"].startswith("whsec_") and first["secret"] != second["secret"]
    assert (third.status_code, third.json()["error"]["code"]) == (409, "too_many_webhook_secrets")
    assert first["id"] in third.json()["error"]["message"]
    assert [one["id"] for one in listed["data"]] == [first["id"], second["id"]]
    assert all(one.keys() == {"object", "id", "team_id", "created_at"} for one in listed["data"])
    assert [answer.status_code for answer in deleted] == [200, 404]
    assert fourth.status_code == 201


def test_the_outbox_is_shown_in_pages(admin: httpx.Client, house: House, team_id: str) -> None:
    """Newest first, of one team; its URLs without what may be secret."""
    ids = [put(house, team_id) for _ in range(3)][::-1]
    first = admin.get("/admin/callbacks", params={"team_id": team_id, "limit": 2}).json()
    rest = admin.get("/admin/callbacks", params={"team_id": team_id, "after": first["data"][-1]["id"]}).json()
    one = admin.get(f"/admin/callbacks/{ids[0]}").json()
    none = admin.get("/admin/callbacks", params={"team_id": team_id, "state": "undelivered"}).json()

    assert (first["has_more"], rest["has_more"]) == (True, False)
    assert sorted(each["id"] for each in first["data"] + rest["data"]) == sorted(ids)
    facts: dict[str, Any] = {name: one[name] for name in ("team_id", "event", "url", "state", "tries", "last_status")}
    assert facts == {
        "team_id": team_id,
        "event": "batch.completed",
        "url": "https://93.184.216.34/…",
        "state": "pending",
        "tries": 0,
        "last_status": None,
    }
    assert none["data"] == []
    assert admin.get("/admin/callbacks", params={"state": "new"}).status_code == 400
    assert admin.get("/admin/callbacks", params={"team_id": "nobody"}).status_code == 404


def test_a_callback_can_be_delivered_again(admin: httpx.Client, house: House, team_id: str) -> None:
    """It is due at once; who asked for it is in the audit log; an unknown one is a 404."""
    callback_id = put(house, team_id)
    answer = admin.post(f"/admin/callbacks/{callback_id}/redeliver")
    acts = admin.get("/admin/audit-log", params={"team_id": team_id, "action": "callback.redelivered"}).json()["data"]

    assert (answer.status_code, answer.json()["state"]) == (202, "pending")
    assert [act["subject"] for act in acts] == [callback_id]
    assert admin.post("/admin/callbacks/evt_unknown/redeliver").status_code == 404
