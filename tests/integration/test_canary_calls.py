# Which rows of the ledger speak of a canary and of the model that it is to replace.

from __future__ import annotations

import pytest
from msgspec.structs import replace

from billing.core.ids import uuid7
from billing.core.records import OWN_KEY, Attempt
from billing.ledger.ledger import insert_records
from gateway.storage.database import Database
from gateway.upstreams.resilience.canaries import Seen, calls_of
from tests.support.clock import SetClock
from tests.support.factories import make_record

HERE = "openai/here/http://a/v1/gpt"
NOTHING = [Attempt(HERE, why, 1.0) for why in ("hedge_lost", "abandoned", "cached", "team_limit")]


@pytest.mark.parametrize("first", [*NOTHING, Attempt(HERE, "status_401", 1.0, OWN_KEY)], ids=lambda one: one.outcome)
async def test_what_a_caller_or_its_team_brings_about_speaks_against_no_canary(
    first: Attempt, database: Database, clock: SetClock
) -> None:
    """A first attempt that failed at the model itself does, and one whose hedge was sooner: it may hang for ever."""
    now = clock.now()
    failed, well = Attempt(HERE, "status_500", 1.0), Attempt(HERE, "ok", 1.0)
    late = Attempt(HERE, "hedge_lost", 1.0), replace(well, hedge=True)
    sooner = replace(late[0], hedge=True), well  # than its hedge, that is
    tried = [(first, well), (first, well), (failed, well), (well,), late, sooner]
    rows = [
        make_record(uuid7(int(now * 1000), number), attempts=attempts, route_reason="canary", created_at=now)
        for number, attempts in enumerate(tried)
    ]
    rows.append(make_record(uuid7(int(now * 1000), 9), attempts=(failed,), route_reason="hedge", created_at=now))
    async with database.begin() as connection:
        await insert_records(connection, rows, today=clock.today())
        base, canary = await calls_of(connection, "auto", now - 60)

    assert base == Seen() and (canary.calls, canary.failed, canary.late) == (4, 1, 1)
