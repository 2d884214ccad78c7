# Where prompts are placed by what replicas tell: at their blocks, but for what waits there, and by their own team's.

from __future__ import annotations

import pytest

from gateway.overload.placement import Placement
from gateway.overload.slots import Slot, SlotPool
from protocol.chat import ChatRequest, Message
from router.cached_prompts import ON_DEVICE, CachedPrompts
from router.catalog.targets import Endpoint, Target
from tests.support.house import model

REPLICAS = [Target(model("m"), Endpoint("here", f"http://gpu-{number}:8100/v1")) for number in range(3)]
TEAM = "red"


def asked(*said: str) -> ChatRequest:
    turns = [Message(role="assistant" if at % 2 else "user", content=text) for at, text in enumerate(said)]
    return ChatRequest(model="m", messages=tuple(turns))


LONG = "How many toll gates stand on the long road? " * 200


def cached_at(*places: int) -> dict[str, CachedPrompts]:
    """Return what replicas tell, of which those at ``places`` tell at all, and the last has the long prompt."""
    marks = Placement().marked(asked(LONG), TEAM).marks
    told = {REPLICAS[place].endpoint.base_url: CachedPrompts() for place in places}
    told[REPLICAS[places[-1]].endpoint.base_url].store([(mark, mark) for mark in marks], ON_DEVICE)
    return told


def slot() -> Slot:
    return SlotPool("m", None).give("red", 1.0, False, 0.0)


def first(placement: Placement, request: ChatRequest, team: str = TEAM) -> int:
    return REPLICAS.index(placement.by_work(REPLICAS, request, team)[0])


def test_a_conversation_goes_to_its_blocks_and_another_teams_does_not() -> None:
    """The same words of another team have other marks: they keep the order of their homes."""
    placement = Placement(cached_at(0, 1, 2))
    next_turn = asked(LONG, "Forty.", "And by night?")

    assert (first(placement, next_turn), first(placement, next_turn, "blue")) == (2, 0)
    assert not set(placement.marked(next_turn, TEAM).marks) & set(placement.marked(next_turn, "blue").marks)


def test_what_is_sent_counts_until_it_is_computed_also_where_nothing_is_told() -> None:
    """Two replicas tell; the third, beside them, has as much to do. What share was expected is said of the two."""
    placement, other = Placement(cached_at(0, 1)), asked("Who keeps them? " * 600)
    held = [slot() for _ in REPLICAS]
    for at, target in enumerate(REPLICAS):
        placement.begin(held[at], target, other if at else asked(LONG), TEAM, 0.0, 0)
    while_all_compute = first(placement, asked("Which way? " * 100))
    expected = [placement.note_first_token(held[at], 1.0) for at in (1, 2)]
    placement.begin(second := slot(), REPLICAS[1], asked(LONG), TEAM, 2.0, 0)
    known = placement.note_first_token(second, 3.0)
    for each in (*held, *held):
        placement.end(each, 4.0)

    assert while_all_compute == 0
    assert expected == [0.0, None] and known == pytest.approx(1.0, abs=0.1)
    assert placement.note_first_token(held[0], 4.0) is None


def test_only_a_replica_that_tells_is_told_of_prompts() -> None:
    """Of those that have a mark; nobody is told where no replica tells."""
    placement = Placement(cached_at(1))
    told = [placement.header_for(asked(text), TEAM, REPLICAS[at]) for text, at in ((LONG, 1), (LONG, 0), ("Hi", 1))]

    assert told[0].startswith(f"{placement.marked(asked(LONG), TEAM).size}:") and told[1:] == ["", ""]
    assert Placement().header_for(asked(LONG), TEAM, REPLICAS[1]) == ""
    assert not Placement().tells(*REPLICAS) and placement.tells(*REPLICAS)


def test_a_replica_that_is_gone_is_forgotten_when_its_calls_are() -> None:
    """Replicas come and go for months; what was measured of one that stays is kept."""
    placement = Placement(cached_at(0, 1))
    held = [slot() for _ in REPLICAS]
    for at, target in enumerate(REPLICAS):
        placement.begin(held[at], target, asked(LONG), TEAM, 0.0, 0)
        placement.note_first_token(held[at], 1.0)
    placement.end(held[0], 4.0)
    placement.end(held[1], 4.0)
    placement.keep({REPLICAS[0].endpoint.base_url})
    left = [*placement._prefills]
    placement.end(held[2], 4.0)
    placement.keep({REPLICAS[0].endpoint.base_url})

    assert left == [REPLICAS[0].endpoint.base_url, REPLICAS[2].endpoint.base_url]
    assert [*placement._prefills] == [REPLICAS[0].endpoint.base_url]


def test_a_replica_that_was_slow_long_ago_is_not_told_of() -> None:
    """Also where no call has come since: an alert on it would never end. Calls of low priority, which an engine lets
    wait, are compared with their like."""
    placement = Placement()
    for at in range(8):
        for place, comes, priority in ((0, 0.1, "normal"), (1, 5.0, "normal"), (2, 5.0, "low")):
            placement.begin(held := slot(), REPLICAS[place], asked("Hi"), TEAM, at / 10, 100, priority)
            placement.note_first_token(held, at / 10 + comes)

    assert [*placement.slow(6.0)] == [REPLICAS[1].endpoint.base_url] and placement.slow(600.0) == {}
