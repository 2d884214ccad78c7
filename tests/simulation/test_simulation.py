# Many small worlds, each from its seed: whatever befalls them, the invariants hold.

from __future__ import annotations

import pytest

from tests.simulation.story import Plan, story
from tests.simulation.world import World


@pytest.mark.parametrize("seed", range(20))
def test_the_invariants_hold_whatever_befalls(seed: int) -> None:
    """A thousand calls among crashes, partitions, failovers, clocks and caps that move."""
    world = World(seed)

    world.play(story(world, Plan()))

    assert len(world.model.rows) > 200
