# How many calls an engine takes, by its own reports: as many as it runs and a short queue, shared among gateways.

from __future__ import annotations

import pytest

from gateway.fleet.engines import PART, is_full, slots_from
from protocol.serving.engine_load import EngineLoad


def report(running: int, queued: int = 0, most: int = 256, status: str = "active") -> EngineLoad:
    return EngineLoad(
        instance_id="i", model_id="m", status=status, running=running, queue_depth=queued, max_running=most
    )


def test_an_engine_takes_what_it_can_run_and_a_short_queue() -> None:
    """Known from the first look on, before any call."""
    assert slots_from(report(0), 0, None) == 256 + 256 // PART


def test_calls_of_other_gateways_count() -> None:
    """Of two gateways neither sends what the other's calls leave no room for."""
    assert slots_from(report(200), 50, None) == 288 - 150


@pytest.mark.parametrize("status", ["starting", "draining"])
def test_an_engine_that_starts_or_goes_takes_none(status: str) -> None:
    """Calls go to the other replicas, or wait for it to be there."""
    assert slots_from(report(3, status=status), 3, 100) == 0


@pytest.mark.parametrize(
    ("said", "full"),
    [
        (report(288), False),
        (report(256, 256 // PART), False),  # as long as its queue is to be
        (report(256, 256 // PART + 1), True),
        (report(9, 3, most=8), True),
        (report(3, status="draining"), True),
        (report(3, 9, most=0), False),  # nobody knows what it runs
    ],
)
def test_an_engine_is_full_when_more_waits_there_than_it_needs(said: EngineLoad, full: bool) -> None:
    """Whoever sent it: this is what has calls go elsewhere first."""
    assert is_full(said) is full


def test_an_engine_that_does_not_say_is_not_limited() -> None:
    """Then its own 503 is all that tells."""
    assert slots_from(report(3, most=0), 3, None) is None


def test_a_long_queue_inside_narrows_it_in_small_steps() -> None:
    """Memory may end before sequences do: what waits inside is not sent any more, an eighth a look."""
    slots, held = 288, 288
    steps = []
    for _ in range(20):
        running = min(held, 100)  # no more fit
        found = slots_from(report(running, held - running), held, slots)
        assert found is not None
        steps.append(found / slots)
        slots = held = found

    assert 100 < slots <= 100 + 256 // PART + 100 // PART
    assert min(steps) >= 1 - 1 / PART - 0.01


def test_an_engine_that_has_room_again_is_filled_again() -> None:
    """An eighth a look, and never beyond what it runs."""
    slots = 100
    for _ in range(20):
        found = slots_from(report(slots), slots, slots)
        assert found is not None and slots <= found <= slots + max(1, slots // PART)
        slots = found

    assert slots == 288


def test_some_call_always_gets_through() -> None:
    """However long the queue inside, and whoever's it is."""
    assert slots_from(report(1, 500), 1, 1) == 1
    assert slots_from(report(256, 500), 0, None) == 1
