# Booking a correction: what an admin may say, what it must agree with, and the entry in the audit log beside it, in one
# transaction. Nothing is ever edited, so an entry that was wrong is put right by another.

from __future__ import annotations

import re
from collections.abc import Collection
from datetime import date
from decimal import Decimal
from typing import Any
from uuid import UUID

from msgspec import Struct
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.core.money import NanoDollars, to_nano
from billing.ledger.corrections import Correction, add_correction, has_booked
from billing.ledger.ledger import find_row
from gateway.accounts.serializers import cost_view, shown
from gateway.accounts.team_keys import get_key
from gateway.accounts.teams import check_team
from gateway.core.clock import Clock, read_day
from gateway.core.errors import Conflict
from gateway.storage.audit_log import Act, record_act
from protocol.errors import NotFound, invalid_value, missing_param

MOST_USD = 1_000_000
MOST_TOKENS = 10**12
LONGEST_REASON = 500  # characters
NANO_USD = Decimal("1e-9")

_UUID = re.compile(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")


class NewCorrection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A correction to book. Team, day, model and key may be left to ``request_id``, and must agree with it."""

    cost_usd: Decimal  # signed: a refund is negative
    reason: str
    id: str | None = None  # a UUID of the caller's, so that a repeated request books once
    team_id: str | None = None
    date: str | None = None  # the UTC day that is corrected
    input_tokens: int = 0
    output_tokens: int = 0
    model: str | None = None
    key_id: str | None = None
    request_id: str | None = None


async def book_correction(
    connection: AsyncConnection, new: NewCorrection, act: Act, clock: Clock, models: Collection[str]
) -> Correction:
    """Book a correction and return it; said again under its id, what was booked the first time.

    ``models``: those of the catalogue. Raises BadRequest, NotFound, and Conflict for an id with another content.
    """
    correction = await _check(connection, new, act, clock, models)
    booked = await add_correction(connection, correction)  # with its day's and month's balances
    if booked is None:
        view = correction_view(correction)
        details = {name: value for name, value in view.items() if name not in ("object", "id", "who", "team_id")}
        subject = str(correction.id)
        await record_act(
            connection, act, "correction.booked", team_id=correction.team_id, subject=subject, details=details
        )
        return correction
    if booked.says_what(correction):
        return booked
    words = f"There is another correction with the id '{correction.id}'. Leave 'id' out, or choose another."
    raise Conflict(words, param="id", code="correction_exists")


def correction_view(correction: Correction) -> dict[str, Any]:
    """Return a correction as admins see it."""
    return {
        "object": "correction",
        "id": str(correction.id),
        "date": correction.day.isoformat(),
        "model": correction.model_used,
        "request_id": None if correction.request_id is None else str(correction.request_id),
        **shown(correction, "team_id", "key_id", "input_tokens", "output_tokens", "reason", "created_at"),
        **cost_view(correction.cost_nanousd),
        "who": correction.actor,
        "booked_on": correction.booked_on.isoformat(),
    }


def read_uuid(said: str, name: str) -> UUID:
    """Return a UUID as it is usually written. Raises BadRequest."""
    if _UUID.fullmatch(said):
        return UUID(said)
    raise invalid_value(name, "must be a UUID such as 0196090a-7c00-7000-8000-000000000000")


async def _check(
    connection: AsyncConnection, new: NewCorrection, act: Act, clock: Clock, models: Collection[str]
) -> Correction:
    today = clock.today()
    cost, reason = _cost(new.cost_usd), _reason(new.reason)
    for name in ("input_tokens", "output_tokens"):
        if abs(getattr(new, name)) > MOST_TOKENS:
            raise invalid_value(name, f"must be from -{MOST_TOKENS} to {MOST_TOKENS}")
    if not (cost or new.input_tokens or new.output_tokens):
        raise invalid_value("cost_usd", "is 0 and so are the tokens: there is nothing to correct")
    identity = read_uuid(new.id, "id") if new.id is not None else UUID(clock.new_id())
    day = _day(new.date, today) if new.date is not None else None
    if new.request_id is None:
        where = await _of_day(connection, new, day, models)
    else:
        where = await _of_call(connection, new, read_uuid(new.request_id, "request_id"), day)
    return Correction(
        id=identity,
        **where,
        input_tokens=new.input_tokens,
        output_tokens=new.output_tokens,
        cost_nanousd=cost,
        reason=reason,
        actor=act.actor,
        booked_on=today,
        created_at=clock.moment(),
    )


async def _of_day(
    connection: AsyncConnection, new: NewCorrection, day: date | None, models: Collection[str]
) -> dict[str, Any]:
    """Return what a correction of a team's day is booked under."""
    if new.team_id is None or day is None:
        missing = "team_id" if new.team_id is None else "date"
        words = f"Missing required parameter: '{missing}'. Only with a 'request_id' it may be left out."
        raise missing_param(missing, words)
    await check_team(connection, new.team_id)
    if new.key_id is not None and (await get_key(connection, new.key_id)).team_id != new.team_id:
        raise invalid_value("key_id", f"names a key of another team than '{new.team_id}'")
    model = new.model
    if not (
        model is None
        or model in models
        or (model.isprintable() and await has_booked(connection, new.team_id, day, model))
    ):
        raise invalid_value("model", "must be a model of the catalogue, or one that the team's books of that day name")
    return {"team_id": new.team_id, "day": day, "key_id": new.key_id, "model_used": model}


async def _of_call(
    connection: AsyncConnection, new: NewCorrection, request_id: UUID, day: date | None
) -> dict[str, Any]:
    """Return what a correction of one call is booked under: what the ledger says of it."""
    if new.team_id is not None:
        await check_team(connection, new.team_id)
    row = await find_row(connection, str(request_id))
    if row is None:
        raise NotFound(
            f"There is no usage record '{request_id}'. A refused call has none.",
            param="request_id",
            code="usage_record_not_found",
        )
    said = {"team_id": new.team_id, "date": day, "model": new.model, "key_id": new.key_id}
    for name, column in (("team_id", "team_id"), ("date", "day"), ("model", "model_used"), ("key_id", "key_id")):
        if said[name] not in (None, row[column]):
            raise invalid_value(
                name, f"does not agree with the call, which has {str(row[column])[:100]!r}. Leave it out"
            )
    found = {name: row[name] for name in ("team_id", "day", "key_id", "model_used", "tier")}
    return {**found, "request_id": request_id}


def _cost(said: Decimal) -> NanoDollars:
    if not said.is_finite() or abs(said) > MOST_USD:
        raise invalid_value("cost_usd", f"must be dollars from -{MOST_USD} to {MOST_USD}")
    if said != said.quantize(NANO_USD):
        raise invalid_value("cost_usd", "has at most nine decimal places: money is whole nano-dollars")
    return to_nano(said)


def _reason(said: str) -> str:
    reason = said.strip()
    if 1 <= len(reason) <= LONGEST_REASON and reason.isprintable():
        return reason
    raise invalid_value("reason", f"must be one printable line of 1 to {LONGEST_REASON} characters")


def _day(said: str, today: date) -> date:
    day = read_day(said, "date")
    if day > today:
        raise invalid_value("date", f"must not lie in the future: today is {today} (UTC)")
    return day
