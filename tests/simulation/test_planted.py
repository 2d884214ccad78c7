# A simulation that finds nothing proves nothing, until it finds what was planted.

from __future__ import annotations

import pytest

from tests.simulation.invariants import Broken
from tests.simulation.planted import BUGS, IN_SEARCH, Bug
from tests.simulation.search import Search
from tests.simulation.story import story
from tests.simulation.world import World

SEEDS = 12  # worlds in which a bug must show


@pytest.mark.parametrize("bug", BUGS, ids=[bug.name for bug in BUGS])
def test_the_simulation_finds_a_planted_bug(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a few worlds, by the invariant that it breaks."""
    bug.plant(monkeypatch)
    seeds = sorted(range(SEEDS), key=lambda seed: seed != bug.shows_in)
    broken = next((found for seed in seeds if (found := _broken_in(seed, bug)) is not None), None)

    assert broken is not None
    assert broken.number in bug.numbers


@pytest.mark.parametrize("bug", [bug for bug in BUGS if bug.name in IN_SEARCH], ids=lambda bug: bug.name)
def test_the_search_finds_a_planted_bug(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    """Among the states of two calls and one fault."""
    bug.plant(monkeypatch)

    with pytest.raises(Broken):
        Search(calls=2, faults=1).run()


def _broken_in(seed: int, bug: Bug) -> Broken | None:
    world = World(seed)
    try:
        world.play(story(world, bug.plan))
    except AssertionError as exc:
        assert isinstance(exc.__cause__, Broken), exc
        return exc.__cause__
    return None
