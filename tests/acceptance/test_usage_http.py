# The usage report over HTTP: the tokens and dollars of exactly the calls that were made, to those who may see them.

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest

from tests.support.house import House
from tests.support.paying_team import PayingTeam
from tests.support.waiting import until

SUMS = (
    "requests",
    "blocked",
    "failed",
    "input_tokens",
    "cached_input_tokens",
    "cache_write_tokens",
    "output_tokens",
    "reasoning_tokens",
    "cost_usd",
)


@pytest.fixture
def team(house: House) -> Iterator[PayingTeam]:
    """A team that nobody else uses."""
    return PayingTeam(house)


def today() -> str:
    return datetime.now(UTC).date().isoformat()


def test_report_adds_up_exactly_the_answers(team: PayingTeam) -> None:
    """Tokens and dollars are the sums of what each answer said, to the last nano-dollar."""
    for model in ("small", "large", "small"):
        team.ask(model)

    report = team.settled()

    assert (report["team_id"], report["date"], report["requests"]) == (team.id, today(), 3)
    assert report["input_tokens"] == sum(usage["prompt_tokens"] for usage in team.said)
    assert report["output_tokens"] == sum(usage["completion_tokens"] for usage in team.said)
    assert Decimal(str(report["cost_usd"])) == team.cost > 0
    assert set(SUMS) <= report.keys()
    assert report["is_closed"] is False


def test_cost_is_a_number_with_exact_decimals(team: PayingTeam) -> None:
    """``cost_usd`` is a JSON number whose digits are exactly the nano-dollars, with no float in between."""
    team.ask()
    team.settled()

    raw = team.usage().text

    digits = raw.partition('"cost_usd":')[2].partition(",")[0].partition("}")[0]
    assert Decimal(digits) == team.cost


def test_every_cost_of_a_report_is_also_a_text(team: PayingTeam) -> None:
    """``cost_usd_exact`` says each line's, total's and correction's cost to the nano-dollar, ``owed_usd_exact`` both
    together, in a CSV too."""
    team.ask("small")
    team.ask("large")
    team.correct(cost_usd="-0.000000001").raise_for_status()
    team.settled()

    whole = team.usage(**{"from": today(), "group_by": "model", "analysis": "true"}).json()
    flat = team.usage().json()
    rows = list(csv.DictReader(io.StringIO(team.usage(**{"from": today(), "group_by": "key", "format": "csv"}).text)))

    assert whole["total"]["cost_usd_exact"] == flat["cost_usd_exact"] == str(team.cost)
    assert whole["total"]["corrections"]["cost_usd_exact"] == flat["corrections"]["cost_usd_exact"] == "-0.000000001"
    assert sum(Decimal(line["cost_usd_exact"]) for line in whole["results"]) == team.cost
    analysis = whole["analysis"]
    owed = team.cost - Decimal("1e-9")
    assert Decimal(whole["total"]["owed_usd_exact"]) == Decimal(flat["owed_usd_exact"]) == owed
    assert sum(Decimal(line["owed_usd_exact"]) for line in whole["results"]) == owed
    assert sum(Decimal(row["owed_usd"]) for row in rows) == owed and list(rows[0])[-2:] == [
        "owed_usd",
        "owed_usd_exact",
    ]
    assert Decimal(analysis["total"]["cost_usd_exact"]) == owed
    assert sum(Decimal(line["cost_usd_exact"]) for line in analysis["models"]) == owed
    assert {row["key"]: (row["cost_usd_exact"], row["corrections_cost_usd_exact"]) for row in rows} == {
        team.key_id: (str(team.cost), "0"),
        "": ("0.00", "-0.000000001"),
    }


ENDPOINTS = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}]},
    "/v1/completions": {"prompt": "hello"},
    "/v1/embeddings": {"input": "hello"},
    "/v1/messages": {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 20},
}


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("path", ENDPOINTS)
def test_every_body_of_a_call_tells_its_cost_as_a_text(team: PayingTeam, path: str, streams: bool) -> None:
    """Plain or streamed: the decimal text that the usage record has, of the same nano-dollars."""
    body = {"model": "small", **ENDPOINTS[path]}
    if streams and path != "/v1/embeddings":
        body |= {"stream": True} | ({"stream_options": {"include_usage": True}} if path != "/v1/messages" else {})
    with team.house.client(team.key) as client:
        answer = client.post(path, json=body).raise_for_status()
    record = team.house.record_of(answer)

    told = set(re.findall(r'"cost_usd":("[^"]*"|[^,}]*)', answer.text))
    assert told == {json.dumps(record["cost_usd_exact"])}
    assert Decimal(record["cost_usd_exact"]) == Decimal(str(record["cost_usd"])) > 0


def test_team_without_calls_used_nothing(team: PayingTeam) -> None:
    """A day without calls is a report of zeros, not a 404."""
    report = team.usage(date="2026-04-05").json()

    assert report["date"] == "2026-04-05"
    assert [report[name] for name in SUMS] == [0] * len(SUMS)


@pytest.mark.parametrize("group", ["model", "key", "tier", "day"])
def test_groups_add_up_to_the_total(team: PayingTeam, group: str) -> None:
    """However a period is cut up, the parts make the whole."""
    team.ask("small")
    team.ask("large")
    team.settled()

    report = team.usage(**{"from": today(), "to": today(), "group_by": group}).json()

    names = [line[group] for line in report["results"]]
    assert (report["from"], report["to"]) == (today(), today())
    assert (
        names == {"model": ["large", "small"], "key": [team.key_id], "tier": ["interactive"], "day": [today()]}[group]
    )
    for name in SUMS:
        assert sum(Decimal(str(line[name])) for line in report["results"]) == Decimal(str(report["total"][name]))
    assert Decimal(str(report["total"]["cost_usd"])) == team.cost


def test_period_without_groups_goes_day_by_day(team: PayingTeam) -> None:
    """``from`` alone means until today."""
    team.ask()
    team.settled()

    report = team.usage(**{"from": "2026-01-01"}).json()

    assert [line["day"] for line in report["results"]] == [today()]


def test_csv_says_what_json_says(team: PayingTeam) -> None:
    """The same numbers, as a file that finance opens."""
    team.ask("small")
    team.ask("large")
    team.settled()

    answer = team.usage(**{"from": today(), "group_by": "model", "format": "csv"})
    flat = team.usage(format="csv")

    rows = list(csv.DictReader(io.StringIO(answer.text)))
    assert answer.headers["content-type"] == "text/csv; charset=utf-8"
    assert [row["model"] for row in rows] == ["large", "small"]
    assert {row["team_id"] for row in rows} == {team.id}
    assert sum(Decimal(row["cost_usd"]) for row in rows) == team.cost
    (day,) = csv.DictReader(io.StringIO(flat.text))
    assert (day["date"], Decimal(day["cost_usd"]), day["requests"]) == (today(), team.cost, "2")


def test_team_sees_itself_and_an_admin_sees_all(team: PayingTeam, house: House) -> None:
    """Another team's report is a 403, whether that team exists or not; an admin must say whose, and hears 404."""
    theirs = team.usage(team_id=house.team_id)
    nobodys = team.usage(team_id="nobody")
    own = team.usage(team_id=team.id)
    admins = team.usage(house.admin_key, team_id=team.id)
    unknown = team.usage(house.admin_key, team_id="nobody")
    unsaid = team.usage(house.admin_key)

    assert (theirs.status_code, nobodys.status_code) == (403, 403)
    assert theirs.json()["error"].keys() == {"message", "type", "param", "code", "request_id"}
    assert own.status_code == 200
    assert "gpu_cost_usd" not in own.json()
    assert "gpu_cost_usd" in admins.json()
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "team_not_found")
    assert (unsaid.status_code, unsaid.json()["error"]["param"]) == (400, "team_id")


def test_an_admin_sees_all_teams_day_by_day(team: PayingTeam, house: House) -> None:
    """A line for each team and day, which add up; a team and month, or a tag of the calls; within bounds."""
    for _ in range(2):
        team.ask()
    team.settled()
    asked = {"from": today(), "to": today(), "group_by": "team,day"}
    report = team.usage(house.admin_key, **asked).json()
    flat = team.usage(house.admin_key, **asked, format="csv").text
    own = team.usage(team_id=team.id).json()
    months = team.usage(house.admin_key, **{"from": "2026-01-01", "group_by": "team,month"}).json()
    tags = team.usage(house.admin_key, group_by="team,metadata:cost_centre").json()

    [line] = [each for each in report["results"] if each["team"] == team.id]
    assert (line["day"], line["cost_usd"], report["team_id"]) == (today(), own["cost_usd"], None)
    assert sum(each["requests"] for each in report["results"]) == report["total"]["requests"] >= 2
    assert [row["cost_usd"] for row in csv.DictReader(io.StringIO(flat)) if row["team"] == team.id] == [
        str(line["cost_usd_exact"])
    ]
    assert {each["team"] for each in months["results"]} >= {team.id} <= {each["team"] for each in tags["results"]}
    for wrong in ({"group_by": "team,day,model"}, {"group_by": "team,day", "from": "2026-01-01", "to": "2026-03-01"}):
        assert team.usage(house.admin_key, **wrong).status_code == 400


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ({"date": "yesterday"}, "date"),
        ({"date": "2026-02-30"}, "date"),
        ({"date": "20260405"}, "date"),
        ({"date": "2026-04-05", "from": "2026-04-05"}, "date"),
        ({"to": "2026-04-05"}, "from"),
        ({"from": "2026-04-05", "to": "2026-04-04"}, "to"),
        ({"from": "1990-01-01", "to": "2026-04-04"}, "from"),
        ({"group_by": "colour"}, "group_by"),
        ({"group_by": "metadata:"}, "group_by"),
        ({"group_by": f"metadata:{'k' * 65}"}, "group_by"),
        ({"group_by": "model,model"}, "group_by"),
        ({"group_by": "model,"}, "group_by"),
        ({"group_by": "model,key,tier,day"}, "group_by"),
        ({"group_by": "team"}, "group_by"),
        ({"group_by": "user", "from": "2026-03-01", "to": "2026-04-01"}, "from"),
        ({"group_by": "day,metadata:a", "from": "2026-03-01", "to": "2026-04-01"}, "from"),
        ({"compare": "gpt-0"}, "compare"),
        ({"compare": "auto"}, "compare"),
        ({"compare": ""}, "compare"),
        ({"analysis": "yes"}, "analysis"),
        ({"format": "xml"}, "format"),
        ({"team": "team_a"}, "team"),
    ],
)
def test_question_that_makes_no_sense_is_refused(team: PayingTeam, query: dict[str, str], param: str) -> None:
    """A mistake in the question is named, never answered with something else."""
    answer = team.usage(**query)

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_a_team_sees_what_is_used_held_and_left(house: House) -> None:
    """Of its own budgets and its key's: they add up to the limit, and what is used is what the report says."""
    team = PayingTeam(house, usd_per_month=5, tokens_per_day=100_000)
    team.ask()
    team.correct(cost_usd="0.25").raise_for_status()
    used = Decimal(str(team.settled()["cost_usd"]))

    def budgets() -> dict[str, Any]:
        with house.client(team.key) as client:
            return client.get("/v1/team").json()

    until(lambda: Decimal(str(budgets()["budgets"]["usd_this_month"]["used"])) == used + Decimal("0.25"))
    shown = budgets()
    month, day = shown["budgets"]["usd_this_month"], shown["budgets"]["tokens_today"]
    assert sum(Decimal(str(part)) for part in month.values()) == 5
    assert day["used"] == sum(usage["total_tokens"] for usage in team.said) and sum(day.values()) == 100_000
    assert Decimal(str(shown["budgets"]["usd_today"]["used"])) == used + Decimal("0.25")
    assert shown["budgets"]["usd_today"]["left"] is None
    assert Decimal(str(shown["key"]["budgets"]["usd_this_month"]["used"])) == used


def test_team_is_told_whose_key_it_holds(team: PayingTeam) -> None:
    """A key's holder may ask who it is and how much it may use."""
    with team.house.client(team.key) as client:
        shown = client.get("/v1/team").json()

    assert (shown["id"], shown["key"]["key_id"]) == (team.id, team.key_id)
    assert shown["limits"]["usd_per_day"] is None
    assert shown["unavailable"] == {"tokens_today": 0, "usd_today": 0, "usd_this_month": 0}
