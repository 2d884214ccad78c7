# Every route is denied unless its guard says otherwise. This walks all of them.

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from gateway.accounts.guards import ADMIN_GUARDS, GUARDS, metrics_guard, open_guard, team_guard, team_or_admin_guard
from gateway.http.routes import HANDLERS
from tests.support.house import METRICS_KEY, House, make_team

ROUTES = [
    (method, path, handler.guards[0])
    for handler in HANDLERS
    for path in sorted(handler.paths)  # a set, and each process of the tests has its own order
    for method in sorted(handler.http_methods - {"HEAD", "OPTIONS"})
]


@pytest.fixture(scope="module")
def other_key(house: House) -> str:
    """A key of another team."""

    return asyncio.run(make_team(house.settings, "team_b"))


def test_every_handler_has_exactly_one_of_our_guards() -> None:
    """A route without a guard would be open to all."""
    assert [handler for handler in HANDLERS if len(handler.guards or ()) != 1 or handler.guards[0] not in GUARDS] == []


def call(house: House, method: str, path: str, key: str | None) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    filled = path
    for part in path.split("/"):
        if part.startswith("{"):
            filled = filled.replace(part, "team_a" if part.startswith("{team") else "nothing")
    with httpx.Client(base_url=house.url, timeout=10) as client:
        with client.stream(method, filled, headers=headers) as answer:
            if not answer.headers.get("content-type", "").startswith("text/event-stream"):  # which does not end
                answer.read()
            return answer


@pytest.mark.parametrize(("method", "path", "guard"), ROUTES, ids=[f"{m} {p}" for m, p, _ in ROUTES])
def test_a_route_lets_in_whom_its_guard_names(house: House, other_key: str, method: str, path: str, guard: Any) -> None:
    """No key, a team's, another team's, an admin's and a scraper's, at every route: who may not come in hears so."""
    nobody = call(house, method, path, None)
    team = call(house, method, path, house.team_key)
    other = call(house, method, path, other_key)
    admin = call(house, method, path, house.admin_key)
    scraper = call(house, method, path, METRICS_KEY)

    refused = {401, 403}
    assert (nobody.status_code == 401) == (guard is not open_guard)
    assert (team.status_code in refused) == (guard in ADMIN_GUARDS)
    assert (admin.status_code in refused) == (guard is team_guard)
    assert (scraper.status_code in refused) == (guard not in (metrics_guard, open_guard))
    assert (
        guard is team_or_admin_guard or guard is open_guard or (other.status_code in refused) == (guard in ADMIN_GUARDS)
    )
    for answer in (nobody, team, other, admin, scraper):
        assert answer.status_code < 500
        assert answer.headers["x-request-id"]
        if answer.status_code >= 400:
            keys = {"message", "type", "param", "code", "request_id"}
            if path.startswith(("/v1/messages", "/mcp/")):
                keys = {"message", "code", "data"} if path.startswith("/mcp/") else {"message", "type"}
            assert answer.json()["error"].keys() == keys
