# Corrections: what people booked beside the calls, with who and why. Entries are only added, never changed: an error is
# put right by another entry. Statements show them apart; the balances of their day and month take them in, even past a
# cap, in the transaction that books them.

from __future__ import annotations

from datetime import date, datetime
from uuid import UUID

from msgspec import Struct
from sqlalchemy import func, literal, select, text, tuple_
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.tables import corrections, usage_daily


class Correction(Struct, frozen=True, kw_only=True):
    """One entry. Tokens and money are signed: a refund is negative."""

    id: UUID
    team_id: str
    day: date  # the UTC day that is corrected
    key_id: str | None = None
    model_used: str | None = None
    tier: str | None = None
    request_id: UUID | None = None  # the call that is corrected, when it is one
    input_tokens: int = 0
    output_tokens: int = 0
    cost_nanousd: int = 0
    reason: str
    actor: str
    booked_on: date
    created_at: datetime

    def says_what(self, other: Correction) -> bool:
        """Whether both book the same; who booked it and when does not count."""
        return all(getattr(self, name) == getattr(other, name) for name in BOOKED)


BOOKED = [name for name in Correction.__struct_fields__ if name not in ("actor", "booked_on", "created_at")]


CORRECT = text("SELECT correct_balances(CAST(:scopes AS text[]), :day, :tokens, :nanousd)")


class CorrectionSum(Struct, frozen=True, kw_only=True):
    """What the corrections of one team, key and day come to. ``key_id`` None: those that name no key."""

    team_id: str
    key_id: str | None
    day: date
    input_tokens: int
    output_tokens: int
    cost_nanousd: int

    @property
    def tokens(self) -> int:
        """Tokens in and out, as the counters have them."""
        return self.input_tokens + self.output_tokens


async def add_correction(connection: AsyncConnection, correction: Correction) -> Correction | None:
    """Book ``correction``, in the balances too, and return None; or return what is booked under its id already, and
    change nothing."""
    values = {name: getattr(correction, name) for name in Correction.__struct_fields__}
    query = insert(corrections).values(**values).on_conflict_do_nothing().returning(corrections.c.id)
    if (await connection.execute(query)).scalar_one_or_none() is not None:
        scopes = [f"team:{correction.team_id}"] + [f"key:{correction.key_id}"] * (correction.key_id is not None)
        tokens = correction.input_tokens + correction.output_tokens
        counted = {"tokens": tokens, "nanousd": correction.cost_nanousd}
        await connection.execute(CORRECT, {"scopes": scopes, "day": correction.day.isoformat(), **counted})
        return None
    booked = select(corrections).where(corrections.c.id == correction.id)
    return Correction(**(await connection.execute(booked)).mappings().one())


async def list_corrections(
    connection: AsyncConnection,
    *,
    team_id: str | None = None,
    first: date | None = None,
    last: date | None = None,
    before: UUID | None = None,
    limit: int = 100,
) -> list[Correction]:
    """Return the newest entries first: of one team, and of corrected days from ``first`` to ``last``, where said.

    ``before`` is the id of the last entry already seen.
    """
    table = corrections.c
    query = select(corrections).order_by(table.created_at.desc(), table.id.desc()).limit(limit)
    if team_id is not None:
        query = query.where(table.team_id == team_id)
    if first is not None:
        query = query.where(table.day >= first)
    if last is not None:
        query = query.where(table.day <= last)
    if before is not None:
        seen = select(table.created_at).where(table.id == before).scalar_subquery()
        query = query.where(tuple_(table.created_at, table.id) < tuple_(seen, literal(before)))
    return [Correction(**row) for row in (await connection.execute(query)).mappings()]


async def sums_of(
    connection: AsyncConnection,
    first: date,
    last: date,
    *,
    before: datetime | None = None,
) -> list[CorrectionSum]:
    """Return the sums of the days from ``first`` to ``last``, both included, by team, day and key in this order.

    The counters of a team are the sums of its rows with and without a key; those of a key are the sums of its own.
    ``before``: only what was booked before that moment.
    """
    table = corrections.c
    sums = [func.sum(table[name]).label(name) for name in ("input_tokens", "output_tokens", "cost_nanousd")]
    query = (
        select(table.team_id, table.key_id, table.day, *sums)
        .where(table.day.between(first, last))
        .group_by(table.team_id, table.key_id, table.day)
        .order_by(table.team_id, table.day, table.key_id)
    )
    if before is not None:
        query = query.where(table.created_at < before)
    return [
        CorrectionSum(
            team_id=row["team_id"],
            key_id=row["key_id"],
            day=row["day"],
            input_tokens=int(row["input_tokens"]),
            output_tokens=int(row["output_tokens"]),
            cost_nanousd=int(row["cost_nanousd"]),
        )
        for row in (await connection.execute(query)).mappings()
    ]


async def has_booked(connection: AsyncConnection, team_id: str, day: date, model: str) -> bool:
    """Tell whether a team's books of a day name ``model``, which the catalogue may have forgotten since."""
    table = usage_daily.c
    query = select(literal(1)).where(table.team_id == team_id, table.day == day, table.model_used == model).limit(1)
    return (await connection.execute(query)).scalar_one_or_none() is not None
