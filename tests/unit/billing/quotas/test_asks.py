# What a process asks the database for.

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from billing.core.holds import HoldRequest, Leg, Limits, Scope
from billing.core.ids import day_of
from billing.quotas.leases import Leases
from tests.support.clock import SetClock


def test_an_ask_near_a_cap_wants_nothing_of_rooms_that_have_enough() -> None:
    """A room is filled up to what is worth having. One beside a tight balance had that much added with each ask, and
    gave it back within the second: a quarter of all returns of 200 owners at one cap."""
    clock = SetClock()
    leases = Leases(cast(Any, None), clock, "o", share=1.0)
    scopes = Scope("team", "t", Limits(nanousd_per_day=1_000)), Scope("key", "k", Limits())
    request = HoldRequest(request_id=clock.new_id(), team_id="t", scopes=scopes, legs=(Leg("a", 10, 100),))
    (of_tokens, of_money), (full, half_full) = leases.rooms.of(request)
    of_money.is_tight = True
    of_tokens.granted, full.granted, half_full.granted = 10_000, 50, 200

    (needs,) = leases.callers.asks([cast(Any, SimpleNamespace(request=request))])

    assert day_of(request.request_id) in leases.rooms.by_day
    assert [(need.need, need.want) for need in needs] == [(0, 0), (100, 100), (0, 0), (0, 300)]
