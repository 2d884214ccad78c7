# A connection to Postgres that breaks while it commits: what was asked for is done, and nobody heard of it. Every book
# must say so all the same.

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.audits import lasting_differences
from tests.support.house import House, running_house, settings_for
from tests.support.paying_team import PayingTeam
from tests.support.postgres_proxy import PostgresProxy, postgres_proxy
from tests.support.scripted_upstream import ScriptedUpstream


@pytest.fixture
def way(database_url: str) -> Iterator[PostgresProxy]:
    """The way to a database of the test's own."""
    with postgres_proxy(database_url) as way:
        yield way


@pytest.fixture
def house(way: PostgresProxy, redis_url: str, upstream: ScriptedUpstream, tmp_path: Path) -> Iterator[House]:
    """A gateway that takes it."""
    with running_house(settings_for(way.url, redis_url, upstream.url, tmp_path)) as house:
        yield house


def test_a_correction_is_counted_though_nobody_heard_that_it_was_booked(house: House, way: PostgresProxy) -> None:
    """Said again it changes nothing in the ledger; the counters, which nobody told, are built anew."""
    team = PayingTeam(house, usd_per_day=10)
    team.ask()
    said = {"id": str(uuid.uuid4()), "cost_usd": "4"}
    way.lose_commit_of("INSERT INTO corrections")
    unheard = team.correct(**said)
    again = team.correct(**said)

    assert (way.lost, unheard.status_code, again.status_code) == (1, 503, 201)
    assert team.usage().json()["corrections"]["entries"] == 1
    assert lasting_differences(house.settings.database_url, house.settings.redis_url) == []
