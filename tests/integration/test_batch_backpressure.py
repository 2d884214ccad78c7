# Batches give way to people: read from a real ledger, on a clock of the test's own.

from __future__ import annotations

import pytest

from billing.core.records import Attempt, UsageRecord
from billing.ledger.ledger import insert_records
from gateway.batch.running.adaptive_concurrency import ConcurrencyLimits
from gateway.batch.running.backpressure import LEARN_EVERY, LEAST_CALLS, SAMPLE_SECONDS, SAMPLES, WINDOW, Backpressure
from gateway.storage.database import Database
from tests.support.clock import SetClock
from tests.support.factories import make_record

SLOW, OTHER = "openai/us/https://slow/v1/m", "openai/us/https://other/v1/m"


class Ledger:
    """Writes what people met, at moments of the test's clock."""

    def __init__(self, database: Database) -> None:
        self.clock = SetClock()
        self.database = database
        self.limits = ConcurrencyLimits(16, self.clock)
        self.backpressure = Backpressure(self.limits, self.clock)
        for group in ("slow", "other"):
            for _ in range(1000):
                self.limits.of(group).succeeded()

    async def add(self, *calls: Attempt, ago: float = 1.0, count: int = LEAST_CALLS, tier: str = "interactive") -> None:
        """Add streamed calls that began ``ago`` seconds ago."""
        self.clock.move(-ago)
        records = [self._record(calls, tier) for _ in range(count)]
        self.clock.move(ago)
        async with self.database.begin() as connection:
            await insert_records(connection, records, today=self.clock.today())

    def _record(self, calls: tuple[Attempt, ...], tier: str) -> UsageRecord:
        waited = sum(each.ms for each in calls)
        return make_record(self.clock.new_id(), attempts=calls, tier=tier, first_token_ms=waited, total_ms=waited + 900)

    async def add_baseline(self, ms: float) -> None:
        """Add the hour before the present."""
        for sample in range(SAMPLES):
            for target in (SLOW, OTHER):
                await self.add(Attempt(target, "ok", ms), ago=WINDOW + SAMPLE_SECONDS * sample + 60)

    async def check(self) -> dict[str, int]:
        """Have the worker look, some batches of which go on all the time; return what each group runs at once."""
        self.backpressure.note_use("slow", SLOW)
        self.backpressure.note_use("other", OTHER)
        async with self.database.begin() as connection:
            await self.backpressure.check(connection)
        for group in ("slow", "other"):
            self.limits.of(group).succeeded()
        return {group: self.limits.of(group).current for group in ("slow", "other")}


@pytest.fixture
async def ledger(database: Database) -> Ledger:
    """A ledger of an hour in which first tokens took 400 ms."""
    ledger = Ledger(database)
    await ledger.add_baseline(400)
    return ledger


async def test_a_group_slows_where_people_wait_and_comes_back(ledger: Ledger) -> None:
    """Only that group, once for each time it is seen anew, held until people are served again."""
    assert await ledger.check() == {"slow": 16, "other": 16}

    await ledger.add(Attempt(SLOW, "ok", 900))
    await ledger.add(Attempt(OTHER, "ok", 450))
    assert await ledger.check() == {"slow": 8, "other": 16}
    ledger.clock.move(5)
    assert await ledger.check() == {"slow": 8, "other": 16}  # of the calls since then nothing is known
    await ledger.add(Attempt(SLOW, "ok", 700))
    assert (await ledger.check())["slow"] == 4

    ledger.clock.move(5)
    await ledger.add(Attempt(SLOW, "ok", 410))
    for _ in range(5):
        limits = await ledger.check()
    assert limits == {"slow": 4 + 1, "other": 16}


async def test_a_group_goes_on_where_no_caller_comes_any_more(ledger: Ledger) -> None:
    """After a minute without people there is nobody to give way to."""
    await ledger.add(Attempt(SLOW, "timeout", 20_000))
    assert (await ledger.check())["slow"] == 8

    ledger.clock.move(WINDOW)

    assert [(await ledger.check())["slow"] for _ in range(20)][-1] > 8


async def test_rate_limits_and_timeouts_of_people_count_for_the_target_that_gave_them(ledger: Ledger) -> None:
    """Even of calls that another target then answered; what it took there counts there."""
    ledger.clock.move(LEARN_EVERY)
    await ledger.add(Attempt(SLOW, "rate_limited", 20), Attempt(OTHER, "ok", 410), count=3)
    assert await ledger.check() == {"slow": 8, "other": 16}

    ledger.clock.move(WINDOW)
    await ledger.add(Attempt(SLOW, "timeout", 1500), Attempt(OTHER, "ok", 410))
    assert (await ledger.check())["slow"] == 4


async def test_what_batches_wait_for_and_whole_answers_count_for_nothing(ledger: Ledger) -> None:
    """They have no first token that anybody waits for."""
    await ledger.add(Attempt(SLOW, "ok", 9000), tier="batch")
    whole = [
        make_record(ledger.clock.new_id(), attempts=(Attempt(SLOW, "ok", 9000),), first_token_ms=9000, total_ms=9001)
        for _ in range(20)
    ]
    async with ledger.database.begin() as connection:
        await insert_records(connection, whole, today=ledger.clock.today())

    assert await ledger.check() == {"slow": 16, "other": 16}
