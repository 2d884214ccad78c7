# How the versions of a rollout compare, by the rows that gateways leave in the ledger.

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
from redis.asyncio import Redis

from billing.core.ids import uuid7
from billing.core.records import Attempt, UsageRecord
from billing.ledger.ledger import insert_records
from billing.ledger.version_calls import SLICE
from gateway.fleet.comparing import Slice
from gateway.fleet.membership import Member
from gateway.fleet.rollouts import (
    Rolling,
    compare_versions,
    compared_key,
    read_compared,
    rollout_key,
)
from gateway.storage.database import Database
from protocol.serving.announcements import Announcement
from tests.support.clock import SetClock
from tests.support.factories import make_record

NEW, OLD = "0" * 11 + "2", "0" * 11 + "1"
AT_NEW, AT_OLD = "http://10.0.0.2:8100/v1", "http://10.0.0.1:8100/v1"


def member(revision: str, base_url: str, number: int = 1) -> Announcement:
    """Return what a replica of a revision says."""
    facts: dict[str, Any] = {"pool": "own", "model": "tiny", "state": "active", "sent_at": 1.0}
    instance = f"own.{revision}.0000000{number}-00000000"
    return Announcement(instance_id=instance, base_url=base_url, number=number, **facts)


def known(*said: Announcement) -> list[Member]:
    """Return replicas as a gateway knows them."""
    return [Member(said=one, heard_at=0.0, heard_on=0.0) for one in said]


class Ledger:
    """Rows of calls, in slices of time."""

    def __init__(self, database: Database, now: float) -> None:
        self.database, self.now, self.rows = database, now, list[UsageRecord]()

    def add(self, slices_ago: int, *attempts: tuple[str, str, float], prompt: int = 100, **fields: Any) -> None:
        """Note a call with these attempts: where, how it ended, after how many milliseconds."""
        moment = (self.now // SLICE - slices_ago) * SLICE + 1.0
        tried = tuple(Attempt(f"own/here/{where}/tiny", outcome, ms) for where, outcome, ms in attempts)
        usual: dict[str, Any] = {"input_tokens": prompt, "cached_input_tokens": 0, "first_token_ms": 1.0}
        usual |= {"tier": "interactive", "created_at": moment, "provider": "own", "attempts": tried} | fields
        self.rows.append(make_record(uuid7(int(moment * 1000), len(self.rows)), **usual))

    async def compare(self, redis: Redis, members: list[Member]) -> tuple[Slice, ...]:
        """Compare, and return what the controller reads."""
        async with self.database.begin() as connection:
            await insert_records(connection, self.rows, today=datetime.fromtimestamp(self.now, UTC).date())
            self.rows.clear()
            await compare_versions(redis, connection, {"own": "here", "idle": "here"}, members, self.now)
        return (await read_compared(redis, ["own"]))["own"].slices


def rolling(**more: Any) -> Rolling:
    """Return a rollout that stands."""
    facts: dict[str, Any] = {"state": "standing", "revision": NEW, "kept": OLD, "share": 0.25, "since": 0.0}
    return Rolling(**(facts | {"due_at": None} | more))


@pytest.fixture
def ledger(database: Database, clock: SetClock) -> Ledger:
    """A ledger without a row."""
    return Ledger(database, clock.now())


async def test_versions_are_compared_by_the_ledger(ledger: Ledger, redis: Redis) -> None:
    """By time and size of prompt: what failed, and how much later first tokens came; each attempt at its replica. What
    tells nothing of either is left out, and slices in which one was not asked."""
    await redis.set(rollout_key("own"), msgspec.json.encode(rolling()))
    for number in range(3):
        ledger.add(2, (AT_NEW, "ok", 80.0 * (1 + number)))
        ledger.add(2, (AT_OLD, "ok", 40.0 * (1 + number)))
        ledger.add(2, (AT_OLD, "ok", 4000.0), prompt=64_000)  # no prompt of that size at the new one
    ledger.add(2, (AT_NEW, "reset", 5.0), (AT_OLD, "ok", 90_000.0), tier="batch")
    ledger.add(2, (AT_NEW, "status_500", 5.0), (AT_OLD, "cut", 5.0), first_token_ms=None)  # the call's own doing
    ledger.add(2, (AT_NEW, "refused", 5.0))
    ledger.add(2, (AT_NEW, "abandoned", 5.0))
    ledger.add(2, (AT_NEW, "team_limit", 0.0))
    ledger.add(2, (AT_NEW + "2", "ok", 1.0), prompt=64_000)  # another address
    ledger.add(3, (AT_OLD, "ok", 40.0))
    (one,) = await ledger.compare(redis, known(member(NEW, AT_NEW), member(OLD, AT_OLD)))

    assert (one.calls, one.failed, one.calls_before, one.failed_before) == (4, 1, 8, 0)
    assert (one.timed, one.timed_before, one.freedom) == (3, 3, 4)
    assert one.weighed / one.weight == pytest.approx(math.log(2))


async def test_a_replica_that_is_gone_is_remembered_by_its_version(ledger: Ledger, redis: Redis) -> None:
    """As long as the rollout is the same; a pool without a rollout, or whose rollout is over, is not compared."""
    await redis.set(rollout_key("own"), msgspec.json.encode(rolling()))
    ledger.add(1, (AT_NEW, "reset", 1.0), (AT_OLD, "ok", 1.0))
    first = await ledger.compare(redis, known(member(NEW, AT_NEW), member(OLD, AT_OLD)))
    later = await ledger.compare(redis, known(member(OLD, AT_OLD)))
    await redis.set(rollout_key("own"), msgspec.json.encode(rolling(since=ledger.now - 1)))
    other = await ledger.compare(redis, known(member(NEW, AT_NEW, 2)))
    await redis.set(rollout_key("own"), msgspec.json.encode(rolling(state="rolled_back", reason="it failed")))
    await redis.delete(compared_key("own"))
    async with ledger.database.begin() as connection:
        await compare_versions(redis, connection, {"own": "here"}, known(member(NEW, AT_NEW)), ledger.now)

    assert first == later == (Slice(1, 1, 1, 0),) and other == ()
    assert await read_compared(redis, ["own", "idle"]) == {}


def test_a_rollout_is_stuck_once_it_is_overdue() -> None:
    """By any look, also where no controller is left to say so."""
    one = rolling(due_at=100.0)

    assert (one.state_at(100.0), one.state_at(100.1)) == ("standing", "stuck")
    assert one.why(100.0) == "stands at its share" and "nothing has moved" in one.why(101.0)
    assert rolling(state="rolled_back", reason="it failed").why(1e9) == "it failed"
