# Parts of a target's slots that are reserved for teams: others borrow what is free, and the team has the next place.

from __future__ import annotations

import math
import random

import pytest

from gateway.overload.slots import QueuedCall, Slot, SlotPool, SlotQueues

PARTS = {"a": 0.5, "b": 0.25}


class Scene:
    """One target of eight slots, of which four are a's and two b's; calls in the order in which they came in."""

    def __init__(self, *, has_queue: bool) -> None:
        self.queues, self.pool, self.now = SlotQueues(1000, 10.0), SlotPool("one", 8), 0.0
        self.pool.reserved, self.pool.capacity, self.pool.has_queue = PARTS, 8, has_queue
        self.held: list[tuple[str, Slot]] = []
        self.waiting: list[QueuedCall] = []

    def come(self, team: str, is_batch: bool = False) -> bool:
        """Let a call come; return whether it goes at once."""
        self.now += 0.01
        if self.pool.has_free_for(team, is_batch):
            self.held.append((team, self.pool.give(team, 1.0, is_batch, self.now)))
            return True
        queued = self.queues.join(team, 1.0, is_batch, "normal", [self.pool], self.now)
        assert queued is not None
        self.waiting.append(queued)
        return False

    def end(self, place: int = 0) -> list[str]:
        """Let a call end; return whose turn it is then."""
        self.now += 1.0
        _, slot = self.held.pop(place)
        return self.note(self.queues.release(slot, self.now))

    def note(self, admitted: list[QueuedCall]) -> list[str]:
        """Note whose turn it was."""
        for queued in admitted:
            assert queued.slot is not None
            self.held.append((queued.team, queued.slot))
            self.waiting.remove(queued)
        return [queued.team for queued in admitted]

    def held_by(self, team: str) -> int:
        """Return how many slots a team holds."""
        return sum(whose == team for whose, _ in self.held)


def test_what_is_free_is_borrowed() -> None:
    """All of it, by teams with a part and without."""
    for team in ("c", "a", "b"):
        scene = Scene(has_queue=False)
        assert all(scene.come(team) for _ in range(8)) and not scene.come("d")


def test_an_engine_gives_a_team_its_part_at_once() -> None:
    """Beyond its slots, up to the part; from then on the team waits as all do, and no other gets a slot until those
    beyond have ended."""
    scene = Scene(has_queue=True)
    for _ in range(10):
        scene.come("c")
    went = [scene.come("a") for _ in range(5)]
    batch = scene.come("b", is_batch=True)
    turns = [scene.end() for _ in range(5)]

    assert (went, batch) == ([True] * 4 + [False], False)
    assert turns[:4] == [[]] * 4 and turns[4] != []
    assert scene.held_by("a") in (4, 5)


def test_a_team_whose_call_ends_has_its_place_for_the_next() -> None:
    """While others hold more than is theirs: its waiting call goes, and theirs do not."""
    scene = Scene(has_queue=True)
    for _ in range(9):
        scene.come("c")
    for _ in range(5):
        scene.come("a")
    place = next(place for place, (team, _) in enumerate(scene.held) if team == "a")

    assert scene.end(place) == ["a"]
    assert [queued.team for queued in scene.waiting] == ["c"]


def test_elsewhere_the_next_slot_is_the_teams() -> None:
    """Of a target that is sent no more than its slots; before calls that have waited longer, up to its part."""
    scene = Scene(has_queue=False)
    for _ in range(11):
        scene.come("c")
    went = [scene.come("a") for _ in range(6)]
    turns = [scene.end() for _ in range(5)]

    assert not any(went)
    assert turns[:4] == [["a"]] * 4 and len(turns[4]) == 1
    assert len(scene.held) == 8


@pytest.mark.parametrize("has_queue", [True, False])
def test_a_target_that_takes_none_takes_no_owner(has_queue: bool) -> None:
    """It drains, or rests: what is reserved there is nothing."""
    scene = Scene(has_queue=has_queue)
    scene.pool.limit = 0
    drains = scene.come("a")
    scene.pool.limit, scene.pool.is_resting = 8, True

    assert not drains and not scene.come("a")


@pytest.mark.parametrize("has_queue", [True, False])
def test_nothing_is_lost_or_lent_for_ever(has_queue: bool) -> None:
    """Whatever comes and ends: no slot is free while a call waits, at an engine no team waits below its part, and what
    is beyond the slots is no more than the parts."""
    dice, scene = random.Random(5), Scene(has_queue=has_queue)
    for _ in range(600):
        if scene.held and dice.random() < 0.5:
            scene.end(dice.randrange(len(scene.held)))
        elif dice.random() < 0.1:
            scene.note(scene.queues.resize(scene.pool, dice.choice((1, 4, 8)), scene.now))
        else:
            scene.come(dice.choice("abcd"), is_batch=dice.random() < 0.2)
        waits = {queued.team for queued in scene.waiting if not queued.is_batch}
        beyond = sum(math.ceil(part * 8) for part in PARTS.values()) if has_queue else 0
        assert not (scene.waiting and scene.pool.has_free)
        assert len(scene.held) <= 8 + beyond
        if has_queue:
            assert all(scene.held_by(team) >= PARTS[team] * 8 for team in waits & PARTS.keys())
    while scene.held:
        scene.end()

    assert not scene.waiting and not scene.pool.held and not any(scene.pool._owned.values())
