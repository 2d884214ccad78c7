# The analysis beside a usage report: dollars per million tokens, the mix of models, what the same tokens would have
# cost at a model that is named, and what automatic routes saved or would have saved. Only made when it is asked for.

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date
from typing import Any

from msgspec import Struct
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.core.prices import Price
from billing.ledger.choices import Alternative, AskedSum, asked_sums, missed_saving, saving_of_auto, unsummed
from billing.ledger.comparison import Use, price_on, share, sum_of, usd_per_million, uses_of
from billing.ledger.statement_queries import LONGEST_BY_CALL, GroupBy
from billing.ledger.statements import period
from gateway.accounts.serializers import cost_view, dollars, shown
from gateway.accounts.teams import check_team
from gateway.core.settings import Settings
from gateway.reports.usage_period import Period
from gateway.reports.usage_report import COUNTS, added_up_by_call, usage_of
from protocol.errors import BadRequest, invalid_value
from router.catalog.catalog import AutoRoute, Catalog
from router.catalog.targets import ModelSpec

ROOM = text("SET LOCAL work_mem = '32MB'")
MOST_BY_CALL = 10_000_000  # calls that are added up one by one: about what eight seconds suffice for


class Analysis(Struct, frozen=True):
    """What is asked for beside the report. ``compared``: the model to compare with, if any; ``has_auto``: with what
    automatic routes saved, for which calls of days that are not closed are read."""

    compared: ModelSpec | None
    has_auto: bool = True

    def price_on(self, day: date) -> Price | None:
        """Return the price of that model on a day."""
        return None if self.compared is None else price_on(self.compared.price, day)


def read_analysis(said: Mapping[str, str], settings: Settings, catalog: Catalog) -> Analysis | None:
    """Return the analysis that ``compare`` and ``analysis`` ask for, if they do. Raises BadRequest."""
    wanted = said.get("analysis", "false")
    if wanted not in ("true", "false"):
        raise invalid_value("analysis", "is true or false")
    if "compare" in said:
        return Analysis(_commercial(said["compare"], settings, catalog))
    return Analysis(None) if wanted == "true" else None


async def see_one_moment(connection: AsyncConnection) -> None:
    """Let all queries of a transaction see the same snapshot, so that their sums tie. Before its first query.

    They have room to add up a month of a thousand teams by hash: with less, Postgres sorts all lines on disk.
    """
    await connection.execute(text("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY"))
    await connection.execute(ROOM)


async def usage_with_analysis(
    connection: AsyncConnection,
    team_id: str | None,
    asked: Period,
    analysis: Analysis | None,
    catalog: Catalog,
    *,
    for_admin: bool,
) -> dict[str, Any]:
    """Return a team's usage in the shape of GET /v1/usage, with its analysis if there is to be one.

    ``team_id`` None: of all teams. ``for_admin``: an admin asks, who may know what our own GPUs cost and may name a
    team that is not there. Raises NotFound. The connection's transaction has asked nothing yet.
    """
    if analysis is not None:
        await see_one_moment(connection)
    if for_admin and team_id is not None:
        await check_team(connection, team_id)
    usage = await usage_of(connection, team_id, asked, for_admin=for_admin)
    if analysis is not None:
        usage["analysis"] = await _analyse(connection, team_id, asked, analysis, catalog, for_admin=for_admin)
    return usage


async def _analyse(
    connection: AsyncConnection,
    team_id: str | None,
    asked: Period,
    analysis: Analysis,
    catalog: Catalog,
    *,
    for_admin: bool,
) -> dict[str, Any]:
    """Return the analysis of a team's days. It speaks of calls and corrections together."""
    price = analysis.price_on(asked.last)
    statement = await period(connection, team_id, asked.first, asked.last, GroupBy.MODEL, GroupBy.TIER)
    uses = uses_of(statement.lines, price)
    whole = sum_of(uses, is_compared=price is not None)
    return {
        **mix_view(uses, for_admin=for_admin),
        **compare_view(analysis, whole),
        **(await read_choices(connection, catalog, team_id, asked.first, asked.last)).view(),
    }


def mix_view(uses: Sequence[Use], *, for_admin: bool) -> dict[str, Any]:
    """Return a line for each model, its share of the whole, and the whole."""
    whole = sum_of(uses, is_compared=any(use.compared_nanousd is not None for use in uses))
    shared = sum_of([use for use in uses if use.groups[0] is not None], is_compared=False)
    lines = [{"model": use.groups[0], **use_view(use, for_admin=for_admin), **shares_view(use, shared)} for use in uses]
    return {"models": lines, "total": use_view(whole, for_admin=for_admin)}


def shares_view(use: Use, whole: Use) -> dict[str, Any]:
    """Return a use's shares of the whole, in which corrections that name no model have no part."""
    has_part = use.groups[-1] is not None
    return {
        "share_of_requests": share(use.totals.requests, whole.totals.requests) if has_part else None,
        "share_of_cost": share(use.totals.cost_nanousd, whole.totals.cost_nanousd) if has_part else None,
    }


def use_view(use: Use, *, for_admin: bool) -> dict[str, Any]:
    """Return what was used, its cost, and its cost per million tokens; what our GPUs cost us ``for_admin`` alone."""
    totals = use.totals
    tokens = totals.input_tokens + totals.output_tokens
    view: dict[str, Any] = {
        **shown(totals, *COUNTS),
        **cost_view(totals.cost_nanousd),
        "cache_saved_usd": dollars(totals.saved_nanousd),
        "tier_saved_usd": dollars(totals.discount_nanousd),
        "usd_per_million_tokens": usd_per_million(totals.cost_nanousd, tokens),
    }
    if for_admin:
        view["gpu_cost_usd"] = dollars(totals.gpu_cost_nanousd)
        view["gpu_usd_per_million_tokens"] = usd_per_million(totals.gpu_cost_nanousd, tokens)
    if use.compared_nanousd is not None:
        view["compared_cost_usd"] = dollars(use.compared_nanousd)
    return view


def compare_view(analysis: Analysis, whole: Use) -> dict[str, Any]:
    """Return what the same tokens would have cost at the model that was named, if one was."""
    if analysis.compared is None or whole.compared_nanousd is None:
        return {}
    return {
        "compare": {
            "model": analysis.compared.name,
            "cost_usd": dollars(whole.compared_nanousd),
            "difference_usd": dollars(whole.compared_nanousd - whole.totals.cost_nanousd),
        }
    }


class Choices(Struct, frozen=True):
    """What calls that left the model to a route, or could have, cost. ``sums`` None: too many to be added up."""

    sums: list[AskedSum] | None
    alternatives: list[Alternative]

    def view(self) -> dict[str, Any]:
        """Return what automatic routes saved and would have saved; null where that is not known."""
        if self.sums is None:
            return {"auto": None, "would_have_saved": None}
        saved = saving_of_auto(self.sums, self.alternatives)
        missed = missed_saving(self.sums, self.alternatives)
        return {
            "auto": {
                "requests": saved.requests,
                "cost_usd": dollars(saved.cost_nanousd),
                "large_cost_usd": dollars(saved.alternative_nanousd),
                "saved_usd": dollars(saved.saved_nanousd),
            },
            "would_have_saved": {
                "requests": missed.requests,
                "cost_usd": dollars(missed.cost_nanousd),
                "sample_requests": missed.sample_requests,
                "estimated_usd": None if missed.saved_nanousd is None else dollars(missed.saved_nanousd),
            },
        }

    def by_team(self) -> Callable[[str | None], Choices]:
        """Return what tells each team's part."""
        if self.sums is None:
            return lambda _: self
        parts: dict[str | None, list[AskedSum]] = {}
        for one in self.sums:
            parts.setdefault(one.team_id, []).append(one)
        return lambda team_id: Choices(parts.get(team_id, []), self.alternatives)


async def read_choices(
    connection: AsyncConnection, catalog: Catalog, team_id: str | None, first: date, last: date
) -> Choices:
    """Add up what asked for an automatic route or could have; ``team_id`` None: of all teams. Days that are closed have
    their sums; the calls of others are read, where they are not too many."""
    alternatives = alternatives_in(catalog, last)
    if not alternatives:
        return Choices([], alternatives)
    read = await unsummed(connection, team_id, first, last)
    if len(read.days) > LONGEST_BY_CALL or read.calls > MOST_BY_CALL:
        return Choices(None, alternatives)
    try:
        async with added_up_by_call(connection):
            return Choices(await asked_sums(connection, team_id, first, last, alternatives, read.days), alternatives)
    except BadRequest:
        return Choices(None, alternatives)


def alternatives_in(catalog: Catalog, day: date) -> list[Alternative]:
    """Return for each automatic route, and each large model of one, what its calls are compared with."""
    prices = {name: price_on(model.price, day) for name, model in catalog.models.items()}
    names = {
        name: [name, *(alias for alias in catalog.aliases if catalog.meaning(alias) == name)] for name in catalog.auto
    }
    found = {
        asked: Alternative(asked=asked, is_auto=True, price=prices[route.large[0]])
        for name, route in catalog.auto.items()
        if route.large
        for asked in names[name]
    }
    for route in catalog.auto.values():
        if route.small:
            found = {**_large_names(route, catalog, prices[route.small[0]]), **found}
    return list(found.values())


def _large_names(route: AutoRoute, catalog: Catalog, price: Price) -> dict[str, Alternative]:
    names = [*route.large, *(alias for alias in catalog.aliases if catalog.meaning(alias) in route.large)]
    return {name: Alternative(asked=name, is_auto=False, price=price, quality=route.quality) for name in names}


def _commercial(said: str, settings: Settings, catalog: Catalog) -> ModelSpec:
    name = catalog.meaning(said)
    own = {provider.name for provider in settings.providers.values() if provider.self_hosted}
    rented = {model.name: model for model in catalog.models.values() if model.provider not in own}
    if name in rented:
        return rented[name]
    words = "is one of our own" if name in catalog.models else "does not exist"
    raise invalid_value(
        "compare", f"names a commercial model of the catalogue, and '{said[:100]}' {words}. {_those(rented)}"
    )


def _those(names: Iterable[str]) -> str:
    listed = ", ".join(sorted(names))
    return f"There are: {listed}" if listed else "There is none"
