# A million calls in simulated worlds, of which no two are alike; `make test` plays the first ten.

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from tests.simulation.conftest import quietly
from tests.simulation.search import Search
from tests.simulation.story import FEW, Plan, story
from tests.simulation.world import World

__all__ = ["quietly"]  # a fixture

PIECES = 50
WORLDS = 20  # in a piece, of a thousand calls each


@pytest.mark.soak
@pytest.mark.parametrize("piece", range(PIECES))
def test_a_million_calls_keep_the_books(piece: int, record_property: Callable[[str, object], None]) -> None:
    """Whatever befalls them: the seeds after those of `make test`."""
    seen: Counter[str] = Counter()
    rows = calls = 0
    try:
        for seed in range(1000 + WORLDS * piece, 1000 + WORLDS * (piece + 1)):
            world = World(seed, machines=1 + seed % 3)
            world.play(story(world, Plan()))
            rows += len(world.model.rows)
            calls += world.calls
            seen["refused"] += world.refused
            for request_id, row in world.model.rows.items():
                seen[row.status.value if request_id in world.closed else "lost"] += 1
    finally:
        told = {"fault": "simulated", "seed": piece, "faults": "all, simulated", "calls": dict(seen), "rows": rows}
        for name, value in (told | {"away": 0.0, "recovered": 0.0}).items():
            record_property(name, value)

    assert calls == 1000 * WORLDS
    assert seen["lost"] < rows <= calls - seen["refused"]


@pytest.mark.soak
@pytest.mark.parametrize("plan", FEW, ids=["limits", "all faults"])
def test_idle_room_comes_back_where_little_is_asked(plan: Plan) -> None:
    """As `make test` plays one world of either."""
    for seed in range(1000, 1200):
        world = World(seed)
        world.play(story(world, plan))


@pytest.mark.soak
@pytest.mark.parametrize(("calls", "faults"), [(2, 2), (3, 1)])
def test_the_invariants_hold_in_every_order(calls: int, faults: int) -> None:
    """As `make test` searches, with one fault more."""
    assert Search(calls=calls, faults=faults).run() > 50_000
