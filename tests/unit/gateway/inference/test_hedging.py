# When a second attempt is made, and which of two answers.

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from gateway.inference.hedging import FEWEST, SEEN, FirstTokenTimes, Hedger, Second
from gateway.upstreams.wire.errors import UpstreamError, UpstreamRefused
from router.catalog.targets import Endpoint, Target
from tests.support.house import model

TARGET = Target(model("small"), Endpoint("local", "http://upstream"))


def test_a_target_is_late_after_nineteen_of_twenty() -> None:
    """Of those lately seen; of fewer than twenty nothing is told."""
    times = FirstTokenTimes()
    for number in range(1, FEWEST):
        times.note(TARGET, number / 100)
    before = times.late(TARGET)
    times.note(TARGET, 9.0)
    late = times.late(TARGET)
    for _ in range(SEEN):
        times.note(TARGET, 0.5)

    assert (before, late, times.late(TARGET)) == (None, 0.19, 0.5)


@pytest.mark.parametrize(
    ("first", "second", "winner"),
    [
        ("a", "b", "first"),  # both at the same moment
        (UpstreamError("Broken."), "b", "second"),
        ("a", UpstreamError("Broken."), "first"),
        (UpstreamError("Broken."), UpstreamError("Broken."), None),
        (UpstreamRefused("No.", outcome="refused"), "b", "second"),
    ],
)
async def test_of_two_attempts_that_end_at_once_the_first_answers(first: Any, second: Any, winner: str | None) -> None:
    """A failure is no answer, whichever way it ends."""

    async def end(how: Any) -> Any:
        if isinstance(how, Exception):
            raise how
        return how

    tasks = {"first": asyncio.ensure_future(end(first)), "second": asyncio.ensure_future(end(second))}
    beside = cast(Any, Second)(None, None, None, tasks["second"])
    won = await Hedger._sooner(cast(Any, None), tasks["first"], beside)

    assert won is (tasks[winner] if winner else None)
    for task in tasks.values():
        task.exception()
