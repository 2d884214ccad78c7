# A team's calls over time: what was answered and refused shows soon, to those who may see it.

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from gateway.accounts.schemas import LimitsInput
from gateway.overload.read_limit import ReadLimit
from tests.support.house import House, make_team
from tests.support.paying_team import PayingTeam

CHAT = "/v1/chat/completions"


def ask(client: httpx.Client, **more: Any) -> httpx.Response:
    said = {"model": "small", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, **more}
    return client.post(CHAT, json=said)


def totals(client: httpx.Client, path: str = "/v1/series", **query: Any) -> dict[str, Any]:
    """Return the total of each metric, and with ``by`` those of each line."""
    answer = client.get(path, params=query)
    assert answer.status_code == 200, answer.text
    body = answer.json()
    lines = {line[query["by"]]: _totals(line) for line in body["data"]} if "by" in query else {}
    return _totals(body["total"]) | lines


def _totals(line: dict[str, Any]) -> dict[str, Any]:
    return {name: shown["total"] for name, shown in line.items() if isinstance(shown, dict)}


def within_two_seconds(is_there: Callable[[], bool]) -> bool:
    """Wait for what a call leaves, as long as the promise says, and longer on a machine that stands still."""
    until = time.monotonic() + 10
    while not (found := is_there()) and time.monotonic() < until:
        time.sleep(0.2)
    return found


def test_calls_and_refusals_show_by_the_minute(house: House) -> None:
    """Answered ones with cost and times, each model a line; refused ones by their code, though a flood is logged in
    part; another team has none of it, an admin all."""
    team = PayingTeam(house)
    with house.client(team.key) as client, house.client(house.admin_key) as admin:
        assert [ask(client, model=name).status_code for name in ("small", "large", "small")] == [200] * 3
        refused = [ask(client, model="nothing").status_code for _ in range(12)] + [ask(client, n=0).status_code]
        assert refused == [404] * 12 + [400]
        asked = {"metric": "requests,refused,cost_usd,tokens,first_token_ms", "step": "minute"}
        assert within_two_seconds(lambda: totals(client, **asked).items() >= {"requests": 3, "refused": 13}.items())
        found = totals(client, **asked, by="model")
        codes = totals(client, metric="refused", by="code")
        usage = client.get("/v1/usage").json()
        team_id = usage["team_id"]
        seen = totals(admin, "/admin/series", **asked, team_id=team_id)
        everyone = totals(admin, "/admin/series", metric="requests,gpu_cost_usd", by="team", top="50")

    assert (found["requests"], found["cost_usd"]) == (usage["requests"], usage["cost_usd"])
    assert found["tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert found["first_token_ms"] > 0 and found["small"]["requests"] == 2 and found["large"]["requests"] == 1
    assert found["unknown"]["refused"] == 12
    assert sorted(codes[name]["refused"] for name in codes if name != "refused") == [1, 12]
    assert seen == {name: found[name] for name in seen}
    assert everyone["requests"] >= 3
    with house.client(PayingTeam(house).key) as other:
        assert totals(other, **asked, by="key") == {
            **dict.fromkeys(("requests", "refused", "cost_usd", "tokens"), 0),
            "first_token_ms": None,
        }


def test_one_request_has_what_the_overview_shows(house: House) -> None:
    """Figures, those of the time before, and for those who see the whole deployment its parts and open breakers."""
    asked = {"metric": "requests,cost_usd", "compare": "before", "health": "true"}
    with house.client(house.admin_key) as admin:
        team_id = house.team_id
        made = admin.post("/admin/admin-keys", json={"role": "team-admin", "team_id": team_id}).json()
        found, ready = admin.get("/admin/series", params=asked).json(), admin.get("/health/ready").json()
        odd = admin.get("/admin/series", params=asked | {"health": "yes"})
        breakers = admin.get("/admin/breakers").json()["breakers"]
        try:
            opened = admin.post(f"/admin/breakers/{breakers[0]['id']}/open").json()
            seen = admin.get("/admin/series", params=asked).json()["breakers"]
        finally:
            house.reset_breakers()
    with house.client(made["key"]) as team_admin:
        own = team_admin.get("/admin/series", params=asked | {"team_id": team_id})

    assert found["before"]["to"] == found["from"] and found["before"]["total"].keys() == {"requests", "cost_usd"}
    assert found["health"]["parts"] == ready["parts"] and found["health"].keys() == ready.keys()
    assert (odd.status_code, odd.json()["error"]["param"]) == (400, "health")
    assert [(one["id"], one["state"]) for one in seen] == [(opened["id"], "open")]
    assert own.status_code == 200 and "health" not in own.json() and "before" in own.json()


@pytest.mark.parametrize(
    ("query", "param"),
    [({}, "metric"), ({"metric": "requests", "team_id": "x"}, "team_id"), ({"metric": "gpu_cost_usd"}, "metric")],
)
def test_what_a_team_may_not_ask_is_named(house: House, query: dict[str, str], param: str) -> None:
    """Another team, what our own GPUs cost, or nothing: a 400."""
    with house.client(PayingTeam(house).key) as client:
        refused = client.get("/v1/series", params=query)
        assert client.get("/admin/series", params={"metric": "requests"}).status_code in (401, 403)

    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


def test_reading_costs_no_call_its_place(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """A team at one request a minute reads as it likes; its call then is let in."""
    monkeypatch.setattr(ReadLimit, "at_once", 3.0)
    monkeypatch.setattr(ReadLimit, "a_second", 0.01)  # however slow the machine is, the fourth comes too soon
    key = asyncio.run(make_team(house.settings, f"charts_{time.time_ns()}", LimitsInput(requests_per_minute=1)))
    with house.client(key) as client:
        read = [client.get("/v1/series?metric=requests").status_code for _ in range(4)]
        asked = ask(client)

    assert read == [200, 200, 200, 429] and asked.status_code == 200
