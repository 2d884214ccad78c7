# `tollgate usage` as finance types it, on a real Postgres.

from __future__ import annotations

import asyncio
import csv
import io
import json
from decimal import Decimal
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

import gateway.cli
from billing.core.money import to_nano
from billing.ledger.ledger import insert_records
from gateway.accounts.schemas import NewTeam
from gateway.accounts.teams import create_team
from gateway.core.clock import Clock
from gateway.reports.corrections import NewCorrection, book_correction
from gateway.storage.audit_log import Act
from gateway.storage.database import Database
from tests.support.clock import SetClock
from tests.support.factories import make_record

CONFIG = """\
database_url: {database_url}
redis_url: redis://127.0.0.1:1
admin_keys: [tgadmin-of-the-tests]
key_pepper: pepper of all the tests
providers:
  own: {{format: openai, self_hosted: true, endpoints: [{{region: here, base_url: "http://gpu/v1"}}]}}
  rented: {{format: openai, api_keys: [sk-x], endpoints: [{{region: us, base_url: "https://rented.example/v1"}}]}}
models:
  small: {{provider: own, price: {{input: 1, output: 2}}}}
  large: {{provider: rented, price: {{input: 5, output: 20}}, context: 8192, max_output: 1024, abilities: [chat]}}
routes: {{auto: {{small: [small], large: [large]}}}}
"""
DAY = ("--date", "2026-04-05")


@pytest.fixture(autouse=True)
def house(database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A house with two teams and some calls, which every command finds; tables are printed without cutting lines."""
    file = tmp_path / "tollgate.yaml"
    file.write_text(CONFIG.format(database_url=database_url))
    monkeypatch.setenv("TOLLGATE_CONFIG", str(file))
    monkeypatch.setenv("COLUMNS", "300")
    if not any(group.name == "teams" for group in gateway.cli.app.registered_groups):
        gateway.cli.add_commands()
    asyncio.run(fill(database_url))


async def fill(database_url: str) -> None:
    database = Database(database_url)
    clock = SetClock()
    million = {"input_tokens": 1_000_000, "cached_input_tokens": 0, "output_tokens": 0, "cost_nanousd": to_nano(1)}
    records = [
        make_record(clock.new_id(), **million, model_used="small", user_tag="=ann"),
        make_record(clock.new_id(), **million, model_used="small", model_asked="small"),
        make_record(clock.new_id(), **million, model_used="small", team_id="team_b"),
    ]
    try:
        async with database.begin() as connection:
            for team in ("team_a", "team_b"):
                centre = " 4711 " if team == "team_b" else None
                await create_team(connection, NewTeam(id=team, cost_centre=centre), Act("tests"))
            await insert_records(connection, records, today=clock.today())
            refund = NewCorrection(team_id="team_a", date="2026-04-05", cost_usd=Decimal("-0.25"), reason="a test")
            await book_correction(connection, refund, Act("tests"), Clock(), ["small"])
    finally:
        await database.close()


def usage(*words: str, exits: int = 0) -> Result:
    result = CliRunner().invoke(gateway.cli.app, ["usage", *words])
    assert result.exit_code == exits, result.output
    return result


def test_usage_by_user_is_a_table() -> None:
    """A line for each user and for the calls without one, the total, and what people booked."""
    lines = [line.split() for line in usage("--team", "team_a", *DAY, "--group-by", "user").stdout.splitlines()]

    assert ["=ann", "1", "1000000", "0", "0", "1.00"] in [line[:6] for line in lines]
    assert ["total", "2", "2000000", "0", "0", "1.75"] in [line[:6] for line in lines]
    assert any(line[:1] == ["(none)"] for line in lines)
    assert "Of the cost, corrections: -0.25 USD (0 requests after the day was closed, 1 entries booked" in " ".join(
        word for line in lines for word in line
    )


def test_a_cost_means_one_thing_in_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is owed, corrections included, whatever the lines are; and how much of it corrections are."""
    monkeypatch.delenv("COLUMNS")
    for words in ((), ("--group-by", "team"), ("--group-by", "cost_centre,month"), ("--team", "team_a")):
        rows = list(csv.DictReader(io.StringIO(usage(*DAY, *words).stdout), delimiter="\t"))
        owed = Decimal("1.75") if "--team" in words else Decimal("2.75")

        assert [Decimal(rows[-1][name]) for name in ("cost_usd", "corrections_usd")] == [owed, Decimal("-0.25")]
        assert sum(Decimal(row["cost_usd"]) for row in rows[:-1]) in (0, owed)  # one line is its own total


def test_comparison_is_said_in_words() -> None:
    """Two million tokens at $5 instead of $1: the table, the difference and what auto saved."""
    said = usage("--team", "team_a", *DAY, "--compare", "large").stdout

    assert "At large the same tokens would have cost 10.00 USD: +8.25 USD." in said
    assert "Automatic routes answered 1 requests for 1.00 USD instead of 5.00 USD" in said
    assert "usd per million tokens" in said


def test_house_is_shown_without_a_team() -> None:
    """Every team has its lines, and there is a total."""
    said = usage(*DAY, "--compare", "large").stdout
    report = json.loads(usage(*DAY, "--format", "json").stdout)

    assert "Usage of all teams, 2026-04-05 to 2026-04-05" in said
    assert "At large the same tokens would have cost 15.00 USD" in said
    assert [(line["team_id"], line["model"]) for line in report["results"]] == [
        ("team_a", "small"),
        ("team_a", None),
        ("team_b", "small"),
    ]
    assert [line["share_of_cost"] for line in report["results"]] == [0.666667, None, 0.333333]


def test_all_teams_are_shown_by_cost_centre() -> None:
    """As the teams have them now; what has none says so."""
    said = usage(*DAY, "--group-by", "cost_centre,model").stdout
    lines = [line.split() for line in said.splitlines()]
    report = json.loads(usage(*DAY, "--group-by", "cost_centre", "--format", "json").stdout)

    assert "Usage of all teams, 2026-04-05 to 2026-04-05" in said
    assert ["4711", "small", "1"] in [line[:3] for line in lines] and ["(none)", "small", "2"] in [
        line[:3] for line in lines
    ]
    assert {line["cost_centre"]: line["cost_usd"] for line in report["results"]} == {None: 2, "4711": 1}


def test_a_providers_total_stands_beside_its_invoice() -> None:
    """Three dollars less a refund that names no model, an invoice of 3.30: thirty cents more."""
    said = usage(*DAY, "--invoice", "own:3.30").stdout
    lines = [line.split() for line in said.splitlines()]

    assert "By provider, corrections included, beside invoices" in said
    assert ["own", "3", "3000000", "0", "3.00", "3.30", "0.30", "9.09"] in lines


def test_csv_is_as_over_http() -> None:
    """RFC 4180 line ends, exact numbers, corrections in columns of their own, and no formulas."""
    text = usage("--team", "team_a", *DAY, "--group-by", "user", "--format", "csv").stdout_bytes.decode()
    house = usage(*DAY, "--format", "csv").stdout_bytes.decode()

    rows = list(csv.DictReader(io.StringIO(text, newline="")))
    assert text.count("\r\n") == len(rows) + 1
    assert {row["user"] for row in rows} == {"'=ann", ""}
    assert sum(Decimal(row["cost_usd"]) + Decimal(row["corrections_cost_usd"]) for row in rows) == Decimal("1.75")
    assert sum(Decimal(row["cost_usd"]) for row in csv.DictReader(io.StringIO(house))) == Decimal("2.75")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--team", "team_a", "--compare", "small"), "is one of our own"),
        (("--team", "team_a", "--group-by", "colour"), "'group_by' is one of"),
        (("--group-by", "user"), "--group-by needs a --team"),
        (("--team", "team_a", "--invoice", "own:1"), "leave --team out"),
        (("--invoice", "own:1", "--format", "csv"), "ask for JSON"),
        (("--invoice", "rent:1"), "providers with models are own, rented"),
        (("--team", "team_a", "--from", "2026-01-01", "--to", "2026-04-05", "--group-by", "user"), "at most 31 days"),
    ],
)
def test_mistake_is_told_in_words(words: tuple[str, ...], says: str) -> None:
    """A wrong option is named, with what would be right."""
    assert says in " ".join(usage(*words, exits=2).stderr.replace("│", " ").split())
