# One row of the ledger, found by the id that its answer carried.

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from uuid import UUID

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.core.ids import date_of
from billing.ledger.tables import usage_records


async def find_row(connection: AsyncConnection, request_id: str) -> Mapping[Any, Any] | None:
    """Return the row of a call, its columns by name, or ``None``. The id says the day, so one partition is read."""
    try:
        day = date_of(request_id)
        key = UUID(request_id)
    except (ValueError, OverflowError):  # no UUID, or not one of version 7
        return None
    query = select(usage_records).where(usage_records.c.day == day, usage_records.c.request_id == key)
    return (await connection.execute(query)).mappings().one_or_none()
