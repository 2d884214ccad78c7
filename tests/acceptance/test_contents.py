# Contents of calls: kept for the teams that want them, sealed, for their days; and no reading without a line in the
# audit log.

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest
from sqlalchemy import text

from gateway.accounts import teams
from gateway.accounts.schemas import TeamPatch
from gateway.contents.store import purge_contents
from gateway.core.errors import Conflict
from gateway.core.principals import TeamContents
from gateway.storage.audit_log import Act
from gateway.storage.database import Database
from tests.support.house import House
from tests.support.paying_team import PayingTeam
from tests.support.scripted_upstream import ScriptedUpstream
from tests.support.waiting import until

SAID = "mail ada.lovelace@example.org about the engine"
CHAT = {"model": "small", "messages": [{"role": "user", "content": SAID}], "max_tokens": 8}


@pytest.fixture
def team(house: House) -> PayingTeam:
    """A team whose contents are kept for a week."""
    found = PayingTeam(house)
    keep(house, found, {"keep_days": 7}).raise_for_status()
    return found


def keep(house: House, team: PayingTeam, contents: dict[str, int] | None, **more: Any) -> httpx.Response:
    with house.client(house.admin_key) as admin:
        return admin.patch(f"/admin/teams/{team.id}", json={"contents": contents, **more})


def ask(house: House, team: PayingTeam, path: str = "/v1/chat/completions", **body: Any) -> str:
    """Make a call; return its id."""
    with house.client(team.key) as client:
        answer = client.post(path, json=body or CHAT)
    return answer.headers["x-request-id"]


def contents_of(house: House, team: PayingTeam, request_id: str, key: str | None = None) -> httpx.Response:
    """Read what was kept, once it is."""
    whose = "/v1" if key is None else "/admin"
    path = f"{whose}/calls/{request_id}/contents"
    with house.client(key or team.key) as client:
        until(lambda: client.get(path).status_code != 404)
        return client.get(path)


def read_rows(house: House, statement: str, **values: Any) -> list[Any]:
    async def read() -> list[Any]:
        database = Database(house.settings.database_url)
        async with database.begin() as connection:
            rows = (await connection.execute(text(statement), values)).all()
        await database.close()
        return list(rows)

    return asyncio.run(read())


def purge(house: House, *, days: float) -> None:
    """Purge as in so many days."""

    async def run() -> None:
        database = Database(house.settings.database_url)
        await purge_contents(database, datetime.now(UTC) + timedelta(days=days), house.settings.retention.contents)
        await database.close()

    asyncio.run(run())


@pytest.mark.parametrize("stream", [False, True])
def test_what_a_call_asked_and_got_is_kept_sealed(house: House, team: PayingTeam, *, stream: bool) -> None:
    """Whole and streamed alike: its team reads it, an admin does, and Postgres holds none of it in clear."""
    body = CHAT | {"stream": stream}
    with house.client(team.key) as client:
        answer = client.post("/v1/chat/completions", json=body)
        request_id = answer.headers["x-request-id"]
    pieces = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    wholes = [answer.json()["choices"][0]["message"]] if not stream else []
    deltas = [choice["delta"] for piece in pieces for choice in piece["choices"]]
    said = "".join(one.get("content") or "" for one in (*wholes, *deltas))
    kept = contents_of(house, team, request_id).raise_for_status().json()
    seen = contents_of(house, team, request_id, house.admin_key).json()

    assert said and kept["answer"]["choices"][0]["message"]["content"] == said
    assert kept["request"]["messages"][0]["content"] == SAID
    assert (kept["status"], kept["endpoint"], kept["team_id"]) == ("answered", "chat.completions", team.id)
    assert kept == seen
    with house.client(house.admin_key) as admin:
        new = {"team_id": team.id, "allowed_endpoints": ["realtime"]}
        bound = admin.post("/admin/keys", json=new).raise_for_status().json()["key"]
    with house.client(bound) as page:
        refused = page.get(f"/v1/calls/{request_id}/contents")
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "endpoint_not_allowed")
    [row] = read_rows(house, "SELECT sealed FROM call_contents WHERE request_id = :id", id=request_id)
    assert b"lovelace" not in row.sealed and said.encode() not in row.sealed
    for table in ("usage_records", "audit_log", "refused_calls"):
        held = read_rows(house, f"SELECT CAST(t AS text) AS said FROM {table} AS t WHERE team_id = :team", team=team.id)
        assert not [one for one in held if "lovelace" in one.said]


def test_each_reading_stands_in_the_audit_log(house: House, team: PayingTeam) -> None:
    """Who, which call, in which request, from where and why; by a key of the team and by an admin."""
    request_id = ask(house, team)
    contents_of(house, team, request_id).raise_for_status()
    with house.client(house.admin_key) as admin:
        why = {"x-audit-reason": "ticket 17"}
        read = admin.get(f"/admin/calls/{request_id}/contents", headers=why).raise_for_status()
        log = admin.get("/admin/audit-log", params={"team_id": team.id, "action": "contents.read"}).json()["data"]

    assert {entry["subject"] for entry in log} == {request_id}
    assert log[0]["request_id"] == read.headers["x-request-id"] and log[0]["reason"] == "ticket 17"
    assert log[0]["actor"].startswith("admin:") and log[-1]["actor"] == f"key:{team.key_id}"
    assert all(entry["address"] == "127.0.0.1" for entry in log)
    assert SAID not in json.dumps(log)


def test_nothing_is_kept_of_a_team_that_has_not_asked_for_it(house: House) -> None:
    """Off by default, and a look at it says how it is."""
    team, wanting = PayingTeam(house), PayingTeam(house)
    keep(house, wanting, {"keep_days": 1}).raise_for_status()
    quiet = ask(house, team)
    contents_of(house, wanting, ask(house, wanting)).raise_for_status()  # written after, and there
    with house.client(team.key) as client:
        missing = client.get(f"/v1/calls/{quiet}/contents")

    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "contents_not_found")
    assert read_rows(house, "SELECT 1 FROM call_contents WHERE team_id = :team", team=team.id) == []


def test_who_may_read_them(house: House, team: PayingTeam) -> None:
    """The team, admins and the team's own admin: no other team, no viewer, no operator, no other team's admin."""
    request_id, other = ask(house, team), PayingTeam(house)
    contents_of(house, team, request_id).raise_for_status()
    with house.client(house.admin_key) as admin:

        def key_of(**said: str) -> str:
            return str(admin.post("/admin/admin-keys", json=said).raise_for_status().json()["key"])

        own = key_of(role="team-admin", team_id=team.id)
        foreign = key_of(role="team-admin", team_id=other.id)
        roles = [key_of(role=role) for role in ("viewer", "finance", "operator")]

    def status(key: str, whose: str = "/admin") -> int:
        with house.client(key) as client:
            return client.get(f"{whose}/calls/{request_id}/contents").status_code

    assert status(own) == 200
    assert (status(foreign), status(other.key, "/v1")) == (404, 404)
    assert [status(key) for key in roles] == [403] * 3


def test_they_end_with_their_days_and_with_the_teams_wish(house: House, team: PayingTeam) -> None:
    """Past the team's days the purge erases them; a team that wants none any more has none at once."""
    request_id = ask(house, team)
    contents_of(house, team, request_id).raise_for_status()
    count = "SELECT 1 FROM call_contents WHERE team_id = :team"
    purge(house, days=6.9)
    still = len(read_rows(house, count, team=team.id))
    purge(house, days=7.1)
    past = len(read_rows(house, count, team=team.id))
    contents_of(house, team, ask(house, team)).raise_for_status()
    keep(house, team, None).raise_for_status()

    assert (still, past) == (1, 0)
    assert read_rows(house, count, team=team.id) == []


def test_what_is_too_much_to_erase_at_once_is_not_read_and_does_not_come_back(
    house: House, team: PayingTeam, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A team's wish never takes longer than a moment: the purge erases the rest, and before it has nothing is kept
    again."""
    monkeypatch.setattr(teams, "ERASED_AT_ONCE", 1)
    calls = [ask(house, team) for _ in range(3)]
    for request_id in calls:
        contents_of(house, team, request_id).raise_for_status()

    async def want(contents: TeamContents | None) -> None:
        database = Database(house.settings.database_url)
        async with database, database.begin() as connection:
            await teams.update_team(connection, team.id, TeamPatch(contents=contents), Act("a test", None, None, None))

    asyncio.run(want(None))
    with house.client(team.key) as client:
        told = [client.get(f"/v1/calls/{request_id}/contents").status_code for request_id in calls]
    with pytest.raises(Conflict):
        asyncio.run(want(TeamContents(7)))
    purge(house, days=0)
    asyncio.run(want(TeamContents(7)))

    assert told == [404] * 3
    assert read_rows(house, "SELECT 1 FROM call_contents WHERE team_id = :team", team=team.id) == []


def test_days_are_within_the_deployments_retention(house: House, team: PayingTeam) -> None:
    """More than ``retention.contents`` is refused with what is right."""
    told = keep(house, team, {"keep_days": 31})

    assert told.status_code == 400 and "1 to 30" in told.json()["error"]["message"]


def test_what_a_policy_takes_out_is_kept_without_it(house: House, team: PayingTeam) -> None:
    """Redacted texts are stored redacted; and the message of another dialect in its own words."""
    keep(house, team, {"keep_days": 7}, safety={"input": "flag", "levels": {"contacts": "redact"}}).raise_for_status()
    body = {"model": "small", "max_tokens": 8, "messages": [{"role": "user", "content": SAID}], "system": "Be brief."}
    request_id = ask(house, team, "/v1/messages", **body)
    kept = contents_of(house, team, request_id).json()

    assert kept["endpoint"] == "messages" and kept["request"]["system"] == "Be brief."
    assert "lovelace" not in json.dumps(kept) and "[redacted" in json.dumps(kept["request"])


def test_a_call_that_fails_keeps_what_was_asked(house: House, team: PayingTeam, upstream: ScriptedUpstream) -> None:
    """Nothing answered; the question is what an engineer looks for."""
    upstream.script("status=500", model="large", times=1)
    request_id = ask(house, team, **(CHAT | {"model": "large"}))
    kept = contents_of(house, team, request_id).json()

    assert (kept["status"], kept["answer"]) == ("failed", None)
    assert kept["request"]["messages"][0]["content"] == SAID


def test_a_reader_is_told_where_they_cannot_be_opened(house: House, team: PayingTeam) -> None:
    """A row that was changed opens for no one, and its reading is an error rather than another text."""
    request_id = ask(house, team)
    contents_of(house, team, request_id).raise_for_status()
    change = "UPDATE call_contents SET sealed = set_byte(sealed, 40, get_byte(sealed, 40) # 1) WHERE request_id = :id"
    read_rows(house, f"{change} RETURNING 1", id=request_id)
    told = contents_of(house, team, request_id)

    assert (told.status_code, told.json()["error"]["code"]) == (500, "contents_unreadable")
