# The cost of all teams in FOCUS 1.4, the FinOps Foundation's columns for cost and usage, as CSV: a line for each team,
# model and tier on each day, and one more for what was booked late or by hand. A day at a time, so that what is held in
# memory does not grow with the period.

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from datetime import date, timedelta
from typing import Any

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.ledger.statement_queries import GroupBy
from billing.ledger.statements import Line, Totals, period
from gateway.accounts.serializers import dollars
from gateway.reports.csv_text import csv_of
from gateway.storage.database import Database
from gateway.storage.tables import teams
from router.catalog.catalog import Catalog

# Every mandatory column of the specification, those of its conditional ones that apply, and at last, as it asks, ours.
COLUMNS = (
    *("BilledCost", "BillingAccountId", "BillingAccountName", "BillingCurrency", "BillingPeriodEnd"),
    *("BillingPeriodStart", "ChargeCategory", "ChargeClass", "ChargeDescription", "ChargeFrequency"),
    *("ChargePeriodEnd", "ChargePeriodStart", "ConsumedQuantity", "ConsumedUnit", "ContractedCost", "EffectiveCost"),
    *("HostProviderName", "InvoiceIssuerName", "ListCost", "PricingQuantity", "PricingUnit", "ServiceCategory"),
    *("ServiceName", "ServiceProviderName", "ServiceSubcategory", "SubAccountId", "SubAccountName"),
    *("x_CostCentre", "x_Tier", "x_Requests", "x_InputTokens", "x_CachedInputTokens", "x_OutputTokens"),
)
ISSUER = "Tollgate"
Teams = Mapping[str, tuple[str | None, str | None]]  # names and cost centres, by id
USUAL = {
    "BillingAccountId": "tollgate",
    "BillingAccountName": ISSUER,
    "BillingCurrency": "USD",
    "InvoiceIssuerName": ISSUER,
    "ServiceProviderName": ISSUER,
    "ServiceCategory": "AI and Machine Learning",
    "ServiceSubcategory": "Generative AI",
}


async def focus_days(database: Database, catalog: Catalog, first: date, last: date) -> AsyncIterator[str]:
    """Yield the heading with the first UTC day's lines as CSV, then each day's, up to ``last``. No connection is held
    while a client takes a day in."""
    for number in range((last - first).days + 1):
        async with database.begin() as connection:
            text = await _day(connection, catalog, first + timedelta(days=number))
        yield text if number == 0 else text.partition("\r\n")[2]


async def _day(connection: AsyncConnection, catalog: Catalog, day: date) -> str:
    statement = await period(connection, None, day, day, GroupBy.TEAM, GroupBy.MODEL, GroupBy.TIER)
    columns = teams.c.id, teams.c.name, teams.c.cost_centre
    known = {team.id: (team.name, team.cost_centre) for team in await connection.execute(select(*columns))}
    rows = [
        row
        for line in statement.lines
        for row in (_usage(line, catalog, known, day), _correction(line, catalog, known, day))
        if row is not None
    ]
    return csv_of(COLUMNS, rows)


def _usage(line: Line, catalog: Catalog, named: Teams, day: date) -> dict[str, Any] | None:
    """Return what was used in time, if anything was."""
    total = line.total
    tokens = total.input_tokens + total.output_tokens
    if not (total.cost_nanousd or tokens or total.requests):
        return None
    told = {"ChargeCategory": "Usage", "ChargeFrequency": "Usage-Based", "ConsumedQuantity": tokens}
    words = {"ConsumedUnit": "Tokens", "ChargeDescription": f"{line.groups[1]}: {tokens} tokens"}
    return _charge(line, total, catalog, named, day) | told | words


def _correction(line: Line, catalog: Catalog, named: Teams, day: date) -> dict[str, Any] | None:
    """Return what was booked after the day's close or by hand, if anything was."""
    if line.corrections == Totals():
        return None
    told = {"ChargeCategory": "Adjustment", "ChargeFrequency": "One-Time"}
    words = {"ChargeDescription": f"Booked late or by hand for {day}"}
    return _charge(line, line.corrections, catalog, named, day) | told | words


def _charge(line: Line, sums: Totals, catalog: Catalog, named: Teams, day: date) -> dict[str, Any]:
    team, model, tier = line.groups
    known = catalog.models.get(model or "")
    name, cost_centre = named.get(team or "", (team, None))
    month = day.replace(day=1)
    cost = dollars(sums.cost_nanousd)
    return USUAL | {
        **dict.fromkeys(("BilledCost", "ContractedCost", "EffectiveCost", "ListCost"), cost),
        "BillingPeriodStart": _moment(month),
        "BillingPeriodEnd": _moment((month + timedelta(days=31)).replace(day=1)),
        "ChargePeriodStart": _moment(day),
        "ChargePeriodEnd": _moment(day + timedelta(days=1)),
        "HostProviderName": known.provider if known is not None else None,
        "ServiceName": model or "(none)",
        "SubAccountId": team,
        "SubAccountName": name,
        "x_CostCentre": cost_centre,
        "x_Tier": tier,
        "x_Requests": sums.requests,
        "x_InputTokens": sums.input_tokens,
        "x_CachedInputTokens": sums.cached_input_tokens,
        "x_OutputTokens": sums.output_tokens,
    }


def _moment(day: date) -> str:
    return f"{day}T00:00:00Z"
