# What finance asks beyond the daily figures: spend by user and by tag, dollars per million tokens, what the same tokens
# would have cost elsewhere, and the report of the whole deployment.

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import pytest

from tests.support.house import House
from tests.support.paying_team import PayingTeam, today


@pytest.fixture
def team(house: House) -> Iterator[PayingTeam]:
    """A team that nobody else uses."""
    return PayingTeam(house)


def at_large(usage: dict[str, Any]) -> Decimal:
    """Return what one answer's tokens cost at the large model's five and twenty dollars per million."""
    return Decimal(usage["prompt_tokens"] * 5 + usage["completion_tokens"] * 20) / 1_000_000


def decimal(value: float) -> Decimal:
    return Decimal(str(value))


def test_spend_is_shown_by_user_and_by_tag(team: PayingTeam) -> None:
    """Each user and each value of a tag has its line, the dearest first; calls without it have one together."""
    team.ask("large", user="ann", metadata={"project": "red"})
    team.ask("small", user="bob", metadata={"project": "red", "stage": "test"})
    team.ask("small")
    team.settled()

    by_user = team.usage(group_by="user").json()
    by_tag = team.usage(group_by="metadata:project").json()
    by_both = team.usage(group_by="metadata:stage,model").json()

    assert by_user["group_by"] == "user"
    assert by_user["results"][0]["user"] == "ann"
    assert {line["user"]: line["requests"] for line in by_user["results"]} == {"ann": 1, "bob": 1, None: 1}
    assert {line["metadata:project"]: line["requests"] for line in by_tag["results"]} == {"red": 2, None: 1}
    assert {(line["metadata:stage"], line["model"]) for line in by_both["results"]} == {
        ("test", "small"),
        (None, "small"),
        (None, "large"),
    }
    for report in (by_user, by_tag, by_both):
        assert sum(decimal(line["cost_usd"]) for line in report["results"]) == team.cost
        assert decimal(report["total"]["cost_usd"]) == team.cost
        assert {line["others"] for line in report["results"]} == {0}


def test_a_tag_is_never_a_formula(team: PayingTeam) -> None:
    """What a caller wrote cannot run in the spreadsheet of whoever opens the report."""
    team.ask(user='=HYPERLINK("http://x","y")')
    team.settled()

    answer = team.usage(group_by="user", format="csv")

    [row] = csv.DictReader(io.StringIO(answer.text, newline=""))
    assert row["user"] == '\'=HYPERLINK("http://x","y")'
    assert answer.text.endswith("\r\n")
    assert Decimal(row["cost_usd"]) == team.cost


def test_the_same_tokens_at_another_model(team: PayingTeam) -> None:
    """By hand: every answer's tokens at the large model's price, beside what was paid, per model and in total."""
    team.ask("small")
    team.ask("large")
    team.settled()

    analysis = team.usage(compare="old-name").json()["analysis"]

    tokens = sum(usage["total_tokens"] for usage in team.said)
    cost = sum((at_large(usage) for usage in team.said), Decimal(0))
    assert analysis["compare"]["model"] == "large"
    assert decimal(analysis["compare"]["cost_usd"]) == cost
    assert decimal(analysis["compare"]["difference_usd"]) == cost - team.cost
    assert decimal(analysis["total"]["usd_per_million_tokens"]) == round(team.cost / tokens * 1_000_000, 6)
    assert [line["model"] for line in analysis["models"]] == ["large", "small"]
    assert [line["share_of_requests"] for line in analysis["models"]] == [0.5, 0.5]
    assert sum(line["share_of_cost"] for line in analysis["models"]) == pytest.approx(1)
    assert "gpu_cost_usd" not in analysis["total"]


def test_what_auto_saved(team: PayingTeam) -> None:
    """What the automatic route answered, at the price of its first large model, less what it cost."""
    team.ask("auto", messages=[{"role": "user", "content": "Hi!"}])
    team.ask("small")
    team.settled()

    analysis = team.usage(analysis="true").json()["analysis"]

    assert "compare" not in analysis
    assert analysis["auto"]["requests"] == 1
    assert decimal(analysis["auto"]["large_cost_usd"]) == at_large(team.said[0])
    assert decimal(analysis["auto"]["saved_usd"]) == at_large(team.said[0]) - Decimal(team.said[0]["cost_usd"])
    assert analysis["would_have_saved"]["requests"] == 0


def test_what_naming_a_large_model_cost(team: PayingTeam, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sample of the calls that named one is judged, and the estimate says how large the sample is."""
    easy = [{"role": "user", "content": "Hi!"}]
    monkeypatch.setattr("gateway.inference.route_chooser.is_sampled", lambda _: False)
    team.ask("large", messages=easy)
    monkeypatch.setattr("gateway.inference.route_chooser.is_sampled", lambda _: True)
    team.ask("old-name", messages=easy)
    team.ask("small", messages=easy)
    team.settled()

    missed = team.usage(analysis="true").json()["analysis"]["would_have_saved"]

    large, alias = (Decimal(usage["cost_usd"]) for usage in team.said[:2])
    at_small = Decimal(team.said[1]["prompt_tokens"] + 2 * team.said[1]["completion_tokens"]) / 1_000_000
    assert (missed["requests"], missed["sample_requests"]) == (2, 1)
    assert decimal(missed["cost_usd"]) == large + alias
    assert decimal(missed["estimated_usd"]) == pytest.approx((alias - at_small) * (large + alias) / alias)


def test_the_plain_report_has_these_fields(team: PayingTeam) -> None:
    """Without the words that ask for more, the answer has the contract's fields, what is owed, and no others."""
    fields = set(team.usage().json())

    assert fields == {
        "team_id",
        "date",
        "requests",
        "blocked",
        "failed",
        "input_tokens",
        "cached_input_tokens",
        "cache_write_tokens",
        "cache_saved_usd",
        "tier_saved_usd",
        "output_tokens",
        "reasoning_tokens",
        "cost_usd",
        "cost_usd_exact",
        "owed_usd",
        "owed_usd_exact",
        "is_closed",
    }


def test_analysis_as_csv_has_a_line_for_each_model(team: PayingTeam) -> None:
    """The same numbers for a spreadsheet; together with other groups it would mean two tables in one."""
    team.ask("small")
    team.settled()

    rows = list(csv.DictReader(io.StringIO(team.usage(compare="large", format="csv").text)))
    both = team.usage(compare="large", format="csv", group_by="key")

    assert [(row["team_id"], row["model"], row["requests"]) for row in rows] == [(team.id, "small", "1")]
    assert Decimal(rows[0]["compared_cost_usd"]) == at_large(team.said[0])
    assert (both.status_code, both.json()["error"]["param"]) == (400, "group_by")


def test_admin_report_adds_up_over_teams(team: PayingTeam, house: House) -> None:
    """Every team and model has a line with its price per million tokens, and the lines make the total."""
    team.ask("small")
    team.ask("large")
    team.settled()
    team.correct(cost_usd="-0.25", model="large")

    with house.client(house.admin_key) as admin:
        report = admin.get("/admin/report", params={"compare": "large"}).raise_for_status().json()
        table = admin.get("/admin/report", params={"compare": "large", "format": "csv"})
        invoiced = admin.get("/admin/report", params={"invoice": "upstream:1000"}).raise_for_status().json()
        unheard = admin.get("/admin/report", params={"invoice": "upstream:1000", "format": "csv"})

    ours = {line["model"]: line for line in report["results"] if line["team_id"] == team.id}
    assert (report["from"], report["to"], report["is_closed"]) == (today(), today(), False)
    assert ours.keys() == {"small", "large"}
    assert sum(decimal(line["cost_usd"]) for line in ours.values()) == team.cost - Decimal("0.25")
    assert decimal(ours["large"]["corrections_usd"]) == Decimal("-0.25")
    for name in ("requests", "input_tokens", "output_tokens", "cost_usd", "gpu_cost_usd", "compared_cost_usd"):
        whole = decimal(report["total"][name])
        assert sum(decimal(line[name]) for line in report["results"]) == whole
        assert sum(decimal(line[name]) for line in report["models"]) == whole
    assert report["compare"]["cost_usd"] == report["total"]["compared_cost_usd"]
    assert sum(decimal(line["cost_usd"]) for line in report["providers"]) == decimal(report["total"]["cost_usd"])
    (ours_of_it,) = (line for line in invoiced["providers"] if line["provider"] == "upstream")
    assert decimal(ours_of_it["difference_usd"]) == 1000 - decimal(ours_of_it["cost_usd"])
    assert (unheard.status_code, unheard.json()["error"]["param"]) == (400, "invoice")
    assert {"instances", "instances_total", "auto", "would_have_saved"} <= report.keys()
    rows = [row for row in csv.DictReader(io.StringIO(table.text)) if row["team_id"] == team.id]
    assert sum(Decimal(row["cost_usd"]) for row in rows) == team.cost - Decimal("0.25")


def test_31_days_by_user_are_answered(team: PayingTeam) -> None:
    """The longest period that is added up call by call, over the border of a month."""
    report = team.usage(**{"group_by": "user", "from": "2026-03-15", "to": "2026-04-14"}).json()

    assert report["results"] == []
    assert report["total"]["requests"] == 0
