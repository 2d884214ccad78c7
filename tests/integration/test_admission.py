# The hold of a call whose gateway stood still: it comes too late at first, and once more in time.

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from redis.asyncio import Redis

from billing.errors import TooLate
from billing.holds import Hold, HoldRequest, RefusedHold
from billing.journal import Journal
from billing.quotas import Quotas
from gateway.access import Caller, Team
from gateway.answering.admission import OPEN_WITHIN, admit
from gateway.answering.call import Call
from gateway.answering.keeper import Keeper
from gateway.services import Services
from protocol.chat import ChatRequest, Message
from router import Wish
from router.targets import Endpoint, Route, Target
from tests.support.clock import SetClock
from tests.support.house import model


class StandsStill(Quotas):
    """Quotas of a process that stands still before it asks Redis, so many times."""

    times = 0

    async def open(self, request: HoldRequest) -> Hold | RefusedHold:
        """Ask, after a standstill longer than a hold is waited for."""
        if self.times:
            self.times -= 1
            cast(SetClock, self._clock).move(OPEN_WITHIN + 1)
        return await super().open(request)


@pytest.fixture
async def services(redis: Redis, tmp_path: Path) -> AsyncIterator[Services]:
    """What admission needs of them."""
    clock = SetClock()
    journal = Journal.open(tmp_path, clock=clock)
    quotas = StandsStill(redis, clock, uses_server_time=False)
    parts: Any = SimpleNamespace(clock=clock, quotas=quotas, journal=journal, keeper=Keeper())
    yield parts
    journal.close()


def call_of(services: Services) -> tuple[Call, Route]:
    """Return a call and its route."""
    call = Call(
        request_id=services.clock.new_id(),
        caller=Caller(team=Team(id="a", name="A"), key_id="k"),
        endpoint="chat.completions",
        request=ChatRequest(model="small", messages=(Message(role="user", content="Hi"),), max_tokens=10),
        wish=Wish(),
        created_at=services.clock.now(),
        started=0.0,
    )
    return call, Route("small", (Target(model("small"), Endpoint("here", "http://upstream")),), "named")


async def test_a_gateway_that_stood_still_asks_once_more(services: Services) -> None:
    """Its client still waits, and nothing was held the first time: the call is admitted, and held once."""
    cast(StandsStill, services.quotas).times = 1

    account = await admit(services, *call_of(services))

    assert not account.hold.standalone
    assert (await services.quotas.usage("a")).live == 1


async def test_one_that_stands_still_again_says_so(services: Services) -> None:
    """Nothing is held and nothing was run: the client is told to try again."""
    cast(StandsStill, services.quotas).times = 2

    with pytest.raises(TooLate):
        await admit(services, *call_of(services))

    assert (await services.quotas.usage("a")).live == 0
