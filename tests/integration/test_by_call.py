# Reports over single calls: what takes too long is said to be too long, and nothing else suffers from it.

from __future__ import annotations

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from gateway.reports.usage_report import added_up_by_call
from gateway.storage.database import Database
from protocol.errors import BadRequest


async def test_too_many_calls_are_a_mistake_of_the_question(database: Database) -> None:
    """Postgres stops a sum that takes too long, the caller hears what to do, and the transaction goes on."""
    async with database.begin() as connection:
        with pytest.raises(BadRequest) as refusal:
            async with added_up_by_call(connection, 0.05):
                await connection.execute(text("SELECT pg_sleep(30)"))
        after = (await connection.execute(text("SHOW statement_timeout"))).scalar_one()

    assert (refusal.value.param, refusal.value.code) == ("from", "period_too_long")
    assert after == "10s"


async def test_other_faults_are_told_as_they_are(database: Database) -> None:
    """Only a sum that takes too long is the question's fault."""
    async with database.begin() as connection:
        with pytest.raises(DBAPIError):
            async with added_up_by_call(connection):
                await connection.execute(text("SELECT 1/0"))
