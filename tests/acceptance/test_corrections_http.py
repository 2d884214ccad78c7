# Corrections over HTTP: what an admin books shows in the team's report at once and moves its limits with it.

from __future__ import annotations

import uuid
from decimal import Decimal
from typing import Any

import pytest

from tests.support.house import House
from tests.support.paying_team import PayingTeam, today


@pytest.fixture
def team(house: House) -> PayingTeam:
    """A team that nobody else uses, with ten dollars a day."""
    return PayingTeam(house, usd_per_day=10)


def test_a_correction_shows_apart_at_once(team: PayingTeam) -> None:
    """The day's figures stay as the calls made them; what was booked stands beside them, in every shape and is owed."""
    team.ask()
    before = team.settled()

    booked = team.correct(cost_usd=-0.000000001, input_tokens=-3, model="small", reason="tokens counted twice")

    after = team.usage().json()
    lines = team.usage(date=today(), group_by="model").json()["results"]
    late = after.pop("corrections")
    owed, was = ({name: told.pop(name) for name in ("owed_usd", "owed_usd_exact")} for told in (after, before))
    assert booked.status_code == 201
    assert after == before
    assert {Decimal(str(owed[name])) - Decimal(str(was[name])) for name in owed} == {Decimal("-1e-9")}
    assert (late["entries"], late["input_tokens"], Decimal(str(late["cost_usd"]))) == (1, -3, Decimal("-1e-9"))
    assert lines[0]["model"] == "small" and lines[0]["corrections"] == late
    assert "corrections_cost_usd" in team.usage(format="csv").text.splitlines()[0]


def test_limits_follow_a_correction(team: PayingTeam) -> None:
    """Booked spend counts against the team's limit, and what is given back can be spent again."""
    team.correct(cost_usd="10").raise_for_status()
    with team.house.client(team.key) as client:
        body = {"model": "small", "messages": [{"role": "user", "content": "hello"}]}
        refused = client.post("/v1/chat/completions", json=body)
        team.correct(cost_usd="-10").raise_for_status()
        answered = client.post("/v1/chat/completions", json=body)

    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "insufficient_quota")
    assert answered.status_code == 200


def test_repeating_a_request_books_and_counts_once(team: PayingTeam) -> None:
    """The caller's id makes a repetition safe, for the books and for the limits; another content is a conflict."""
    said = {"id": str(uuid.uuid4()), "cost_usd": "6"}

    answers = [team.correct(**said) for _ in range(3)]
    conflict = team.correct(**said | {"cost_usd": "7"})

    team.ask()  # three times six dollars would have left no room
    assert [answer.status_code for answer in answers] == [201, 201, 201]
    assert answers[0].content == answers[1].content == answers[2].content
    assert answers[0].json()["id"] == said["id"]
    assert (conflict.status_code, conflict.json()["error"]["code"]) == (409, "correction_exists")
    assert team.usage().json()["corrections"]["entries"] == 1


def test_a_call_is_corrected_by_its_id(team: PayingTeam) -> None:
    """The x-request-id of an answer is enough to say whose call, which day, model and key it was."""
    with team.house.client(team.key) as client:
        body = {"model": "small", "messages": [{"role": "user", "content": "hello"}], "user": "ann"}
        request_id = client.post("/v1/chat/completions", json=body).headers["x-request-id"]
    team.said.append({})
    team.settled()

    booked = team.correct(team_id=None, date=None, request_id=request_id).json()
    users = team.usage(group_by="user").json()["results"]

    assert (booked["team_id"], booked["date"], booked["model"]) == (team.id, today(), "small")
    assert (booked["key_id"], booked["request_id"]) == (team.key_id, request_id)
    assert [(line["user"], line["corrections"]["entries"]) for line in users] == [("ann", 1)]


def test_corrections_are_listed(team: PayingTeam) -> None:
    """Newest first, by team and by the days that are corrected, a page at a time."""
    ids = [team.correct(date=day).json()["id"] for day in ("2026-03-31", "2026-04-01", "2026-04-02")]
    with team.house.client(team.house.admin_key) as admin:

        def listed(**query: Any) -> list[str]:
            answer = admin.get("/admin/corrections", params={"team_id": team.id, **query}).raise_for_status().json()
            return [one["id"] for one in answer["data"]]

        assert listed() == ids[::-1]
        assert listed(**{"from": "2026-04-01", "to": "2026-04-01"}) == [ids[1]]
        assert listed(limit=1, before=ids[2]) == [ids[1]]
        assert admin.get("/admin/corrections", params={"team_id": "nobody"}).status_code == 404
        assert admin.get("/admin/corrections", params={"from": "soon"}).json()["error"]["param"] == "from"
        assert admin.get("/admin/corrections", params={"before": "1"}).json()["error"]["param"] == "before"


def test_a_team_cannot_correct_its_own_books(team: PayingTeam) -> None:
    """Corrections are for admins, to write and to read."""
    with team.house.client(team.key) as client:
        said = {"team_id": team.id, "date": today(), "cost_usd": "-1", "reason": "please"}
        written = client.post("/admin/corrections", json=said)
        read = client.get("/admin/corrections")

    assert (written.status_code, read.status_code) == (403, 403)
    assert "corrections" not in team.usage().json()


@pytest.mark.parametrize(
    ("said", "status", "param"),
    [
        ({"cost_usd": "a dollar"}, 400, "cost_usd"),
        ({"cost_usd": True}, 400, "cost_usd"),
        ({"cost_usd": None}, 400, "cost_usd"),
        ({"cost_usd": "1e-10"}, 400, "cost_usd"),
        ({"input_tokens": 1.5}, 400, "input_tokens"),
        ({"reason": None}, 400, "reason"),
        ({"date": 20260405}, 400, "date"),
        ({"date": "2999-01-01"}, 400, "date"),
        ({"team_id": "nobody"}, 404, "team_id"),
        ({"amount": 1}, 400, None),
    ],
)
def test_a_faulty_correction_is_refused_by_its_field(
    team: PayingTeam, said: dict[str, Any], status: int, param: str | None
) -> None:
    """A mistake in money is named and nothing is booked."""
    answer = team.correct(**said)

    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)
    assert "corrections" not in team.usage().json()
