# Small worlds, each from its seed: whatever befalls them, the invariants hold. A seed that fails shows the end of its
# trace; it is played again by its number alone.

from __future__ import annotations

import pytest

from tests.simulation.story import FEW, Plan, story
from tests.simulation.world import World


@pytest.mark.parametrize("seed", range(10))  # 10,000 calls; a million others in a soak
def test_the_invariants_hold_whatever_befalls(seed: int) -> None:
    """A thousand calls among crashes, partitions, failovers, clocks, disks and caps that move."""
    world = World(seed)

    world.play(story(world, Plan()))

    assert world.calls == 1000
    assert len(world.model.rows) > 100


@pytest.mark.parametrize("seeds", [range(1), pytest.param(range(1, 30), marks=pytest.mark.soak)], ids=["some", "many"])
@pytest.mark.parametrize("plan", FEW, ids=["limits", "all faults"])
def test_idle_room_comes_back_where_little_is_asked(plan: Plan, seeds: range) -> None:
    """Room that is drawn and unused beside a tight balance goes back in its time, whatever befalls and is lost."""
    for seed in seeds:
        world = World(seed)

        world.play(story(world, plan))


def test_a_seed_is_a_world() -> None:
    """The same seed twice tells the same story."""
    first, second = World(3), World(3)
    for world in (first, second):
        world.play(story(world, Plan(calls=300)))

    assert first.trace == second.trace
