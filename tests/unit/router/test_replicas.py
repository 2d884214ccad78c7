# Replicas: a beginning has its own, the load is bounded, and whoever goes takes nobody else's place along.

from __future__ import annotations

import heapq
import math
import random
from collections import Counter
from functools import partial
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.cached_prompts import NOTHING_FOUND, Found
from router.catalog.targets import Endpoint, Target
from router.replicas import SLOW, Lateness, Standing, VersionShare, by_beginning, by_version, by_work
from tests.support.house import model

REPLICAS = [Target(model("m"), Endpoint("here", f"http://gpu-{number}:8100/v1")) for number in range(4)]
OPENINGS = [f"Which river flows through city {number}?" for number in range(1000)]


def home_of(beginning: str, replicas: list[Target] = REPLICAS) -> str:
    return by_beginning(replicas, beginning, [0] * len(replicas))[0].endpoint.base_url


def test_beginnings_have_homes_and_share_the_replicas() -> None:
    """The same one in whatever process, and however the replicas are ordered; and all of them are used."""
    homes = [home_of(opening) for opening in OPENINGS]

    assert homes == [home_of(opening, REPLICAS[::-1]) for opening in OPENINGS]
    assert all(200 < count < 300 for count in Counter(homes).values())
    assert home_of("Hello") == "http://gpu-0:8100/v1"


def test_a_replica_that_goes_moves_its_own_alone() -> None:
    """All others stay where they are cached."""
    stays = [replica for replica in REPLICAS if replica is not REPLICAS[1]]

    for opening in OPENINGS:
        if (home := home_of(opening)) != REPLICAS[1].endpoint.base_url:
            assert home_of(opening, stays) == home


@given(st.lists(st.integers(0, 3), min_size=1, max_size=300))
def test_no_load_passes_its_bound(openings: list[int]) -> None:
    """Even when all say the same: calls that come while others run never make more than a quarter beyond the mean."""
    loads = [0] * len(REPLICAS)
    for opening in openings:
        first = by_beginning(REPLICAS, str(opening), loads)[0]
        loads[REPLICAS.index(first)] += 1

        assert max(loads) <= -(-1.25 * sum(loads) // len(loads))


def test_when_all_are_loaded_the_least_loaded_leads() -> None:
    """What lies behind the bound stands by its load."""
    order = by_beginning(REPLICAS, "Hello", [9, 0, 30, 20])

    assert [REPLICAS.index(replica) for replica in order[-2:]] == [3, 2]
    assert set(order) == set(REPLICAS)


@given(st.floats(0, 1, exclude_max=True), st.lists(st.floats(0, 1), min_size=1, max_size=9), st.booleans())
def test_a_conversation_moves_to_a_new_version_once(draw: float, shares: list[float], falls: bool) -> None:
    """While the share rises; on the way back, while it falls, once too. Those of its version come first, then the
    others: none is left out."""
    new = frozenset(replica.endpoint.base_url for replica in REPLICAS[2:])
    at_new = []
    for share in sorted(shares, reverse=falls):
        parts = by_version(REPLICAS, VersionShare(share, new), draw)
        at_new.append(parts[0] == REPLICAS[2:])
        assert sorted(parts, key=lambda part: REPLICAS.index(part[0])) == [REPLICAS[:2], REPLICAS[2:]]

    assert at_new == sorted(at_new, reverse=falls)
    assert by_version(REPLICAS[2:], VersionShare(0.0, new), draw) == [REPLICAS[2:]]


IDLE = Standing(NOTHING_FOUND, 0, 0)


def placed(*standings: Standing, size: int = 8000) -> list[int]:
    return [REPLICAS.index(replica) for replica in by_work(REPLICAS[: len(standings)], standings, size)]


def test_a_prompt_goes_where_the_least_is_to_compute() -> None:
    """Cached beginnings and what waits there count in one measure, so a busy replica keeps only what is worth it."""
    cached = Found(6000, 6000.0)

    assert placed(IDLE, Standing(cached, 0, 0), IDLE) == [1, 0, 2]
    assert placed(IDLE, Standing(cached, 5000, 0), IDLE)[0] == 1
    assert placed(IDLE, Standing(cached, 7000, 0), IDLE)[0] == 0
    assert placed(Standing(Found(6000, 4500.0), 0, 0), Standing(cached, 0, 0))[0] == 1


def test_replicas_that_are_alike_keep_the_order_of_their_homes() -> None:
    """So that prompts which begin alike meet at one replica before it tells of them, at whichever gateway."""
    assert placed(IDLE, IDLE, IDLE, IDLE) == [0, 1, 2, 3]


def test_a_slow_replica_has_a_smaller_part_and_moves_no_other() -> None:
    """Its calls go to the others, evenly; under load its bound falls as well. What it has cached is no reason then."""
    address = REPLICAS[1].endpoint.base_url
    slow = {address: 3 * SLOW}
    moved = {opening: by_beginning(REPLICAS, opening, [0] * 4, slow)[0].endpoint.base_url for opening in OPENINGS}
    others = Counter(moved.values())

    assert all(home_of(opening) in (home, address) for opening, home in moved.items())
    assert 10 < others.pop(address) < 60 and all(270 < count < 380 for count in others.values())
    assert by_beginning(REPLICAS, "Hello", [3, 1, 3, 3], slow)[-1] is REPLICAS[1]
    assert placed(IDLE, Standing(Found(8000, 8000.0), 0, part=0.9)) == [0, 1]
    assert placed(Standing(NOTHING_FOUND, 8000), Standing(NOTHING_FOUND, 0, part=0.6))[0] == 1


def served(slowness: float, until: float, seed: int = 1, noise: float = 0.5) -> Counter[tuple[int, bool]]:
    """Serve two calls a second; the first replica answers so much later until that time. Return how many calls it, and
    the others, had in each half minute."""
    dice, lateness, numbers, now = random.Random(seed), Lateness(), count(), 0.0
    loads, calls = Counter[str](), Counter[tuple[int, bool]]()
    due: list[tuple[float, int, partial[None]]] = []
    while (now := now + dice.expovariate(2)) < 300:
        while due and due[0][0] <= now:
            heapq.heappop(due)[2]()
        running = [loads[replica.endpoint.base_url] for replica in REPLICAS[:3]]
        home = by_beginning(REPLICAS[:3], str(dice.random()), running, lateness.slow)[0]
        address, size = home.endpoint.base_url, 2 ** dice.uniform(9, 17)
        later = slowness if home is REPLICAS[0] and now < until else 1.0
        comes = now + (0.05 + size / 1e5) * math.exp(dice.gauss(0, noise)) * later
        waiting = lateness.begin(address, int(size), "normal", now)
        loads[address] += 1
        heapq.heappush(due, (comes, next(numbers), partial(lateness.note_first_token, waiting, comes)))
        heapq.heappush(due, (comes + dice.expovariate(1), next(numbers), partial(loads.subtract, [address])))
        calls[int(now // 30), home is REPLICAS[0]] += 1
    return calls


def test_a_replica_whose_first_tokens_come_late_is_sent_less_until_they_do_not() -> None:
    """Ten times as late: from a third of the calls to less than a sixth within half a minute; all of its part again a
    minute after it is well."""
    calls = served(10.0, 150.0)
    parts = [calls[at, True] / (calls[at, True] + calls[at, False]) for at in range(10)]

    assert max(parts[1:5]) < 1 / 6 and sum(parts[1:5]) / 4 < 1 / 8, parts
    assert min(parts[1:5]) > 0 and sum(parts[7:]) / 3 > 1 / 4, parts


@pytest.mark.parametrize("slowness", [1.0, 2.0])
def test_chance_makes_no_replica_slow(slowness: float) -> None:
    """First tokens of equal prompts differ sevenfold in a third of pairs here; and twice as late is no reason yet."""
    calls = served(slowness, 300.0, noise=1.0)
    share = sum(number for (_, first), number in calls.items() if first) / calls.total()

    assert 0.28 < share < 0.38


def test_a_call_that_still_waits_tells_as_well() -> None:
    """By the time that others' first tokens have long come: a replica that answers nothing is found before it does, and
    a call that was soon given up tells nothing."""
    lateness = Lateness()
    for at in range(4):
        lateness.note_first_token(lateness.begin("well", 100, "normal", at / 10), at / 10 + 0.05)
    left = [lateness.begin("other", 100, "normal", 1.0) for _ in range(4)]
    for waiting in left:
        lateness.end(waiting, 1.1)
    stuck = [lateness.begin("stuck", 100, "normal", 1.0) for _ in range(4)]
    lateness.begin("well", 100, "normal", 1.2)
    early = dict(lateness.slow)
    lateness.begin("well", 100, "normal", 3.0)
    found = dict(lateness.slow)
    for waiting in stuck:
        lateness.end(waiting, 3.0)
    lateness.begin("well", 100, "normal", 4.0)
    after = dict(lateness.slow)
    lateness.note_first_token(lateness.begin("other", 100, "normal", 1e6), 1e6 + 1)
    forgotten = dict(lateness.slow)
    lateness.slow = after
    lateness.keep({"well", "other"})

    assert (early, [*found], [*after], forgotten, lateness.slow) == ({}, ["stuck"], ["stuck"], {}, {})
