# Corrections: what was booked by hand beside the calls, with who and why. Entries are only added, never changed: an
# error is put right by another entry. Statements show them apart; the balances of their day and month take them in,
# even past a cap, in the transaction that books them.

from __future__ import annotations

from datetime import date, datetime
from uuid import UUID

from msgspec import Struct
from sqlalchemy import literal, select, text, tuple_
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.ledger.tables import corrections, usage_daily


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


# No limits of a model begin meanwhile: then they would not know of this one.
OPEN_LEDGER = text("SELECT FROM open_ledger()")
LIMITED = text("SELECT name FROM limited_models(ARRAY[CAST(:team_id AS text)]) AS name WHERE name = :scope")
CORRECT = text("SELECT correct_balances(CAST(:scopes AS text[]), :day, :tokens, :nanousd)")


async def add_correction(connection: AsyncConnection, correction: Correction) -> Correction | None:
    """Book ``correction``, in the balances too, and return None; or return what is booked under its id already, and
    change nothing."""
    values = {name: getattr(correction, name) for name in Correction.__struct_fields__}
    query = insert(corrections).values(**values).on_conflict_do_nothing().returning(corrections.c.id)
    if (await connection.execute(query)).scalar_one_or_none() is not None:
        scopes = [f"team:{correction.team_id}"] + [f"key:{correction.key_id}"] * (correction.key_id is not None)
        if correction.model_used is not None:
            await connection.execute(OPEN_LEDGER)
            of = {"team_id": correction.team_id, "scope": f"model:{correction.team_id}/{correction.model_used}"}
            scopes += (await connection.execute(LIMITED, of)).scalars()
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


async def has_booked(connection: AsyncConnection, team_id: str, day: date, model: str) -> bool:
    """Tell whether a team's daily sums of a day name ``model``, which the catalogue may have forgotten since."""
    table = usage_daily.c
    query = select(literal(1)).where(table.team_id == team_id, table.day == day, table.model_used == model).limit(1)
    return (await connection.execute(query)).scalar_one_or_none() is not None
