# Whether the parts answer: a look that anybody may ask for is taken once for all who ask.

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from gateway.storage.readiness import HOLDS_FOR, Readiness
from tests.support.clock import SetClock


class Parts:
    """Stands in for Postgres, Redis and the journal, and counts who asks."""

    def __init__(self) -> None:
        self.asked = 0
        self.is_away = False
        self.silent = 0  # owners

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[Any]:
        self.asked += 1
        await asyncio.sleep(0)
        if self.is_away:
            raise ConnectionError
        yield self

    async def execute(self, *_: object) -> Parts:
        return self

    def scalar_one(self) -> int:
        return self.silent

    async def ping(self) -> None: ...

    def check(self) -> str:
        return "ok"


def test_a_crowd_has_each_part_asked_once() -> None:
    """Else a few hundred sockets without a key would hold every connection to Postgres and make it look dead. An asker
    that leaves does not end the look for the others."""

    async def scene() -> None:
        parts: Any = Parts()
        readiness = Readiness(parts, parts, parts, SetClock())
        first, *others = [asyncio.create_task(readiness.parts()) for _ in range(300)]
        await asyncio.sleep(0)
        first.cancel()
        found = await asyncio.gather(*others)

        assert found == [{"postgres": "ok", "redis": "ok", "journal": "ok", "owners": "ok"}] * 299
        assert parts.asked == 1

    asyncio.run(scene())


def test_what_was_found_is_told_for_a_second() -> None:
    """Balancers hear of an outage soon, and of its end."""

    async def scene() -> None:
        parts, clock = Parts(), SetClock()
        readiness = Readiness(parts, parts, parts, clock)  # type: ignore[arg-type]
        told = [await readiness.parts()]
        parts.is_away = True
        clock.move(HOLDS_FOR / 2)
        told.append(await readiness.parts())
        clock.move(HOLDS_FOR / 2)
        told.append(await readiness.parts())

        assert [each["postgres"] for each in told] == ["ok", "ok", "does not answer"]

    asyncio.run(scene())


def test_owners_that_do_not_answer_are_told_and_still_while_postgres_is_away() -> None:
    """What they hold cannot be used: it stays told as it was last known."""

    async def scene() -> None:
        parts, clock = Parts(), SetClock()
        readiness = Readiness(parts, parts, parts, clock)  # type: ignore[arg-type]
        parts.silent = 2
        told = [await readiness.parts()]
        parts.is_away = True
        clock.move(HOLDS_FOR)
        told.append(await readiness.parts())

        assert [each["owners"] for each in told] == ["2 silent", "2 silent"]

    asyncio.run(scene())
