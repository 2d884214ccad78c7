# A team's calls, one by one: what each cost and why one was refused, to those who may see them, soon and page by page.

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any

import httpx
import pytest

from gateway.accounts.schemas import LimitsInput
from gateway.overload.read_limit import ReadLimit
from tests.support.house import House, make_team
from tests.support.paying_team import PayingTeam
from tests.support.scripted_upstream import ScriptedUpstream

SAID = "a-secret-that-a-user-wrote"
CHAT = "/v1/chat/completions"


@pytest.fixture
def team(house: House) -> Iterator[PayingTeam]:
    """A team that nobody else uses."""
    return PayingTeam(house)


def ask(client: httpx.Client, **more: Any) -> httpx.Response:
    said = {"model": "small", "messages": [{"role": "user", "content": SAID}], "max_tokens": 8, **more}
    return client.post(CHAT, json=said)


def calls(client: httpx.Client, path: str = "/v1/calls", **query: Any) -> dict[str, Any]:
    answer = client.get(path, params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


def within_two_seconds(is_there: Callable[[], Any]) -> Any:
    """Wait for what a call leaves, as long as the promise says, and longer on a machine that stands still."""
    until = time.monotonic() + 10
    while not (found := is_there()) and time.monotonic() < until:
        time.sleep(0.2)
    return found


def test_a_call_shows_with_its_cost_and_all_that_is_known_of_it(house: House, team: PayingTeam) -> None:
    """In the list and alone, by the id of its answer."""
    with house.client(team.key) as client:
        asked = ask(client, user="u1", metadata={"project": "search"})
        request_id = asked.headers["x-request-id"]
        assert within_two_seconds(lambda: client.get(f"/v1/calls/{request_id}").status_code == 200)
        page, call = calls(client), client.get(f"/v1/calls/{request_id}").json()

    assert [each["request_id"] for each in page["data"]] == [request_id] and page["next"] is None
    assert page["data"][0].items() <= call.items()
    cost = Decimal(asked.json()["usage"]["cost_usd"])
    assert (call["status"], call["code"], call["model_used"], Decimal(call["cost_usd_exact"])) == (
        *("answered", None, "small"),
        cost,
    )
    assert (call["user_tag"], call["metadata"]) == ("u1", {"project": "search"})
    assert sum(Decimal(str(line["cost_usd"])) for line in call["price"]["lines"]) == cost
    assert [attempt["outcome"] for attempt in call["attempts"]] == ["ok"]
    assert call["times_ms"]["total"] >= call["times_ms"]["first_token"] > 0
    assert call["held"]["tokens"] >= call["input_tokens"] + call["output_tokens"]
    assert SAID not in str(call)


def test_refused_calls_say_why(house: House) -> None:
    """The limit, the code, what was told and what is right; no row, no cost, and nothing of what was asked."""
    limits = LimitsInput(usd_per_day=0)
    key = asyncio.run(make_team(house.settings, f"broke_{time.time_ns()}", limits))
    with house.client(key) as client:
        refused = [ask(client), ask(client, model="nothing"), ask(client, temperature=9), ask(client, model=5)]
        ids = [answer.headers["x-request-id"] for answer in refused]
        assert within_two_seconds(lambda: len(calls(client)["data"]) == 4)
        page = calls(client, status="refused")
        one = client.get(f"/v1/calls/{ids[0]}").json()

    told = {call["request_id"]: call for call in page["data"]}
    assert list(told) == sorted(ids, reverse=True)
    assert [
        (told[each]["status"], told[each]["code"], told[each]["http_status"], told[each]["model_asked"]) for each in ids
    ] == [
        ("refused", "insufficient_quota", 429, "small"),
        ("refused", "model_not_found", 404, "unknown"),
        ("refused", "invalid_value", 400, "small"),
        ("refused", "invalid_type", 400, None),
    ]
    assert (one["limit"], one["cost_usd"]) == ("team.usd_per_day", 0)
    assert [told[each]["message"] for each in ids] == [
        refused[0].json()["error"]["message"],
        "That model does not exist; GET /v1/models lists those that do.",
        "It must be from 0 to 2.",
        "Expected string, got integer.",
    ]
    assert "try again" in one["advice"] and all(call["advice"] for call in page["data"])
    assert told[ids[2]]["param"] == "temperature"
    assert SAID not in str(page)


def test_no_word_of_a_caller_is_kept(house: House) -> None:
    """A team of few models that asks for another by a name of its own finds which it may use, and not the name."""
    key = asyncio.run(make_team(house.settings, f"few_{time.time_ns()}", allowed_models=["small"]))
    with house.client(key) as client:
        refused = ask(client, model=SAID)
        assert within_two_seconds(lambda: calls(client)["data"])
        page = calls(client)

    assert refused.status_code == 403 and SAID in refused.text
    assert page["data"][0]["code"] == "model_not_allowed"
    assert page["data"][0]["message"].startswith("This team may not use that model; it may use small (")
    assert SAID not in str(page)


def test_a_failed_call_shows_once_with_its_code(house: House, team: PayingTeam, upstream: ScriptedUpstream) -> None:
    """It has a row, and an error that its caller was told."""
    upstream.script("status=500", times=20)
    try:
        with house.client(team.key) as client:
            failed = ask(client)
            assert failed.status_code == 502
            assert within_two_seconds(lambda: any(call["code"] for call in calls(client)["data"]))
            [call] = calls(client)["data"]
            assert calls(client, status="refused")["data"] == []
            assert calls(client, status="failed")["data"] == calls(client, model="small")["data"] == [call]
            assert ask(client, user="u9").status_code == 502
            assert within_two_seconds(
                lambda: [each["code"] for each in calls(client, user="u9")["data"]] == [call["code"]]
            )
    finally:
        upstream.forget()

    assert (call["request_id"], call["status"], call["code"]) == (
        *(failed.headers["x-request-id"], "failed"),
        failed.json()["error"]["code"],
    )


def test_pages_meet(house: House, team: PayingTeam) -> None:
    """Refused and answered ones in one order, none twice, none left out; also among those that are chosen."""
    with house.client(team.key) as client:
        made = [
            ask(client, model=name).headers["x-request-id"] for name in ("small", "nothing", "large", "small", "no")
        ]
        assert within_two_seconds(lambda: len(calls(client)["data"]) == 5)
        found: list[str] = []
        page = calls(client, limit=2)
        while True:
            found += [call["request_id"] for call in page["data"]]
            if page["next"] is None:
                break
            page = calls(client, limit=2, after=page["next"])
        small = calls(client, model="small", limit=1)
        second = calls(client, model="small", limit=1, after=small["next"])

    assert found == sorted(made, reverse=True)
    assert [small["data"][0]["request_id"], second["data"][0]["request_id"]] == [made[3], made[0]]
    assert second["next"] is None


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ({"model": "large"}, [1]),
        ({"status": "answered"}, [1, 0]),
        ({"user": "u1"}, [0]),
        ({"metadata": "project:search"}, [0]),
        ({"min_cost_usd": "0.000000001"}, [1, 0]),
        ({"min_cost_usd": "5"}, []),
        ({"min_ms": "1"}, [1, 0]),
        ({"min_ms": "3600000"}, []),
        ({"key": "key_another"}, []),
        ({"key": "own"}, [1, 0]),
        ({"route_reason": "named"}, [1, 0]),
        ({"route_reason": "auto_small"}, []),
        ({"from": "2020-01-01", "to": "2020-12-31"}, []),
    ],
)
def test_calls_are_chosen(chosen: tuple[House, str, list[str]], query: dict[str, str], expected: list[int]) -> None:
    """By what their rows say."""
    house, key, made = chosen
    with house.client(key) as client:
        if query.get("key") == "own":
            query = {"key": client.get("/v1/team").json()["key"]["key_id"]}
        assert [call["request_id"] for call in calls(client, **query)["data"]] == [made[place] for place in expected]


@pytest.fixture(scope="module")
def chosen(house: House) -> tuple[House, str, list[str]]:
    team = PayingTeam(house)
    with house.client(team.key) as client:
        tagged = ask(client, user="u1", metadata={"project": "search"})
        made = [tagged, ask(client, model="large")]
        assert within_two_seconds(lambda: len(calls(client)["data"]) == 2)
    return house, team.key, [answer.headers["x-request-id"] for answer in made]


def test_nobody_sees_another_teams(house: House, team: PayingTeam, chosen: tuple[House, str, list[str]]) -> None:
    """Its calls are a 404; an admin sees all, or one team's."""
    other = chosen[2][0]
    with house.client(team.key) as client:
        assert (client.get(f"/v1/calls/{other}").status_code, calls(client)["data"]) == (404, [])
        assert client.get(f"/v1/calls/{other}").json()["error"]["code"] == "call_not_found"
        assert client.get("/v1/calls/nothing").status_code == 404
    with house.client(house.admin_key) as admin:
        team_id = admin.get(f"/admin/calls/{other}").json()["team_id"]
        listed = calls(admin, "/admin/calls", team_id=team_id)["data"]
        everyone = calls(admin, "/admin/calls")["data"]
    assert [call["request_id"] for call in listed] == chosen[2][::-1]
    assert len(everyone) == 50 or {*chosen[2]} <= {call["request_id"] for call in everyone}


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ({"to": "9999-12-31"}, "to"),
        ({"limit": "0"}, "limit"),
        ({"limit": "201"}, "limit"),
        ({"after": "x"}, "after"),
        ({"status": "odd"}, "status"),
        ({"from": "yesterday"}, "from"),
        ({"from": "2026-02-01", "to": "2026-01-01"}, "to"),
        ({"from": "2020-01-01"}, "from"),
        ({"metadata": "search"}, "metadata"),
        ({"min_cost_usd": "much"}, "min_cost_usd"),
        ({"min_ms": "1.5"}, "min_ms"),
        ({"min_cost_usd": "-1"}, "min_cost_usd"),
        ({"min_cost_usd": "nan"}, "min_cost_usd"),
        ({"odd": "1"}, "odd"),
        ({"team_id": "x"}, "team_id"),
    ],
)
def test_what_is_wrong_is_named(house: House, wrong: PayingTeam, query: dict[str, str], param: str) -> None:
    """As a 400."""
    with house.client(wrong.key) as client:
        refused = client.get("/v1/calls", params=query)

    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


@pytest.fixture(scope="module")
def wrong(house: House) -> PayingTeam:
    return PayingTeam(house)


def test_reading_costs_no_call_its_place(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """A team at one request a minute reads as it likes, up to a limit of reading; its call then is let in."""
    monkeypatch.setattr(ReadLimit, "at_once", 3.0)
    monkeypatch.setattr(ReadLimit, "a_second", 0.01)  # however slow the machine is, the fourth comes too soon
    key = asyncio.run(make_team(house.settings, f"reader_{time.time_ns()}", LimitsInput(requests_per_minute=1)))
    with house.client(key) as client:
        read = [client.get("/v1/calls") for _ in range(4)]
        asked = ask(client)

    assert [answer.status_code for answer in read] == [200, 200, 200, 429]
    assert read[-1].json()["error"]["code"] == "rate_limit_exceeded" and 0 < int(read[-1].headers["retry-after"]) <= 100
    assert asked.status_code == 200
