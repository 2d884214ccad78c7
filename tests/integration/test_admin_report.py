# The report of the whole deployment, on a real Postgres: every dollar of our own GPUs is a call's or idle.

from __future__ import annotations

import csv
import io
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from sqlalchemy import event, text

from billing.core.money import to_nano
from billing.core.prices import Price
from billing.ledger.instance_samples import Look, book_look
from billing.ledger.ledger import insert_records
from gateway.reports import usage_analysis
from gateway.reports.admin_report import admin_report, report_csv
from gateway.reports.focus import focus_days
from gateway.reports.usage_analysis import Analysis
from gateway.storage.database import Database
from router.catalog.catalog import AutoRoute, Catalog
from tests.support.clock import NOON, SetClock
from tests.support.factories import make_record
from tests.support.house import model, settings_for

TODAY = date(2026, 4, 5)
ENDPOINT = "local http://gpu-0:8100/v1"


def catalog() -> Catalog:
    """Return a house with GPT-4o and a Llama."""
    settings = settings_for("postgresql://x/y", "redis://x", "http://upstream/v1", Path("/nowhere"))
    gpt = model("gpt-4o", price=Price(input=to_nano("2.50"), output=to_nano(10)))
    return replace(settings, models={"gpt-4o": gpt, "llama": model("llama")}, auto={}, aliases={}).catalog()


async def fill(database: Database) -> None:
    """Book calls of two teams at both models, and ten hours of a replica at $3.50."""
    clock = SetClock()
    own = {"model_used": "llama", "provider": "own", "provider_endpoint": ENDPOINT, "input_tokens": 1_000_000}
    calls: list[dict[str, Any]] = [
        {**own, "output_tokens": 500_000, "cost_nanousd": to_nano("0.80"), "gpu_cost_nanousd": to_nano("1.25")},
        {**own, "output_tokens": 0, "cost_nanousd": to_nano("0.40"), "gpu_cost_nanousd": to_nano("0.25")},
        {**own, "team_id": "team_b", "output_tokens": 0, "cost_nanousd": to_nano("0.40"), "tier": "batch"},
        {"team_id": "team_b", "model_used": "gpt-4o", "input_tokens": 2_000_000, "cost_nanousd": to_nano("5.0002")},
    ]
    usual = {"cached_input_tokens": 0, "gpu_cost_nanousd": 0}
    records = [make_record(clock.new_id(), **usual | call) for call in calls]
    async with database.begin() as connection:
        await insert_records(connection, records, today=TODAY)
        for hours, at in ((1, NOON - 9 * 3600), (10, NOON)):
            seen = {"provider": "own", "endpoint": ENDPOINT, "model": "llama", "gpus": 1, "load": {}}
            look = Look(
                instance_id="gpu-0",
                gpu_hour_nanousd=to_nano("3.50"),
                alive_us=hours * 3_600_000_000,
                busy_us=hours * 360_000_000,
                seen_at=at,
                **seen,
            )
            await book_look(connection, look)


async def test_calls_and_idle_are_all_that_our_gpus_cost(database: Database) -> None:
    """What calls cost us and what each replica idled add up to instance-hours times the price, to the nano-dollar."""
    await fill(database)

    async with database.begin() as connection:
        report = await admin_report(connection, Analysis(None), catalog(), TODAY, TODAY)

    calls = sum(line["gpu_cost_usd"] for line in report["results"])
    idle = sum(line["idle_usd"] for line in report["instances"])
    assert calls == report["instances_total"]["calls_usd"] == report["total"]["gpu_cost_usd"] == Decimal("1.5")
    assert calls + idle == report["instances_total"]["cost_usd"] == Decimal("35")
    assert [line["hours"] for line in report["instances"]] == [10.0]


async def test_each_team_and_model_has_its_line(database: Database) -> None:
    """Charge, GPU cost, rates per million tokens and the comparison, by hand."""
    await fill(database)

    async with database.begin() as connection:
        found = catalog()
        report = await admin_report(connection, Analysis(found.models["gpt-4o"]), found, TODAY, TODAY)

    first = report["results"][0]
    assert [(line["team_id"], line["model"]) for line in report["results"]] == [
        ("team_a", "llama"),
        ("team_b", "gpt-4o"),
        ("team_b", "llama"),
    ]
    assert (first["input_tokens"], first["output_tokens"], first["cost_usd"]) == (2_000_000, 500_000, Decimal("1.20"))
    assert (first["usd_per_million_tokens"], first["gpu_usd_per_million_tokens"]) == (Decimal("0.48"), Decimal("0.6"))
    assert first["compared_cost_usd"] == Decimal(10)  # 2 x $2.50 and half of $10
    assert [(line["team_id"], line["cost_usd"], line["compared_cost_usd"]) for line in report["teams"]] == [
        ("team_a", Decimal("1.20"), Decimal(10)),
        ("team_b", Decimal("5.4002"), Decimal("7.5002")),
    ]
    assert [line["model"] for line in report["models"]] == ["gpt-4o", "llama"]
    assert [line["share_of_requests"] for line in report["models"]] == [Decimal("0.25"), Decimal("0.75")]
    assert report["total"]["compared_cost_usd"] == report["compare"]["cost_usd"] == Decimal("17.5002")
    assert report["compare"]["difference_usd"] == Decimal("17.5002") - Decimal("6.6002")
    assert report["auto"]["requests"] == 0


async def test_each_team_hears_what_auto_saved_it(database: Database) -> None:
    """A team's saving is of its own calls, and the teams' savings make the house's."""
    await fill(database)
    routes = {"auto": AutoRoute(small=("llama",), large=("gpt-4o",))}  # every call of these books asked for auto

    async with database.begin() as connection:
        report = await admin_report(connection, Analysis(None), replace(catalog(), auto=routes), TODAY, TODAY)

    saved = {line["team_id"]: line["auto"]["saved_usd"] for line in report["teams"]}
    assert saved == {"team_a": Decimal("8.80"), "team_b": Decimal("2.10")}  # $10 - $1.20, and $2.50 - $0.40
    assert report["auto"]["saved_usd"] == Decimal("10.90")


async def test_too_many_calls_are_not_read_one_by_one(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """The daily sums tell how many there are: no calls are read for seconds to say at last that they are too many."""
    await fill(database)
    monkeypatch.setattr(usage_analysis, "MOST_BY_CALL", 3)
    routes = {"auto": AutoRoute(small=("llama",), large=("gpt-4o",))}
    asked: list[str] = []
    event.listen(database.engine.sync_engine, "before_cursor_execute", lambda *said: asked.append(said[2]))

    async with database.begin() as connection:
        report = await admin_report(connection, Analysis(None), replace(catalog(), auto=routes), TODAY, TODAY)

    assert [part["auto"] for part in (report, *report["teams"])] == [None] * 3
    assert report["would_have_saved"] is None and report["total"]["requests"] == 4
    assert [query for query in asked if "usage_records" in query] == []


async def test_csv_has_the_idle_time_of_each_replica(database: Database) -> None:
    """In one file, everything that our GPUs cost: its column adds up to the hours' price."""
    await fill(database)

    async with database.begin() as connection:
        report = await admin_report(connection, Analysis(None), catalog(), TODAY, TODAY)
    rows = list(csv.DictReader(io.StringIO(report_csv(report))))

    assert sum(Decimal(row["gpu_cost_usd"]) for row in rows) == Decimal(35)
    assert sum(Decimal(row["cost_usd"] or 0) for row in rows) == Decimal("6.6002")
    assert [row["instance_id"] for row in rows] == ["", "", "", "gpu-0"]


async def test_a_house_without_calls_reports_nothing(database: Database) -> None:
    """No calls, no engines: zeros, and no rates of nothing."""
    async with database.begin() as connection:
        report = await admin_report(connection, Analysis(None), catalog(), TODAY, TODAY)

    assert (report["results"], report["models"], report["instances"]) == ([], [], [])
    assert (report["total"]["cost_usd"], report["total"]["usd_per_million_tokens"]) == (0, None)


async def test_focus_adds_up_to_the_report(database: Database) -> None:
    """Every mandatory column of FOCUS 1.4 is there; usage and adjustments of all days together cost what the report
    says, no cell runs as a formula, and a client that reads slowly holds no connection."""
    await fill(database)
    entry = "'=team', '2026-04-05', '2026-04-05', 'llama', 3, -1, -500000000, '=x', 'x', now()"
    columns = "id, team_id, day, booked_on, model_used, input_tokens, output_tokens, cost_nanousd, reason, actor"
    async with database.begin() as connection:
        await connection.execute(
            text(f"INSERT INTO corrections ({columns}, created_at) VALUES (gen_random_uuid(), {entry})")
        )
    found = catalog()
    async with database.begin() as connection:
        report = await admin_report(connection, Analysis(None), found, TODAY, TODAY)
    days = []
    async for day in focus_days(database, found, TODAY, date(2026, 4, 6)):
        assert database.engine.pool.checkedout() == 0  # type: ignore[attr-defined]
        days.append(day)
    head, rest = days
    rows = list(csv.DictReader(io.StringIO(head + rest)))

    assert set(FOCUS_MANDATORY) <= set(rows[0])
    assert [name for name in rows[0] if name.startswith("x_")] == list(rows[0])[-6:]
    assert sum(Decimal(row["BilledCost"]) for row in rows) == report["total"]["cost_usd"]
    filled = {name for name in FOCUS_MANDATORY if all(row[name] for row in rows)}
    assert set(FOCUS_MANDATORY) - filled == {"ChargeClass", "PricingQuantity", "PricingUnit"}  # null without a SKU
    usage = next(row for row in rows if row["SubAccountId"] == "team_b" and row["ServiceName"] == "gpt-4o")
    assert (usage["ChargeCategory"], usage["ConsumedQuantity"], usage["BilledCost"]) == ("Usage", "2000020", "5.0002")
    assert (usage["BillingPeriodStart"], usage["BillingPeriodEnd"]) == ("2026-04-01T00:00:00Z", "2026-05-01T00:00:00Z")
    assert (usage["ChargePeriodStart"], usage["ChargePeriodEnd"]) == ("2026-04-05T00:00:00Z", "2026-04-06T00:00:00Z")
    [adjusted] = [row for row in rows if row["ChargeCategory"] == "Adjustment"]
    assert (adjusted["SubAccountId"], adjusted["BilledCost"]) == ("'=team", "-0.50")
    assert rest == ""


FOCUS_MANDATORY = (
    *("BilledCost", "BillingAccountId", "BillingAccountName", "BillingCurrency", "BillingPeriodEnd"),
    *("BillingPeriodStart", "ChargeCategory", "ChargeClass", "ChargeDescription", "ChargePeriodEnd"),
    *("ChargePeriodStart", "ContractedCost", "EffectiveCost", "HostProviderName", "InvoiceIssuerName", "ListCost"),
    *("PricingQuantity", "PricingUnit", "ServiceCategory", "ServiceName", "ServiceProviderName"),
)
