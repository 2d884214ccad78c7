# One stream of what happens, over HTTP: to admins of all teams, to a team its own; and a watcher that never reads.

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import asyncpg
import httpx
import pytest

from gateway.http.routes import live
from tests.support.house import House
from tests.support.paying_team import PayingTeam

CHAT = "/v1/chat/completions"


def ask(client: httpx.Client, model: str = "small") -> httpx.Response:
    said = {"model": model, "messages": [{"role": "user", "content": "a-secret-that-a-user-wrote"}], "max_tokens": 8}
    return client.post(CHAT, json=said, headers={"x-client-request-id": "own-words"})


class Stream:
    """Events of a live stream, as they come."""

    def __init__(self, answer: httpx.Response) -> None:
        self.answer = answer
        self._lines = answer.iter_lines()

    def until(self, *wanted: tuple[str, str, str]) -> list[dict[str, Any]]:
        """Return the events up to one each of a type whose field has a value."""
        left, events = set(wanted), []
        for line in self._lines:
            if line.startswith("data: "):
                events.append(json.loads(line.removeprefix("data: ")))
                event = events[-1]
                left -= {each for each in left if event["type"] == each[0] and str(event.get(each[1])) == each[2]}
                if not left:
                    break
        return events


@contextmanager
def watching(client: httpx.Client, path: str, **query: str) -> Iterator[Stream]:
    with client.stream("GET", path, params=query, timeout=15) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        yield Stream(answer)


def test_an_admin_watches_everything_and_a_team_its_own(house: House) -> None:
    """Calls with cost and model, refusals with their code, breakers as they are; nothing of what was said."""
    team, other = PayingTeam(house), PayingTeam(house)
    with house.client(house.admin_key) as admin, house.client(team.key) as client, house.client(other.key) as stranger:
        with watching(admin, "/admin/live") as all_of_it, watching(client, "/v1/live") as own:
            breakers = all_of_it.until(("breaker", "model", "small"))
            theirs = ask(stranger).headers["x-request-id"]
            made = ask(client).headers["x-request-id"]
            refused = ask(client, "nothing").headers["x-request-id"]
            seen = all_of_it.until(("call", "request_id", theirs), ("refusal", "request_id", refused))
            mine = own.until(("call", "request_id", made), ("refusal", "request_id", refused))

    assert {event["state"] for event in breakers} == {"closed"}
    [call] = [event for event in mine if event.get("request_id") == made]
    assert (call["type"], call["status"], call["model_used"]) == ("call", "answered", "small")
    assert call["cost_usd"] > 0 and call["created_at"].endswith("Z")
    assert theirs not in str(mine) and {event["type"] for event in mine} == {"call", "refusal"}
    [refusal] = [event for event in seen if event.get("request_id") == refused]
    assert (refusal["code"], refusal["model_asked"]) == ("model_not_found", "unknown")
    assert "secret" not in str(seen) and "own-words" not in str(seen)


def test_who_comes_later_is_not_told_what_is_gone(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """Watchers of the same share what they were told, as long as it is there: a batch that was erased is not."""
    monkeypatch.setattr(live, "LOOK_EVERY", 0.1)
    with house.client(PayingTeam(house).key) as client, watching(client, "/v1/live") as first:
        body = {"model": "small", "messages": [{"role": "user", "content": "Hi"}]}
        batch_id = client.post("/v1/batch", json={"requests": [body]}).raise_for_status().json()["batch_id"]
        first.until(("batch", "batch_id", batch_id))
        asyncio.run(erase(house.settings.database_url, batch_id))
        time.sleep(0.4)  # some looks
        with watching(client, "/v1/live") as second:
            seen = second.until(("call", "request_id", ask(client).headers["x-request-id"]))

    assert [event["type"] for event in seen] == ["call"]


async def erase(url: str, batch_id: str) -> None:
    connection = await asyncpg.connect(url)
    await connection.execute("DELETE FROM batches WHERE id = $1", batch_id)
    await connection.close()


def test_who_may_not_watch_is_refused(house: House) -> None:
    """A team's key sees nothing of others, and a team watches twice at once."""
    with house.client(PayingTeam(house).key) as client:
        assert client.get("/admin/live").status_code == 403
        assert client.get("/v1/live", params={"types": "breaker"}).status_code == 400
        with watching(client, "/v1/live"), watching(client, "/v1/live"):
            time.sleep(0.2)
            assert client.get("/v1/live").status_code == 429


def test_teams_that_watch_leave_an_admin_room(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many they are: who runs the deployment watches, too."""
    monkeypatch.setattr(live, "MOST_WATCHERS", 2)
    monkeypatch.setattr(live, "FOR_ADMINS", 1, raising=False)
    with house.client(PayingTeam(house).key) as one, house.client(PayingTeam(house).key) as other:
        with house.client(house.admin_key) as admin, watching(one, "/v1/live"):
            assert other.get("/v1/live", params={"types": "batch"}, timeout=5).status_code == 429
            with watching(admin, "/admin/live"):
                pass


def test_a_watcher_sees_no_more_than_its_key_lets_it(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key that is revoked, and a team that is suspended, end the streams that they have begun."""
    monkeypatch.setattr(live, "LOOK_EVERY", 0.1)
    team, other = PayingTeam(house), PayingTeam(house)
    with house.client(house.admin_key) as admin, house.client(team.key) as client, house.client(other.key) as suspended:
        made = admin.post("/admin/admin-keys", json={"role": "viewer"}).json()
        with house.client(made["key"]) as viewer, watching(viewer, "/admin/live") as all_of_it:
            with watching(client, "/v1/live") as own, watching(suspended, "/v1/live") as theirs:
                admin.delete(f"/admin/admin-keys/{made['key_id']}").raise_for_status()
                admin.delete(f"/admin/keys/{team.key_id}").raise_for_status()
                admin.patch(f"/admin/teams/{other.id}", json={"suspended": True}).raise_for_status()
                ends = [stream.until(("no", "such", "event"))[-1] for stream in (all_of_it, own, theirs)]

    assert [end["type"] for end in ends] == ["error"] * 3
    assert [end["code"] for end in ends] == ["invalid_api_key", "invalid_api_key", "team_suspended"]


def test_a_watcher_that_never_reads_costs_no_other_anything(house: House) -> None:
    """Calls go on as they did, and another watcher sees all of them."""
    team, address = PayingTeam(house), urlsplit(house.url)
    with socket.create_connection((str(address.hostname), address.port or 80)) as deaf:
        head = f"GET /admin/live HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {house.admin_key}\r\n\r\n"
        deaf.sendall(head.encode())
        with house.client(house.admin_key) as admin, house.client(team.key) as client:
            with watching(admin, "/admin/live", types="call") as stream:
                answers = [ask(client) for _ in range(20)]
                made = [answer.headers["x-request-id"] for answer in answers]
                seen = stream.until(*(("call", "request_id", each) for each in made))

    assert {answer.status_code for answer in answers} == {200}
    assert {*made} <= {event["request_id"] for event in seen if event["type"] == "call"}
