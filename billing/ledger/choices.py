# What a router's choices are worth: what calls that left the model to an automatic route saved against its first large
# model, and what calls that named a large model would have saved at the route's first small one.
#
# Closed days are added up once, by the name that was asked for (usage_asked): what is booked on such a day in time
# cannot change any more (billing/upkeep/sweep.py). Calls of other days, and late ones, are read.

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import date

from msgspec import Struct
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.core.money import NanoDollars
from billing.core.prices import Price
from billing.core.records import CHARGED, REQUESTS, TOKENS
from billing.ledger.comparison import cost_at
from billing.ledger.tables import IS_CALL
from protocol.usage import Usage


class Alternative(Struct, frozen=True, kw_only=True):
    """The other model that a call could have gone to when its caller asked for ``asked``."""

    asked: str
    is_auto: bool  # an automatic route, compared with its first large model; else a large model, with the first small
    price: Price  # of the other model, as ``price_on`` returns it
    quality: float = 0.0  # the least complexity score at which the route trusts a small model


class AskedSum(Struct, frozen=True, kw_only=True):
    """A team's charged calls that asked for one name. ``suffices``: whether a small model would do; None: unknown.
    ``requests`` are those that statements count; calls that a policy ended are in the other sums alone."""

    team_id: str
    asked: str
    tier: str
    suffices: bool | None
    requests: int
    usage: Usage
    cost_nanousd: int


class Saving(Struct, frozen=True, kw_only=True):
    """What calls cost and what they would have cost at the alternative."""

    requests: int
    cost_nanousd: NanoDollars
    alternative_nanousd: NanoDollars

    @property
    def saved_nanousd(self) -> NanoDollars:
        """What the choice saved; negative where it cost more."""
        return NanoDollars(self.alternative_nanousd - self.cost_nanousd)


class Estimate(Struct, frozen=True, kw_only=True):
    """What calls that named a large model would have saved, judged by the sample whose complexity is known."""

    requests: int
    cost_nanousd: NanoDollars
    sample_requests: int
    saved_nanousd: NanoDollars | None  # of all of them; None without a sample


class Unsummed(Struct, frozen=True):
    """Days whose calls are not added up yet by what they asked for, and how many calls they have."""

    days: list[date]
    calls: int


async def unsummed(connection: AsyncConnection, team_id: str | None, first: date, last: date) -> Unsummed:
    """Return the days of a period whose calls have to be read; ``team_id`` None: those of all teams."""
    span = {"team_id": team_id, "first": first, "last": last}
    rows = (await connection.execute(UNSUMMED, span)).all()
    return Unsummed([row.day for row in rows], sum(int(row.calls) for row in rows))


async def asked_sums(
    connection: AsyncConnection,
    team_id: str | None,
    first: date,
    last: date,
    alternatives: Sequence[Alternative],
    days: Sequence[date],
) -> list[AskedSum]:
    """Return the sums of charged calls that asked for one of these names; ``team_id`` None: of all teams. ``days``:
    those that are not added up yet."""
    asked = {"names": [each.asked for each in alternatives], "qualities": [each.quality for each in alternatives]}
    span = {"team_id": team_id, "first": first, "last": last, "charged": list(CHARGED), "counted": list(REQUESTS)}
    read = {"days": list(days)}
    query = OF_HOUSE if team_id is None else OF_TEAM
    return [
        AskedSum(
            team_id=row["team_id"],
            asked=row["asked"],
            tier=row["tier"],
            suffices=row["suffices"],
            requests=int(row["requests"]),
            usage=Usage(**{name: int(row[name]) for name in TOKENS}),
            cost_nanousd=int(row["cost_nanousd"]),
        )
        for row in (await connection.execute(query, asked | span | read)).mappings()
    ]


def saving_of_auto(sums: Iterable[AskedSum], alternatives: Sequence[Alternative]) -> Saving:
    """Return what automatic routes saved against their first large models."""
    price_of = {each.asked: each.price for each in alternatives if each.is_auto}
    ours = [one for one in sums if one.asked in price_of]
    return Saving(
        requests=sum(one.requests for one in ours),
        cost_nanousd=NanoDollars(sum(one.cost_nanousd for one in ours)),
        alternative_nanousd=NanoDollars(
            sum(cost_at(one.usage, one.requests, price_of[one.asked], one.tier) for one in ours)
        ),
    )


def missed_saving(sums: Iterable[AskedSum], alternatives: Sequence[Alternative]) -> Estimate:
    """Return what naming a large model cost more than a small one that would have sufficed.

    The sample's saving is scaled by cost (a ratio estimate): calls save in proportion to what they cost.
    """
    price_of = {each.asked: each.price for each in alternatives if not each.is_auto}
    ours = [one for one in sums if one.asked in price_of]
    cost = sum(one.cost_nanousd for one in ours)
    sample = [one for one in ours if one.suffices is not None]
    sampled_cost = sum(one.cost_nanousd for one in sample)
    saved = sum(
        one.cost_nanousd - cost_at(one.usage, one.requests, price_of[one.asked], one.tier)
        for one in sample
        if one.suffices
    )
    return Estimate(
        requests=sum(one.requests for one in ours),
        cost_nanousd=NanoDollars(cost),
        sample_requests=sum(one.requests for one in sample),
        saved_nanousd=NanoDollars(saved * cost // sampled_cost) if sampled_cost else None,
    )


COUNTED = ("requests", *TOKENS, "cost_nanousd")
IS_CHARGED = "status = ANY(CAST(:charged AS text[])) AND endpoint <> 'embeddings'"
# Days that have calls; those of one team by its index, of all teams by that of days.
UNSUMMED = text("""
    SELECT ended.day, calls
    FROM (SELECT CAST(day AS date) AS day
          FROM generate_series(CAST(:first AS timestamp), CAST(:last AS timestamp), interval '1 day') AS day
          EXCEPT SELECT day FROM closed_days WHERE summed_at IS NOT NULL) AS ended,
         LATERAL (SELECT sum(calls) AS calls FROM usage_daily WHERE usage_daily.day = ended.day
                  AND (CAST(:team_id AS text) IS NULL OR team_id = :team_id)) AS of_day
    WHERE calls IS NOT NULL
""")
BY_CALL = f"""
    SELECT team_id, asked.name AS asked, tier, complexity >= asked.quality AS suffices,
           count(*) FILTER (WHERE status = ANY(CAST(:counted AS text[])) AND {IS_CALL}) AS requests,
           {", ".join(f"sum({name}) AS {name}" for name in COUNTED[1:])}
    FROM usage_records JOIN asked ON model_asked = asked.name
"""  # noqa: S608  (columns are ours)
# Of the late calls those alone are read whose team and day have some, as the daily sums know.
QUERY = f"""
    WITH asked AS (
        SELECT * FROM unnest(CAST(:names AS text[]), CAST(:qualities AS double precision[])) AS asked (name, quality)
    ), late AS (
        SELECT DISTINCT team_id, day FROM usage_daily
        WHERE {{team}} day BETWEEN :first AND :last AND booked_on <> day AND day <> ALL(CAST(:days AS date[]))
    )
    SELECT team_id, asked, tier, suffices, {", ".join(f"sum({name}) AS {name}" for name in COUNTED)}
    FROM (
        SELECT team_id, asked.name AS asked, tier,
               CASE WHEN score >= 0 THEN score >= ceil(CAST(asked.quality AS numeric) * 100) END AS suffices,
               {", ".join(COUNTED)}
        FROM usage_asked JOIN asked ON model_asked = asked.name
        WHERE {{team}} day BETWEEN :first AND :last AND day <> ALL(CAST(:days AS date[]))
        UNION ALL (
            {BY_CALL} WHERE {{team}} day = ANY(CAST(:days AS date[])) AND {IS_CHARGED} GROUP BY 1, 2, 3, 4
        )
        UNION ALL
        SELECT of_day.* FROM late, LATERAL (
            {BY_CALL} WHERE usage_records.team_id = late.team_id AND usage_records.day = late.day
            AND booked_on IS NOT NULL AND {IS_CHARGED} GROUP BY 1, 2, 3, 4
        ) AS of_day
    ) AS parts
    GROUP BY 1, 2, 3, 4
"""  # noqa: S608  (columns are ours)
OF_TEAM = text(QUERY.format(team="team_id = :team_id AND"))
OF_HOUSE = text(QUERY.format(team=""))
