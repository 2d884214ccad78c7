# Keys of admins, each with a role: what each may do is what docs/operations/admin-keys.md says, at every route.

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.accounts.guards import ADMIN_GUARDS, team_or_admin_guard
from gateway.core.principals import Role
from gateway.http.routes import HANDLERS
from tests.support.house import House, make_team

PAGE = Path(__file__).parents[2] / "docs" / "operations" / "admin-keys.md"
ROLES = [role for role in Role if role is not Role.ADMIN]
HANDLED: dict[str, Any] = {
    f"{method} {re.sub(':[a-z]+}', '}', path)}": handler
    for handler in HANDLERS
    for path in handler.paths
    for method in handler.http_methods - {"HEAD", "OPTIONS"}
    if handler.guards and handler.guards[0] in (*ADMIN_GUARDS, team_or_admin_guard)
}


def table() -> dict[str, dict[Role, bool]]:
    """Return what the page says that each role may do."""
    found = {}
    for row in PAGE.read_text().partition("## What each role may do")[2].splitlines():
        routes, *said = [cell.strip() for cell in row.strip("|").split("|")]
        for route in re.findall(r"`([A-Z]+ /[^`]+)`", routes) if len(said) == len(ROLES) else ():
            found[route] = {role: word == "yes" for role, word in zip(ROLES, said, strict=True)}
    return found


TABLE = table()
OF_TEAMS = [
    route
    for route in sorted(HANDLED)
    if TABLE.get(route, {}).get(Role.TEAM_ADMIN)
    and ("{team_id}" in route or "team_id" in HANDLED[route].opt.get("query", ()))
]


@pytest.fixture(scope="module")
def other_key(house: House) -> str:
    """A key of another team."""
    return asyncio.run(make_team(house.settings, "team_roles"))


@pytest.fixture(scope="module")
def keys(house: House) -> Iterator[dict[Role, str]]:
    """A key of each role; the team's admin is of team_a."""
    made = {role: make(house, role=role, team_id="team_a" if role is Role.TEAM_ADMIN else None) for role in Role}
    yield {role: one["key"] for role, one in made.items()}
    with house.client(house.admin_key) as admin:
        for one in made.values():
            admin.delete(f"/admin/admin-keys/{one['key_id']}").raise_for_status()


def make(house: House, **new: Any) -> Any:
    with house.client(house.admin_key) as admin:
        answer = admin.post("/admin/admin-keys", json=new)
    assert answer.status_code == 201, answer.text
    return answer.json()


def ask(house: House, key: str, route: str, team: str = "team_a", query: str | None = None) -> httpx.Response:
    """Call a route, about a team where it is about one."""
    method, path = route.split()
    if query is None:
        query = f"?team_id={team}" if "team_id" in HANDLED[route].opt.get("query", ()) else ""
    filled = re.sub("{[a-z_]+}", "nothing", path.replace("{team_id}", team)) + query
    with house.client(key) as client, client.stream(method, filled) as answer:
        if not answer.headers["content-type"].startswith("text/event-stream"):  # which has no end
            answer.read()
        return answer


def test_the_page_has_every_route_that_an_admin_may_call() -> None:
    """A new one without a row, or a row without a route, is found here."""
    assert set(TABLE) == set(HANDLED)


@pytest.mark.parametrize("route", sorted(HANDLED))
def test_each_role_may_do_what_the_page_says(house: House, keys: dict[Role, str], route: str) -> None:
    """And hears a 403 of all else, which names its own role; the role admin may do everything."""
    for role, may in (TABLE[route] | {Role.ADMIN: True}).items():
        answer = ask(house, keys[role], route)
        assert (answer.status_code == 403) == (not may), (role, answer.text)
        assert may or f"key's is {role}" in answer.json()["error"]["message"]
        assert answer.status_code < 500


@pytest.mark.parametrize("route", OF_TEAMS)
def test_a_teams_admin_sees_no_other_team(house: House, keys: dict[Role, str], other_key: str, route: str) -> None:
    """Whether it is named in the path or the query, beside its own, or not at all."""
    key = keys[Role.TEAM_ADMIN]
    answers = [ask(house, key, route, team="team_roles")]
    if "{team_id}" not in route:
        answers += [ask(house, key, route, query=said) for said in ("", "?team_id=team_a&team_id=team_roles")]

    assert {answer.status_code for answer in answers} == {403}
    assert all("'team_a'" in answer.json()["error"]["message"] for answer in answers)


def test_a_teams_admin_sees_no_cost_of_the_operators(house: House, keys: dict[Role, str]) -> None:
    """What the GPUs of the deployment cost is no more for it than for a team's key; a viewer sees it."""
    asked = {"team_id": "team_a", "metric": "gpu_cost_usd"}
    with house.client(keys[Role.TEAM_ADMIN]) as client, house.client(keys[Role.VIEWER]) as viewer:
        answers = [each.get("/admin/series", params=asked) for each in (client, viewer)]
        usages = [each.get("/v1/usage", params={"team_id": "team_a", "analysis": "true"}) for each in (client, viewer)]

    assert [answer.status_code for answer in (*answers, *usages)] == [400, 200, 200, 200]
    assert ["gpu_" in answer.text for answer in usages] == [False, True]


def test_a_teams_admin_handles_the_keys_of_that_team_alone(house: House, keys: dict[Role, str], other_key: str) -> None:
    """It makes, shows, rotates and revokes them; those of others are not there."""
    with house.client(house.admin_key) as admin:
        others = admin.get("/admin/keys", params={"team_id": "team_roles"}).json()["data"][0]["key_id"]
    with house.client(keys[Role.TEAM_ADMIN]) as client:
        made = client.post("/admin/keys", json={"team_id": "team_a", "name": "ours"})
        own = made.json()["key_id"]
        refused = client.post("/admin/keys", json={"team_id": "team_roles"})
        shown = client.get(f"/admin/keys/{own}")
        rotated = client.post(f"/admin/keys/{own}/rotate", json={"overlap": 0})
        ended = client.delete(f"/admin/keys/{rotated.json()['key_id']}")
        hidden = [client.get(f"/admin/keys/{others}"), client.post(f"/admin/keys/{others}/rotate")]
        hidden.append(client.delete(f"/admin/keys/{others}"))
        hidden.append(client.patch(f"/admin/keys/{others}", json={"limits": {"usd_per_day": 0}}))
        unknown = client.get("/admin/keys/key_" + "0" * 24).json()["error"]

    assert [answer.status_code for answer in (made, refused, shown, rotated, ended)] == [201, 403, 200, 201, 200]
    assert {answer.status_code for answer in hidden} == {404}
    for answer in hidden:
        told = answer.json()["error"]
        assert told["message"].replace(others, "") == unknown["message"].replace("key_" + "0" * 24, "")
        assert told["code"] == unknown["code"]
    with house.client(other_key) as client:
        assert client.get("/v1/models").status_code == 200


def test_no_key_makes_one_with_more_rights(house: House, keys: dict[Role, str]) -> None:
    """Admins alone make admin keys; a team's admin has a team, and no other has."""
    for role in ROLES:
        with house.client(keys[role]) as client:
            assert client.post("/admin/admin-keys", json={"role": "admin"}).status_code == 403
    with house.client(house.admin_key) as admin:
        wrong = [
            admin.post("/admin/admin-keys", json=new)
            for new in ({"role": "team-admin"}, {"role": "viewer", "team_id": "team_a"}, {"role": "root"}, {})
        ]
        missing = admin.post("/admin/admin-keys", json={"role": "team-admin", "team_id": "no_such_team"})

    assert [answer.status_code for answer in wrong] == [400, 400, 400, 400]
    assert "viewer" in wrong[2].json()["error"]["message"] and missing.status_code == 404


def test_a_revoked_key_is_refused_at_once(house: House) -> None:
    """What was done with it stands under its id in the audit log; its record stays, without the key."""
    one = make(house, role="admin", name="of Ada", expires_at="2099-01-01T00:00:00Z")
    with house.client(one["key"]) as client, house.client(house.admin_key) as admin:
        created = client.post("/admin/teams", json={"id": "team_of_ada"})
        told = admin.get("/admin/audit-log", params={"team_id": "team_of_ada"}).json()["data"][0]
        ended = admin.delete(f"/admin/admin-keys/{one['key_id']}").json()
        refused = client.get("/admin/teams")
        (listed,) = [each for each in admin.get("/admin/admin-keys").json()["data"] if each["key_id"] == one["key_id"]]

    assert (created.status_code, refused.status_code) == (201, 401) and one["key"] not in refused.text
    assert told["actor"] == f"admin:{one['key_id']}"
    assert ended == listed and "key" not in listed and listed["created_by"].startswith("admin:")
    assert (listed["status"], listed["role"], listed["name"]) == ("revoked", "admin", "of Ada")
    assert one["prefix"] == one["key"][:16] and listed["expires_at"].startswith("2099-01-01")
